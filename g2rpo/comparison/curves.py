"""Measured curves of several runs: means over seeds, values at equal cost, and when one arm reaches another.

A run is measured at points (iteration, cumulative costs, value). Costs are those of the iterations, without
evaluations, loading and checkpoints: `nfe`, the rollout's forwards; `compute`, the same with the update's
(`nfe_update`: a trained row counts as three forwards or more); `seconds`. Higher values count as better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from g2rpo.evaluation.stats import mean_and_error

AXES = ("step", "nfe", "compute", "seconds")
COMPARED = ("reward/", "eval/", "eval_gain/")
SMOOTHED = "reward/"  # other prompts every iteration; an evaluation has the same ones, and is left as it is


@dataclass(frozen=True)
class Curve:
    """One metric of one run.

    Attributes:
        x: AXES name -> [n] float64, not falling. y: [n] float64, finite.
    """

    x: Mapping[str, np.ndarray]
    y: np.ndarray

    def at(self, axis: str, where: float) -> float:
        """Value by linear interpolation; NaN where nothing was measured before, or after."""
        return float(np.interp(where, self.x[axis], self.y, left=np.nan, right=np.nan))


@dataclass(frozen=True)
class Stat:
    """Mean over seeds, its standard error (NaN for one seed) and their number."""

    mean: float
    se: float
    n: int


@dataclass(frozen=True)
class Band:
    """Mean over seeds, iteration by iteration, with what lies around it.

    Attributes:
        x: AXES name -> [n]: the iteration, and the seeds' mean costs up to it.
        mean: [n]. low, high: [n], mean -+ one standard error; for two seeds the smaller and the larger; for
            one the mean. seeds: how many.
    """

    x: Mapping[str, np.ndarray]
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int


def curves_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Metric name -> its curve, from the lines of a metrics.jsonl. A null is no point; 0 points, no curve.

    Raises:
        ValueError: no nfe_update, as in runs of an earlier version.
    """
    trained = sorted((line for line in lines if "nfe" in line), key=lambda line: line["step"])
    steps = [0, *(line["step"] for line in trained)]
    totals = {axis: np.cumsum([0.0, *(cost(line, axis) for line in trained)]) for axis in AXES[1:]}
    points: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith(COMPARED) and value is not None and math.isfinite(value):
                points.setdefault(name, {})[line["step"]] = float(value)
    for name, values in points.items():  # a gain starts at none, where its evaluation has a start
        if name.startswith("eval_gain/") and 0 in points.get(name.replace("eval_gain/", "eval/", 1), {}):
            values.setdefault(0, 0.0)
    curves = {}
    for name, values in points.items():
        step = np.array(sorted(values), dtype=float)
        # The cost of an iteration that has no line of its own is that of the last one before.
        rows = np.searchsorted(steps, step, side="right") - 1
        x = {"step": step, **{axis: total[rows] for axis, total in totals.items()}}
        curves[name] = Curve(x, np.array([values[int(s)] for s in step]))
    return curves


def cost(line: Mapping[str, Any], axis: str) -> float:
    """Of one iteration, on an axis other than "step".

    Raises:
        ValueError: no nfe_update, as in runs of an earlier version.
    """
    if axis != "compute":
        return float(line[axis])
    if "nfe_update" not in line:
        raise ValueError(
            f"iteration {line['step']} has no nfe_update: an earlier version trained it; train it anew"
        )
    return float(line["nfe"]) + float(line["nfe_update"])


def smoothed(curve: Curve, window: int) -> Curve:
    """Trailing means of `window` points, from the first full window on; of fewer points the mean of all."""
    window = min(window, len(curve.y))
    x = {axis: values[window - 1 :] for axis, values in curve.x.items()}
    return Curve(x, np.convolve(curve.y, np.full(window, 1 / window), mode="valid"))


def stat(values: Sequence[float]) -> Stat:
    """Mean and standard error (n - 1 in the variance); NaN where there are too few values for them."""
    mean, error = mean_and_error(np.asarray(values, dtype=np.float64))
    return Stat(float(mean), float(error), len(values))


def paired(values: Mapping[int, float], first: Mapping[int, float]) -> Stat:
    """Of the differences to `first` over the seeds that both have."""
    return stat([values[seed] - first[seed] for seed in values if seed in first])


def band(curves: Sequence[Curve]) -> Band:
    """The seeds' mean over the iterations that all of them reached, where at least one was measured.

    Between its points a curve is interpolated linearly. No iteration is common to all: an empty band.
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
    """The largest iteration, or cost, that every run of every arm reached."""
    return float(min(curve.x[axis][-1] for curves in arms for curve in curves))


@dataclass(frozen=True)
class Reach:
    """When arm A gets as far as arm B's best.

    Attributes:
        best: of B's mean curve. own: AXES name -> what B took to get there for the first time.
        reached: the same of A; None = never.
    """

    best: float
    own: Mapping[str, float]
    reached: Mapping[str, float] | None

    def share(self, axis: str) -> float | None:
        """A's cost in B's; None where A never gets there, or B was at its best before it trained."""
        return None if self.reached is None or self.own[axis] == 0 else self.reached[axis] / self.own[axis]


def reach(a: Band, b: Band) -> Reach | None:
    """The first iteration in which A's mean curve is as high as the best of B's; None for empty bands.

    Between evaluations A's curve and its costs are interpolated linearly, to whole iterations: how often an
    arm was evaluated must not decide.
    """
    if not len(a.mean) or not len(b.mean):
        return None

    def place(one: Band, step: float) -> dict[str, float]:
        return {axis: float(np.interp(step, one.x["step"], one.x[axis])) for axis in AXES}

    top = int(np.argmax(b.mean))
    steps = np.arange(a.x["step"][0], a.x["step"][-1] + 1)
    there = np.flatnonzero(np.interp(steps, a.x["step"], a.mean) >= b.mean[top])
    reached = place(a, steps[there[0]]) if len(there) else None
    return Reach(float(b.mean[top]), place(b, b.x["step"][top]), reached)
