"""Uncertainty of means. Over prompts, a prompt is the independent unit: images of one prompt are correlated.

standard error    s / sqrt(n), over the means per prompt
interval          percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, ch. 13):
                  prompts are resampled with replacement; the interval is the middle 95 % of their means.
                  With fewer than about 20 prompts it is too narrow, as every such interval is.
                  Over the few seeds of a comparison it is Student's t interval of the mean instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

LEVEL, RESAMPLES, SEED = 0.95, 10_000, 0
FEW_PROMPTS = 20
"""With fewer prompts, intervals cover the true mean noticeably less often than stated."""
_RESAMPLED_AT_ONCE = 4_000_000

# 97.5 % quantiles of Student's t with 1, 2, … 30 degrees of freedom.
_STUDENT = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
_NORMAL = 1.959964

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Mean:
    """Mean score over prompts.

    Attributes:
        mean: NaN without prompts.
        standard_error: NaN for fewer than two prompts.
        prompts: number of prompts with at least one finite score.
        invalid: number of images without a finite score; they are excluded.
    """

    mean: float
    standard_error: float
    prompts: int
    invalid: int


@dataclass(frozen=True)
class Difference(Mean):
    """Mean of paired differences over prompts.

    Attributes:
        low, high: 95 % bootstrap interval of the mean, NaN for fewer than two prompts.
    """

    low: float
    high: float


def prompt_means(scores: Array) -> Array:
    """Mean over the finite scores of each prompt.

    Args:
        scores: [P, M], M images per prompt.

    Returns:
        [P]; NaN for prompts without a finite score.
    """
    valid = np.isfinite(scores)
    count = valid.sum(1)
    total = np.where(valid, scores, 0.0).sum(1)
    means: Array = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return means


def mean_and_error(values: Array | Tensor) -> tuple[Any, Any]:
    """Mean over the first axis and its standard error, s / sqrt(n) with n - 1 in the variance.

    Args:
        values: [n] or [n, ...], float64. Arrays and tensors keep their own library's order of summation.

    Returns:
        Mean and error, without the first axis; NaN where n is below 1 and 2.
    """
    n = len(values)
    if n == 0:
        return math.nan, math.nan
    if n == 1:
        return values.mean(0), math.nan
    std: Any = values.std(0) if isinstance(values, Tensor) else values.std(0, ddof=1)
    return values.mean(0), std / math.sqrt(n)


def mean_over_prompts(scores: Array) -> Mean:
    """Mean and standard error over prompts of scores [P, M], M images per prompt."""
    units = prompt_means(scores)
    units = units[np.isfinite(units)]
    mean, error = map(float, mean_and_error(units))
    return Mean(mean, error, len(units), int((~np.isfinite(scores)).sum()))


def difference_over_prompts(scores: Array, reference: Array) -> Difference:
    """Mean paired difference of scores [P, M] to the reference's scores [P, M] of the same prompts and seeds.

    A pair without both scores is excluded, so that each difference is between images of the same seed.
    """
    paired = np.isfinite(scores) & np.isfinite(reference)
    gaps = np.where(paired, np.where(paired, scores, 0.0) - np.where(paired, reference, 0.0), np.nan)
    gap, units = mean_over_prompts(gaps), prompt_means(gaps)
    low, high = interval(units[np.isfinite(units)])
    return Difference(gap.mean, gap.standard_error, gap.prompts, gap.invalid, low, high)


def interval(
    values: Array, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = SEED
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of independent values [n]; NaN for fewer than two."""
    n = len(values)
    if n < 2:
        return math.nan, math.nan
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    rows = max(1, _RESAMPLED_AT_ONCE // n)
    for low in range(0, resamples, rows):
        part = means[low : low + rows]
        part[:] = values[generator.integers(n, size=(len(part), n))].mean(1)
    edge = (1 - level) / 2
    lower, upper = np.quantile(means, (edge, 1 - edge))
    return float(lower), float(upper)


def student_interval(mean: float, standard_error: float, n: int) -> tuple[float, float]:
    """95 % interval of the mean of n independent normal values, for few values; NaN for fewer than two.

    Above 30 degrees of freedom v the quantile is z + (z^3 + z) / (4 v), which is exact to 0.001.
    """
    if n < 2:
        return math.nan, math.nan
    freedom = n - 1
    quantile = (
        _STUDENT[freedom - 1]
        if freedom <= len(_STUDENT)
        else _NORMAL + (_NORMAL**3 + _NORMAL) / (4 * freedom)
    )
    return mean - quantile * standard_error, mean + quantile * standard_error
