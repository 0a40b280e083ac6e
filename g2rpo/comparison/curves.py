"""Curves of several runs: means over seeds, values at equal cost, and when one arm reaches another.

A curve consists of points (iteration, cumulative costs, value). Costs are those of the iterations, without
evaluations, loading and checkpoints: `nfe`, the rollout's forwards; `compute`, these and the update's
(`nfe_update`: a training row counts as three forwards or more); `seconds`. Higher values count as better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from g2rpo.evaluation.stats import mean_and_error

AXES = ("step", "nfe", "compute", "seconds")
COST = "compute"
"""The axis of equal cost, where one number per arm is wanted."""
COMPARED = ("reward/", "eval/", "eval_gain/")
SMOOTHED = (
    "reward/"  # prompts change with every iteration; evaluations have fixed prompts and are not smoothed
)


@dataclass(frozen=True)
class Curve:
    """One metric of one run.

    Attributes:
        x: AXES name -> [n] float64, non-decreasing.
        y: values, [n] float64, finite.
    """

    x: Mapping[str, np.ndarray]
    y: np.ndarray

    def at(self, axis: str, position: float) -> float:
        """Interpolates the value linearly at a position on an axis; NaN outside the measured range."""
        return float(np.interp(position, self.x[axis], self.y, left=np.nan, right=np.nan))


@dataclass(frozen=True)
class Stat:
    """Mean over seeds.

    Attributes:
        mean: NaN without seeds.
        se: standard error, NaN for fewer than two seeds.
        n: number of seeds.
    """

    mean: float
    se: float
    n: int


@dataclass(frozen=True)
class Band:
    """Mean curve over seeds, with a band around it.

    Attributes:
        x: AXES name -> [n]: iterations, and the seeds' mean costs up to each.
        mean: [n].
        low, high: [n], mean -+ one standard error; for two seeds the smaller and the larger value; for one
            seed the mean.
        seeds: number of seeds.
    """

    x: Mapping[str, np.ndarray]
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int


def curves_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Reads the curve of each metric from the lines of a metrics.jsonl; nulls are left out.

    Returns:
        Metric -> curve, for metrics with at least one point.

    Raises:
        ValueError: a line without nfe_update, as in runs of an earlier version.
    """
    trained = sorted((line for line in lines if "nfe" in line), key=lambda line: line["step"])
    steps = [0, *(line["step"] for line in trained)]
    totals = {axis: np.cumsum([0.0, *(cost(line, axis) for line in trained)]) for axis in AXES[1:]}
    points: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith(COMPARED) and value is not None and math.isfinite(value):
                points.setdefault(name, {})[line["step"]] = float(value)
    for name, values in points.items():  # a gain is 0 at step 0 if its evaluation has a value there
        if name.startswith("eval_gain/") and 0 in points.get(name.replace("eval_gain/", "eval/", 1), {}):
            values.setdefault(0, 0.0)
    curves = {}
    for name, values in points.items():
        step = np.array(sorted(values), dtype=float)
        # An iteration without a line of its own has the costs of the last one before it.
        rows = np.searchsorted(steps, step, side="right") - 1
        x = {"step": step, **{axis: total[rows] for axis, total in totals.items()}}
        curves[name] = Curve(x, np.array([values[int(s)] for s in step]))
    return curves


def cost(line: Mapping[str, Any], axis: str) -> float:
    """Returns the cost of one iteration on an axis other than "step".

    Args:
        line: of metrics.jsonl.

    Raises:
        ValueError: the line has no nfe_update, as in runs of an earlier version.
    """
    if axis != "compute":
        return float(line[axis])
    if "nfe_update" not in line:
        raise ValueError(
            f"iteration {line['step']} has no nfe_update, because an earlier version of g2rpo trained this "
            "run; train the run again"
        )
    return float(line["nfe"]) + float(line["nfe_update"])


def smoothed(curve: Curve, axis: str, width: float) -> Curve:
    """Returns trailing means over a window of fixed width on an axis, so that equal costs are averaged.

    The point at x is the mean of those in (x - width, x]. The first one is where the whole window is on the
    axis, which begins at 0; a curve that ends before has one point, the mean of all.

    Args:
        width: in units of the axis; below the distance of two points, nothing is averaged.
    """
    x = curve.x[axis]
    rounding = 1e-9 * float(x[-1])
    starts = np.minimum(np.searchsorted(x, x - width + rounding, side="right"), np.arange(len(x)))
    kept = np.flatnonzero(x >= width - rounding)
    if not len(kept):
        kept, starts = np.array([len(x) - 1]), np.zeros(len(x), dtype=int)
    means = np.array([curve.y[starts[i] : i + 1].mean() for i in kept])
    return Curve({name: values[kept] for name, values in curve.x.items()}, means)


def stat(values: Sequence[float]) -> Stat:
    """Computes mean and standard error over seeds, with n - 1 in the variance."""
    mean, error = mean_and_error(np.asarray(values, dtype=np.float64))
    return Stat(float(mean), float(error), len(values))


def paired(values: Mapping[int, float], first: Mapping[int, float]) -> Stat:
    """Computes the mean difference to `first`, paired by seed, over the seeds that both have."""
    return stat([values[seed] - first[seed] for seed in values if seed in first])


def band(curves: Sequence[Curve]) -> Band:
    """Computes the mean over seeds at the iterations that all reached and at least one has a point at.

    Curves are interpolated linearly between their points. Without a common iteration the band is empty.
    """
    low = max(curve.x["step"][0] for curve in curves)
    high = min(curve.x["step"][-1] for curve in curves)
    steps = np.unique(np.concatenate([curve.x["step"] for curve in curves]))
    steps = steps[(steps >= low) & (steps <= high)]
    values = np.stack([np.interp(steps, curve.x["step"], curve.y) for curve in curves])
    x = {
        axis: np.mean([np.interp(steps, curve.x["step"], curve.x[axis]) for curve in curves], axis=0)
        for axis in AXES
    }
    mean, error = mean_and_error(values)
    if len(curves) < 3:
        return Band(x, mean, values.min(0), values.max(0), len(curves))
    return Band(x, mean, mean - error, mean + error, len(curves))


def common_end(arms: Sequence[Sequence[Curve]], axis: str) -> float:
    """Returns the largest iteration, or cost, that every run of every arm reached."""
    return float(min(curve.x[axis][-1] for curves in arms for curve in curves))


@dataclass(frozen=True)
class Reach:
    """The cost at which arm A reaches the best value of arm B.

    Attributes:
        best: highest value of B's mean curve.
        own: AXES name -> position at which B first has it.
        reached: AXES name -> position at which A first has it; None: never.
    """

    best: float
    own: Mapping[str, float]
    reached: Mapping[str, float] | None

    def share(self, axis: str) -> float | None:
        """Returns A's cost as a share of B's; None if A never has it, or B had its best before training."""
        return None if self.reached is None or self.own[axis] == 0 else self.reached[axis] / self.own[axis]


def reach(a: Band, b: Band) -> Reach | None:
    """Finds the first iteration at which A's mean curve reaches the best of B's; None for empty bands.

    A's curve and costs are interpolated linearly at integer iterations between evaluations, so that the
    result does not depend on how often an arm was evaluated.
    """
    if not len(a.mean) or not len(b.mean):
        return None

    def position(of: Band, step: float) -> dict[str, float]:
        return {axis: float(np.interp(step, of.x["step"], of.x[axis])) for axis in AXES}

    top = int(np.argmax(b.mean))
    steps = np.arange(a.x["step"][0], a.x["step"][-1] + 1)
    reaching = np.flatnonzero(np.interp(steps, a.x["step"], a.mean) >= b.mean[top])
    reached = position(a, steps[reaching[0]]) if len(reaching) else None
    return Reach(float(b.mean[top]), position(b, b.x["step"][top]), reached)
