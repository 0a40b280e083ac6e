"""Falls of a metric during a run: its change since the best evaluation, with a standard error.

All evaluations of a run have the same prompts and seeds, so the differences of their images are paired.
The *reference* is the highest evaluation so far if its gain is significant, by GAIN_Z standard errors, and
the first one otherwise: the highest of several noisy means is too high by chance, and what was not gained
cannot be lost. The change since the reference is

    z = mean of the paired differences / their standard error

where the error is at least that of the paired gains since the first evaluation. Images of neighbouring
evaluations are nearly equal, and the error of their difference leaves out how far a policy wanders by chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from g2rpo.evaluation.stats import mean_and_error

Array = NDArray[np.float64]

GAIN_Z = 2.0
"""Standard errors from which a gain is one."""
SMALLEST_FALL = 0.2
"""Share of the gain that a fall must reach; further falls are found, however small, if there was no gain."""
FEWEST_IMAGES = 16
"""With fewer images the standard error is too uncertain, and the evaluations decide nothing."""


@dataclass(frozen=True)
class Evaluation:
    """Per-image values of one evaluation; all evaluations of a run have the same images in the same order.

    Attributes:
        step: iterations that were finished.
        scores: name of a reward -> [N]; NaN = no score.
        statistics: name of an image statistic -> [N].
        first_images: name of a trained reward -> its scores now of the images from before training, [n].
        repeated: as first_images, of a second call; only before training.
    """

    step: int
    scores: Mapping[str, Array]
    statistics: Mapping[str, Array] = field(default_factory=dict)
    first_images: Mapping[str, Array] = field(default_factory=dict)
    repeated: Mapping[str, Array] = field(default_factory=dict)


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
    """The change of a metric since its reference.

    Attributes:
        best_step: iteration of the reference.
        change: from the reference to the last evaluation, paired.
        gain: from the first evaluation to the reference; 0 if the reference is the first one.
    """

    best_step: int
    change: Difference
    gain: float

    @property
    def size(self) -> float:
        """The fall in standard errors; -inf if it is none, or too small a part of the gain."""
        z, lost = self.change.z, -self.change.mean
        return -z if z < 0 and lost >= SMALLEST_FALL * self.gain else -math.inf


def paired(now: Array, before: Array) -> Difference:
    """The mean difference of two evaluations of the same images."""
    gaps = now - before
    gaps = gaps[np.isfinite(gaps)]
    mean, error = mean_and_error(gaps) if len(gaps) >= FEWEST_IMAGES else (math.nan, math.nan)
    return Difference(float(mean), float(error), len(gaps))


def change_since(values: Sequence[Array], then: int, first: int = 0) -> Difference:
    """The change from evaluation `then` to the last one; its error is at least those of the two gains."""
    change = paired(values[-1], values[then])
    gains = [paired(values[-1], values[first]).error, paired(values[then], values[first]).error]
    largest = max([change.error, *(error for error in gains if math.isfinite(error))])
    return Difference(change.mean, largest, change.pairs)


def fall(values: Sequence[Array], evaluations: Sequence[Evaluation]) -> Fall | None:
    """The change of a metric at the last of its `values` [N]; None: there is nothing to compare it with."""
    means = [_mean(value) for value in values[:-1]]
    known = [i for i, mean in enumerate(means) if math.isfinite(mean)]
    if not known:
        return None
    first, best = known[0], max(known, key=lambda i: means[i])
    reference = best if paired(values[best], values[first]).z >= GAIN_Z else first
    change = change_since(values, reference, first)
    return Fall(evaluations[reference].step, change, means[reference] - means[first])


def recent_falls(values: Sequence[Array], evaluations: Sequence[Evaluation], most: int) -> list[Fall]:
    """What `fall` says of the last evaluations, of at most `most`, the latest first."""
    ends = range(len(values), max(len(values) - most, 0), -1)
    return [found for end in ends if (found := fall(values[:end], evaluations)) is not None]


def excess(falls: Sequence[Fall], levels: Sequence[float]) -> float:
    """By how many standard errors falls, the latest first, are beyond what is needed; confirmed from 0 on.

    Args:
        falls: of the last evaluations.
        levels: standard errors needed at one evaluation, at each of two in a row, and so on.
    """
    sizes = [found.size for found in falls]
    return max(
        (min(sizes[:n]) - level for n, level in enumerate(levels, 1) if n <= len(sizes)), default=-math.inf
    )


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
