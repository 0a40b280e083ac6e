"""How sure a mean over prompts is; they are the independent units, pictures of one prompt are alike.

standard error    s / sqrt(n) over the prompts' means
interval          percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, ch. 13):
                  prompts are drawn anew with replacement, the interval holds the middle 95 % of the means.
                  Below some 20 prompts it is too narrow, as every such interval is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

LEVEL, RESAMPLES, SEED = 0.95, 10_000, 0
FEW_PROMPTS = 20
"""Fewer make intervals that cover noticeably less than they say."""
_DRAWN_AT_ONCE = 4_000_000

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Mean:
    """A mean over prompts.

    Attributes:
        mean, standard_error: NaN for no prompts, and an error for fewer than two.
        prompts: with at least one valid score. invalid: scores (pictures) that are no numbers, left out.
    """

    mean: float
    standard_error: float
    prompts: int
    invalid: int


@dataclass(frozen=True)
class Difference(Mean):
    """A mean of paired differences; low, high: its 95 % bootstrap interval, NaN for under two prompts."""

    low: float
    high: float


def prompt_means(scores: Array) -> Array:
    """[P, M] scores of M pictures a prompt -> [P] means over the finite ones; NaN where there is none."""
    known = np.isfinite(scores)
    count = known.sum(1)
    total = np.where(known, scores, 0.0).sum(1)
    means: Array = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return means


def mean_of(scores: Array) -> Mean:
    """Mean and standard error of scores [P, M]."""
    units = prompt_means(scores)
    units = units[np.isfinite(units)]
    n = len(units)
    mean = float(units.mean()) if n else math.nan
    error = float(units.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan
    return Mean(mean, error, n, int((~np.isfinite(scores)).sum()))


def difference_of(scores: Array, reference: Array) -> Difference:
    """Of scores [P, M] to those of the same prompts and seeds by the reference [P, M].

    A pair without both scores is left out, so that each difference is between pictures of one seed.
    """
    both = np.isfinite(scores) & np.isfinite(reference)
    gaps = np.where(both, np.where(both, scores, 0.0) - np.where(both, reference, 0.0), np.nan)
    one, units = mean_of(gaps), prompt_means(gaps)
    low, high = interval(units[np.isfinite(units)])
    return Difference(one.mean, one.standard_error, one.prompts, one.invalid, low, high)


def interval(
    values: Array, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = SEED
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of independent values [n]; NaN for fewer than two."""
    n = len(values)
    if n < 2:
        return math.nan, math.nan
    draws = np.random.default_rng(seed)
    means = np.empty(resamples)
    rows = max(1, _DRAWN_AT_ONCE // n)
    for low in range(0, resamples, rows):
        part = means[low : low + rows]
        part[:] = values[draws.integers(n, size=(len(part), n))].mean(1)
    edge = (1 - level) / 2
    lower, upper = np.quantile(means, (edge, 1 - edge))
    return float(lower), float(upper)


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Mean of what is a number, and the standard error of that mean."""
    known = values[values.isfinite()].double()
    error = (known.std() / len(known) ** 0.5).item() if len(known) > 1 else math.nan
    return known.mean().item(), error
