"""The rule of the guard: when the evaluations of a run say that it fails. Pure functions of the scores.

falls.py says by how many standard errors a metric has *fallen* since its best evaluation. One evaluation can
be unlucky, so a fall is *confirmed* by several in a row, fewer the larger it is: the levels below.

    reward hacking   an untrained metric has fallen, confirmed, while a trained one is not lower than then
    collapse         the trained rewards together have fallen, confirmed; or an untrained metric has, and the
                     trained ones together have fallen since then by ALSO_FALLEN standard errors. If they have
                     fallen by less, what happens is unclear, and the untrained metric must fall by as much
                     as one evaluation alone needs
    reward drift     a trained reward gives the images from before training other scores than then, by more
                     than its noise explains, at two evaluations in a row
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

from g2rpo.evaluation.stats import mean_and_error
from g2rpo.training.falls import (
    Array,
    Difference,
    Evaluation,
    Fall,
    change_since,
    combined,
    excess,
    fall,
    paired,
    recent_falls,
)

TRAINED_LEVELS = (3.0, 2.0)
"""Standard errors by which the trained rewards together must fall at one evaluation, or at each of two."""
UNTRAINED_LEVELS = (6.0, 2.5, 2.0)
"""As TRAINED_LEVELS, for an untrained metric, at one, two or three evaluations in a row.

Each of several metrics can be a false alarm, and in the first iterations of a healthy run one may dip by four
standard errors and rise again.
"""
ALSO_FALLEN = 1.5
"""Standard errors from which the trained rewards count as fallen beside an untrained metric."""
SIGN = min(*TRAINED_LEVELS, *UNTRAINED_LEVELS)
"""Standard errors of a first sign, at which the best checkpoint is kept."""

BLOCK = 10
"""Iterations whose means are compared where a run has no evaluations."""
BLOCK_Z, CLEAR_BLOCK_Z = 3.5, 7.0
"""Standard errors at two blocks in a row, or at one: ten unpaired means have an uncertain error."""

SMALLEST_SPREAD = 0.3
"""Spread within the groups, relative to the first block, below which the samples no longer differ."""
LATENT_LIMITS = (0.6, 1.6)
"""Root mean square of the latents relative to the first block."""

DRIFT_SHARE, DRIFT_NOISE = 0.05, 4.0
"""A reward has drifted if the scores of the same images changed, in root mean square, by DRIFT_SHARE of their
standard deviation over the images, and by DRIFT_NOISE times what two calls before training differed by."""
FEWEST_FIRST_IMAGES = 8

HACKING, COLLAPSE, DRIFT = "reward_hacking", "collapse", "reward_drift"


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


def fall_scores(
    evaluations: Sequence[Evaluation], trained: Mapping[str, float], untrained: Sequence[str]
) -> dict[str, float]:
    """z of the change since the best evaluation: untrained metrics by name, and "trained"; for metrics."""
    values: dict[str, float] = {}
    for name, series in _series(evaluations, trained, untrained).items():
        found = fall(series, evaluations)
        if found is not None and math.isfinite(found.change.z):
            values[name] = found.change.z
    return values


def pending_best(
    evaluations: Sequence[Evaluation], trained: Mapping[str, float], untrained: Sequence[str]
) -> int | None:
    """Iteration of the best evaluation by a metric that has fallen, confirmed or not, by however little.

    None: no metric has.
    """
    for values in _series(evaluations, trained, untrained).values():
        found = fall(values, evaluations)
        if found is not None and found.change.z <= -SIGN:
            return found.best_step
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
    found: list[Finding] = []
    for name, (own, beyond) in confirmations(evaluations, trained, untrained).items():
        if beyond < 0:
            continue
        if name == TRAINED:
            found.append(_finding(COLLAPSE, " + ".join(trained), own, "the trained reward is falling", ""))
        elif risen := _risen(evaluations, trained, own.best_step):
            text = ", while these trained rewards did not fall: " + "; ".join(
                f"{n} {d}" for n, d in risen.items()
            )
            found.append(_finding(HACKING, name, own, "the run may exploit its reward", text))
        else:
            text = ", and so did all trained rewards" if trained else ""
            found.append(_finding(COLLAPSE, name, own, "the policy is getting worse", text))
    return found


def reward_drifts(evaluations: Sequence[Evaluation]) -> dict[str, tuple[float, float]]:
    """How much the trained rewards changed between the first and the last evaluation.

    Returns:
        reward -> root mean square change of the scores of the images from before training, and the limit from
        which it counts; both relative to the standard deviation over the images before training. A reward
        without a spread, or with too few scores, is left out.
    """
    drifts: dict[str, tuple[float, float]] = {}
    if len(evaluations) < 2:
        return drifts
    before, now = evaluations[0], evaluations[-1]
    for name, scores in now.first_images.items():
        first, again = before.first_images.get(name), before.repeated.get(name)
        if first is None or again is None or not len(first) == len(again) == len(scores):
            continue
        scored = np.isfinite(first) & np.isfinite(again) & np.isfinite(scores)
        if scored.sum() < FEWEST_FIRST_IMAGES or not (spread := first[scored].std(ddof=1)) > 0:
            continue
        change = _rms(scores[scored] - first[scored]) / spread
        noise = _rms(again[scored] - first[scored]) / spread
        drifts[name] = change, max(DRIFT_SHARE, DRIFT_NOISE * noise)
    return drifts


def drift_findings(evaluations: Sequence[Evaluation]) -> list[Finding]:
    """Trained rewards that have drifted at the last two evaluations."""
    now, before = reward_drifts(evaluations), reward_drifts(evaluations[:-1])
    return [
        Finding(
            DRIFT,
            name,
            "the trained reward is no longer what it was at the start: "
            f"{name} gives the images from before training scores that differ by {change:.3f} times their "
            f"standard deviation (limit {limit:.3f})",
            details={"change": change, "limit": limit},
        )
        for name, (change, limit) in now.items()
        if change > limit and name in before and before[name][0] > before[name][1]
    ]


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def confirmations(
    evaluations: Sequence[Evaluation], trained: Mapping[str, float], untrained: Sequence[str]
) -> dict[str, tuple[Fall, float]]:
    """By metric: its change at the last evaluation, and by how many standard errors it is beyond a warning.

    A metric that would need a larger fall for a warning has a negative number. "trained" comes first.
    """
    series = _series(evaluations, trained, untrained)
    values: dict[str, tuple[Fall, float]] = {}
    for name in sorted(series, key=lambda name: name != TRAINED):
        levels: tuple[float, ...] = TRAINED_LEVELS if name == TRAINED else UNTRAINED_LEVELS
        falls = recent_falls(series[name], evaluations, len(levels))
        if not falls:
            continue
        if name != TRAINED and trained and not _risen(evaluations, trained, falls[0].best_step):
            then = next(i for i, e in enumerate(evaluations) if e.step == falls[0].best_step)
            if change_since(series[TRAINED], then).z > -ALSO_FALLEN:
                levels = levels[:1]
        values[name] = falls[0], excess(falls, levels)
    return values


def _risen(
    evaluations: Sequence[Evaluation], trained: Mapping[str, float], since: int
) -> dict[str, Difference]:
    """The trained rewards that are not lower than after iteration `since`, and their changes."""
    then = next(e for e in evaluations if e.step == since)
    changes = {name: paired(evaluations[-1].scores[name], then.scores[name]) for name in trained}
    return {name: change for name, change in changes.items() if change.mean * trained[name] >= 0}


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
