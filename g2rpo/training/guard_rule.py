"""The rule of the guard: when the evaluations of a run say that it fails. Pure functions of the scores.

A metric has *fallen* at an evaluation if, compared on the same prompts and seeds with its highest evaluation
before,

    z = mean of the paired differences / their standard error <= -FALL_Z

where the error is at least that of the paired gains since the first evaluation (see `fall_of`), and the
fall is at least SMALLEST_FALL of what the metric had gained by then. A fall is *confirmed* if the evaluation
before found one too, or if z <= -CLEAR_FALL_Z. A slow fall is confirmed by SUSTAINED evaluations in a row
with z <= -SUSTAINED_Z that lost as large a share. The highest of several noisy means is too high by chance,
and one evaluation can be unlucky, hence the conditions.

    reward hacking   an untrained metric has fallen, confirmed, while a trained one is not lower than then
    collapse         the trained rewards together have fallen, confirmed, or an untrained one and all trained
    images           an image statistic is beyond its limit at two evaluations in a row
    rollouts         the mean of an iteration's trained rewards, the spread within the groups, or the size of
                     the latents left its limits for two blocks of iterations in a row

docs/guard.md says on which runs the constants were set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g2rpo.evaluation.stats import mean_and_error

Array = NDArray[np.float64]

FALL_Z, CLEAR_FALL_Z = 2.5, 3.8
SUSTAINED_Z, SUSTAINED = 2.0, 3
SMALLEST_FALL = 0.2
"""Share of the gain that a fall must reach; further falls are found, however small, if there was no gain."""

FEWEST_IMAGES = 16
"""With fewer images the standard error is too uncertain, and the evaluations decide nothing."""

BLOCK = 10
"""Iterations whose means are compared where a run has no evaluations."""
BLOCK_Z, CLEAR_BLOCK_Z = 3.5, 7.0
"""As FALL_Z and CLEAR_FALL_Z, for blocks: ten unpaired means have a less certain error."""

SMALLEST_SPREAD = 0.3
"""Spread within the groups, relative to the first block, below which the samples no longer differ."""
LATENT_LIMITS = (0.6, 1.6)
"""Root mean square of the latents relative to the first block."""

HACKING, COLLAPSE = "reward_hacking", "collapse"


@dataclass(frozen=True)
class Evaluation:
    """Per-image values of one evaluation; all evaluations of a run have the same images in the same order.

    Attributes:
        step: iterations that were finished.
        scores: name of a reward -> [N]; NaN = no score.
        statistics: name of an image statistic -> [N].
    """

    step: int
    scores: Mapping[str, Array]
    statistics: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: short name, as in warnings.jsonl.
        metric: the metric or the statistic that shows it.
        message: what was found, for the console.
        best_step: iteration of the best evaluation by that metric; -1: it does not name one.
        details: numbers for warnings.jsonl.
    """

    kind: str
    metric: str
    message: str
    best_step: int = -1
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences between two evaluations.

    Attributes:
        mean, error: NaN where there are fewer than FEWEST_IMAGES pairs.
        pairs: images with a score in both.
    """

    mean: float
    error: float
    pairs: int

    @property
    def z(self) -> float:
        """The mean in standard errors; 0 without a difference, NaN if it is not known."""
        if self.mean == 0:
            return 0.0
        return math.copysign(math.inf, self.mean) if self.error == 0 else self.mean / self.error

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.error:.4f} over {self.pairs} images"


@dataclass(frozen=True)
class Fall:
    """The change of a metric since its highest evaluation.

    Attributes:
        best_step: iteration of that evaluation.
        change: to the current one, paired.
        gain: from the first evaluation to the highest.
    """

    best_step: int
    change: Difference
    gain: float

    @property
    def is_fall(self) -> bool:
        """Whether the metric has fallen, by the rule."""
        return self.reaches(FALL_Z)

    def reaches(self, z: float) -> bool:
        """Whether it is a fall by `z` standard errors and by the smallest share of the gain."""
        return self.change.z <= -z and -self.change.mean >= SMALLEST_FALL * self.gain

    @property
    def is_clear(self) -> bool:
        """Whether one evaluation is enough to confirm it."""
        return self.is_fall and self.change.z <= -CLEAR_FALL_Z


def paired(now: Array, before: Array) -> Difference:
    """The mean difference of two evaluations of the same images."""
    gaps = now - before
    gaps = gaps[np.isfinite(gaps)]
    mean, error = mean_and_error(gaps) if len(gaps) >= FEWEST_IMAGES else (math.nan, math.nan)
    return Difference(float(mean), float(error), len(gaps))


def fall_of(values: Sequence[Array]) -> tuple[int, Difference, float] | None:
    """Index of the highest evaluation before the last, the change since, and the gain by then.

    The error of the change is at least that of the gains since the first evaluation: images of neighbouring
    evaluations are nearly equal, and their own error leaves out how far a policy wanders by chance.
    None: there are fewer than two evaluations, or none before the last has a mean.
    """
    means = [_mean(value) for value in values[:-1]]
    known = [i for i, mean in enumerate(means) if math.isfinite(mean)]
    if not known:
        return None
    first, best = known[0], max(known, key=lambda i: means[i])
    change = paired(values[-1], values[best])
    errors = [paired(values[-1], values[first]).error, paired(values[best], values[first]).error]
    largest = max([change.error, *(error for error in errors if math.isfinite(error))])
    return best, Difference(change.mean, largest, change.pairs), means[best] - means[first]


def _mean(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) >= FEWEST_IMAGES else math.nan


def combined(evaluations: Sequence[Evaluation], weights: Mapping[str, float]) -> list[Array]:
    """The weighted sum of the trained rewards of each evaluation, each in its own spread over the images."""
    total = [np.zeros_like(next(iter(e.scores.values()))) for e in evaluations]
    for name, weight in weights.items():
        first = evaluations[0].scores[name]
        spread = float(first[np.isfinite(first)].std()) if np.isfinite(first).any() else 0.0
        scale = weight / spread if spread > 0 else weight
        for i, evaluation in enumerate(evaluations):
            total[i] = total[i] + scale * evaluation.scores[name]
    return total


def fall(series: Sequence[Array], evaluations: Sequence[Evaluation]) -> Fall | None:
    """The fall of a metric at the last evaluation, given its values [N] at each; None: nothing to compare."""
    found = fall_of(series)
    return None if found is None else Fall(evaluations[found[0]].step, found[1], max(found[2], 0.0))


def _confirmed(series: Sequence[Array], evaluations: Sequence[Evaluation]) -> Fall | None:
    """The fall at the last evaluation, if it is confirmed."""
    ends = range(len(series), max(len(series) - SUSTAINED, 0), -1)
    falls = [found for end in ends if (found := fall(series[:end], evaluations)) is not None]
    if not falls:
        return None
    if falls[0].is_clear or (len(falls) > 1 and falls[0].is_fall and falls[1].is_fall):
        return falls[0]
    return falls[0] if len(falls) == SUSTAINED and all(f.reaches(SUSTAINED_Z) for f in falls) else None


def fall_scores(
    evaluations: Sequence[Evaluation], trained: Mapping[str, float], untrained: Sequence[str]
) -> dict[str, float]:
    """z of the change since the best evaluation: untrained metrics by name, and "trained"; for metrics."""
    values: dict[str, float] = {}
    for name, series in _series(evaluations, trained, untrained).items():
        found = fall_of(series)
        if found is not None and math.isfinite(found[1].z):
            values[name] = found[1].z
    return values


def pending_best(
    evaluations: Sequence[Evaluation], trained: Mapping[str, float], untrained: Sequence[str]
) -> int | None:
    """Iteration of the best evaluation by a metric that has fallen, confirmed or not, by however little.

    None: no metric has.
    """
    for values in _series(evaluations, trained, untrained).values():
        found = fall_of(values)
        if found is not None and found[1].z <= -FALL_Z:
            return evaluations[found[0]].step
    return None


TRAINED = "trained"
"""Name of the combined trained rewards among the metrics."""


def _series(
    evaluations: Sequence[Evaluation], trained: Mapping[str, float], untrained: Sequence[str]
) -> dict[str, list[Array]]:
    series = {name: [e.scores[name] for e in evaluations] for name in untrained}
    return series | {TRAINED: combined(evaluations, trained)} if trained else series


def reward_findings(
    evaluations: Sequence[Evaluation], trained: Mapping[str, float], untrained: Sequence[str]
) -> list[Finding]:
    """What the rewards of the last evaluation say, given those before it.

    Args:
        evaluations: of the same images, in order of their steps, the first one usually before training.
        trained: name -> weight of the trained rewards; a negative weight lowers the reward.
        untrained: names of the metrics that are not trained, of which more is better.
    """
    if len(evaluations) < 2:
        return []
    series = _series(evaluations, trained, untrained)
    found: list[Finding] = []
    confirmed = {name: _confirmed(values, evaluations) for name, values in series.items()}
    if (together := confirmed.get(TRAINED)) is not None:
        names = " + ".join(trained)
        found.append(_finding(COLLAPSE, names, together, "the trained reward is falling", ""))
    for name in untrained:
        if (own := confirmed.get(name)) is None:
            continue
        best = next(e for e in evaluations if e.step == own.best_step)
        changes = {reward: paired(evaluations[-1].scores[reward], best.scores[reward]) for reward in trained}
        risen = {n: d for n, d in changes.items() if d.mean * trained[n] >= 0}
        if risen:
            others = "; ".join(f"{n} {d}" for n, d in risen.items())
            text = f", while what is trained did not fall: {others}"
            found.append(_finding(HACKING, name, own, "the run may exploit its reward", text))
        else:
            text = ", and so did all that is trained" if trained else ""
            found.append(_finding(COLLAPSE, name, own, "the policy is getting worse", text))
    return found


def _finding(kind: str, metric: str, found: Fall, summary: str, rest: str) -> Finding:
    since = f"since iteration {found.best_step}" if found.best_step else "since before training"
    message = f"{summary}: {metric} fell {since} ({found.change}){rest}"
    details = {
        "change": found.change.mean,
        "standard_error": found.change.error,
        "images": found.change.pairs,
        "gain_before": found.gain,
    }
    return Finding(kind, metric, message, found.best_step, details)


# Limits of the mean of a statistic at two evaluations in a row, relative to the first evaluation.
GRID_FACTOR, GRID_AMOUNT = 2.0, 0.01
BLUR_FACTOR = 0.6
SATURATION_AMOUNT = 0.15


def _beyond(name: str, first: float, now: float) -> str:
    """What a statistic says of the images; "" if it is within its limits."""
    if name == "grid" and now >= GRID_FACTOR * first and now - first >= GRID_AMOUNT:
        return "the images have a repeating pattern that they did not have before training"
    if name == "sharpness" and now <= BLUR_FACTOR * first:
        return "the images are blurred"
    if name == "saturation" and now - first >= SATURATION_AMOUNT:
        return "more of the images is clipped or fully saturated"
    return ""


KIND_OF_STATISTIC = {"grid": "grid", "sharpness": "blur", "saturation": "saturation"}


def image_findings(evaluations: Sequence[Evaluation]) -> list[Finding]:
    """Image statistics that are beyond their limits at the last two evaluations."""
    found: list[Finding] = []
    if len(evaluations) < 3:
        return found
    for name, kind in KIND_OF_STATISTIC.items():
        if any(name not in e.statistics for e in (evaluations[0], *evaluations[-2:])):
            continue
        first, before, now = (_any_mean(e.statistics[name]) for e in (evaluations[0], *evaluations[-2:]))
        text = _beyond(name, first, now)
        if text and _beyond(name, first, before):
            message = f"{text}: {name} {first:.4f} before, {now:.4f} now"
            found.append(Finding(kind, name, message, details={"before": first, "now": now}))
    return found


def _any_mean(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def rollout_findings(
    lines: Sequence[Mapping[str, Any]], trained: Mapping[str, float], evaluated: bool
) -> list[Finding]:
    """What the metrics of the iterations say, in blocks of BLOCK iterations.

    Args:
        lines: metrics of the iterations, in order, from the first on.
        trained: name -> weight of the trained rewards.
        evaluated: the run has evaluations, which show the rewards better than different prompts do.
    """
    blocks = [lines[i : i + BLOCK] for i in range(0, len(lines) - BLOCK + 1, BLOCK)]
    if len(blocks) < 3:
        return []
    found = [] if evaluated else _reward_blocks(blocks, trained)
    for key, kind, text, low, high in (
        ("guard/group_spread", "diversity", "the images of a group hardly differ", SMALLEST_SPREAD, math.inf),
        ("guard/latent_rms", "latents", "the size of the latents has changed", *LATENT_LIMITS),
    ):
        means = [_block_mean(block, key) for block in (blocks[0], *blocks[-2:])]
        if not all(math.isfinite(mean) for mean in means) or means[0] <= 0:
            continue
        ratios = [mean / means[0] for mean in means[1:]]
        if all(r < low for r in ratios) or all(r > high for r in ratios):
            message = f"{text}: {key} is {ratios[-1]:.2f} times that of the first {BLOCK} iterations"
            found.append(Finding(kind, key, message, details={"before": means[0], "now": means[-1]}))
    return found


def _block_mean(block: Sequence[Mapping[str, Any]], key: str) -> float:
    values = [line[key] for line in block if line.get(key) is not None]
    return sum(values) / len(values) if values else math.nan


def _reward_blocks(
    blocks: Sequence[Sequence[Mapping[str, Any]]], trained: Mapping[str, float]
) -> list[Finding]:
    """Collapse of the rollouts' rewards, for runs without evaluations: blocks are not paired."""
    found = []
    for name, weight in trained.items():
        key = f"reward/{name}"
        values = [np.array([line.get(key, math.nan) for line in b], dtype=float) for b in blocks]
        values = [math.copysign(1.0, weight) * v for v in values]
        z = [_block_z(values[:end]) for end in (len(values) - 1, len(values))]
        if z[-1] <= -CLEAR_BLOCK_Z or max(z) <= -BLOCK_Z:
            message = (
                f"the trained reward is falling: {key} of the last {BLOCK} iterations is {-z[-1]:.1f} "
                "standard errors below its best before"
            )
            found.append(Finding(COLLAPSE, key, message, details={"z": z[-1]}))
    return found


def _block_z(values: Sequence[Array]) -> float:
    """The last block's mean minus the best one's before, in standard errors of the difference."""
    if len(values) < 2:
        return 0.0
    pairs = [mean_and_error(v[np.isfinite(v)]) for v in values]
    known = [(float(mean), float(error)) for mean, error in pairs[:-1] if math.isfinite(error)]
    mean, error = map(float, pairs[-1])
    if not known or not math.isfinite(error):
        return 0.0
    best, best_error = max(known)
    size = math.hypot(error, best_error)
    return (mean - best) / size if size > 0 else 0.0
