"""Numbers of the report: paired differences, the verdict, curves, and cost against the plan."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from g2rpo.evaluation.stats import interval
from g2rpo.report.charts import Series, number, signed
from g2rpo.report.record import Line, PairedSet, RunRecord, Scores

PARTS = ("anchor", "tails", "decode", "reward", "update", "checkpoint")
"""Parts of an iteration whose seconds are recorded."""


@dataclass(frozen=True)
class Difference:
    """A reward on the same prompts and seeds, before and after.

    Attributes:
        reward: its name.
        trained: whether the run trained on it.
        prompts: number of prompts with a score before and after.
        before, after: means over the prompts.
        difference: mean of the paired differences.
        low, high: its 95 % bootstrap interval; NaN with fewer than two prompts.
    """

    reward: str
    trained: bool
    prompts: int
    before: float
    after: float
    difference: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Returns "rose", "fell" or "no measurable change", by the interval."""
        if self.low > 0:
            return "rose"
        return "fell" if self.high < 0 else "no measurable change"

    @property
    def sentence(self) -> str:
        """Returns the difference with its interval as text."""
        measured = f"{signed(self.difference)}, 95 % interval {signed(self.low)} to {signed(self.high)}"
        if self.verdict == "no measurable change":
            return f"{self.reward} did not change measurably ({measured})"
        return f"{self.reward} {self.verdict} ({measured})"


def differences(pairs: PairedSet, trained: Sequence[str]) -> list[Difference]:
    """Computes the difference of every reward that was scored before and after, trained ones first.

    Images of one prompt are averaged first, because the prompt is the independent unit.
    """
    found = []
    for name in sorted(set(pairs.before) & set(pairs.after), key=lambda n: (n not in trained, n)):
        of_prompt = _by_prompt(pairs, name)
        if not of_prompt:
            continue
        before, after = (np.array([np.mean([p[side] for p in one]) for one in of_prompt]) for side in (0, 1))
        low, high = interval(after - before)
        mean_before, mean_after = float(before.mean()), float(after.mean())
        found.append(
            Difference(
                name,
                name in trained,
                len(of_prompt),
                mean_before,
                mean_after,
                float((after - before).mean()),
                low,
                high,
            )
        )
    return found


def _by_prompt(pairs: PairedSet, name: str) -> list[list[tuple[float, float]]]:
    """The (before, after) scores of each prompt that has any."""
    grouped: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for prompt, before, after in zip(pairs.prompts, pairs.before[name], pairs.after[name], strict=False):
        if math.isfinite(before) and math.isfinite(after):
            grouped[prompt].append((float(before), float(after)))
    return list(grouped.values())


def gains(pairs: PairedSet, weights: Mapping[str, float]) -> Scores:
    """Computes the gain of each image pair in the trained rewards, [N].

    Each reward's difference is divided by the spread of its scores before training, and the rewards are
    weighted as in training. A pair without a score is NaN.
    """
    total = np.zeros(len(pairs.prompts))
    for name, weight in weights.items():
        if name not in pairs.before or name not in pairs.after:
            continue
        spread = float(np.nanstd(pairs.before[name])) or 1.0
        total = total + weight * (pairs.after[name] - pairs.before[name]) / spread
    return total


def reward_series(record: RunRecord, name: str) -> Series:
    """The mean of a trained reward by iteration; its band is the standard error over the groups."""
    of_step: dict[int, list[float]] = defaultdict(list)
    for group in record.groups:
        value = group.get("reward", {}).get(name)
        if value is not None:
            of_step[group["step"]].append(value)
    points = []
    for line in record.iterations:
        value = line.get(f"reward/{name}")
        if value is None:
            continue
        groups = of_step.get(line["step"], [])
        error = statistics.stdev(groups) / math.sqrt(len(groups)) if len(groups) > 1 else None
        points.append((line["step"], value, error))
    return Series(name, points)


def evaluation_series(record: RunRecord, name: str) -> Series:
    """The gain of a reward over the evaluation before training, with its paired standard error.

    Runs whose evaluations are not paired give the mean and its standard error.
    """
    paired = any(f"eval_gain/{name}" in line for line in record.evaluations)
    key, error = ("eval_gain", "eval_gain_se") if paired else ("eval", "eval_se")
    points: list[tuple[float, float, float | None]] = []
    for line in record.evaluations:
        if paired and line["step"] == 0:
            points.append((0, 0.0, 0.0))
        elif (value := line.get(f"{key}/{name}")) is not None:
            points.append((line["step"], value, line.get(f"{error}/{name}")))
    return Series(name, points, dots=True)


def evaluated_names(record: RunRecord) -> list[str]:
    """Names of the rewards of the evaluations, trained ones first."""
    names = dict.fromkeys(key[5:] for line in record.evaluations for key in line if key.startswith("eval/"))
    return sorted(names, key=lambda name: name not in record.trained)


def metric_series(lines: Sequence[Line], key: str, name: str = "") -> Series:
    """A metric by iteration."""
    points = [(line["step"], line[key], None) for line in lines if isinstance(line.get(key), int | float)]
    return Series(name or key, points)


def largest_of(lines: Sequence[Line], prefix: str, name: str) -> Series:
    """The largest of the metrics that start with a prefix, such as one per noise step, by iteration."""
    points = []
    for line in lines:
        values = [v for key, v in line.items() if key.startswith(prefix) and isinstance(v, int | float)]
        if values:
            points.append((line["step"], max(values), None))
    return Series(name, points)


def by_noise_step(record: RunRecord, key: str, reward: str = "") -> dict[tuple[int, int], float]:
    """Averages a [K, J] field of the groups: (noise step k, granularity index j) -> mean over groups."""
    sums: dict[tuple[int, int], list[float]] = defaultdict(list)
    for group in record.groups:
        values = group.get(key)
        if reward:
            values = (values or {}).get(reward)
        if not values:
            continue
        steps = group.get("noise_steps", [])
        # One image scores all noise steps of a path: its row counts for each of them.
        rows = values if len(values) == len(steps) else values * len(steps)
        for k, row in zip(steps, rows, strict=False):
            for j, value in enumerate(row if isinstance(row, list) else [row]):
                if value is not None:
                    sums[k, j].append(value)
    return {cell: statistics.fmean(values) for cell, values in sorted(sums.items())}


@dataclass(frozen=True)
class CostRow:
    """A row of the cost table: what was measured and what `plan` predicts, as text."""

    item: str
    measured: str
    planned: str = ""


def cost_rows(record: RunRecord, planned: Any | None) -> list[CostRow]:
    """The cost of the iterations: forwards, seconds by part, memory and device hours.

    Args:
        planned: `costs.Costs` of the run, or None if it could not be computed.
    """
    lines = record.iterations
    if not lines:
        return []

    def median(key: str) -> float:
        values = [line[key] for line in lines[1:] or lines if isinstance(line.get(key), int | float)]
        return statistics.median(values) if values else math.nan

    forwards = statistics.fmean(line["nfe"] for line in lines)
    rows = [
        CostRow(
            "forwards per iteration, rollout (mean)",
            number(forwards),
            number(planned.forwards["total"]) if planned else "",
        )
    ]
    total = median("seconds")
    planned_seconds = dict(planned.seconds) if planned else {}
    rollout = median("seconds_anchor") + median("seconds_tails")
    measured = {"rollout": rollout, "decode": median("seconds_decode"), "reward": median("seconds_reward")}
    measured |= {"update": median("seconds_update")}
    for part, seconds in measured.items():
        if math.isfinite(seconds):
            of_plan = f"{number(planned_seconds[part], 3)} s" if part in planned_seconds else ""
            rows.append(CostRow(f"{part} (median)", f"{number(seconds, 3)} s", of_plan))
    of_plan = f"{number(sum(planned_seconds.values()), 3)} s" if planned_seconds else ""
    rows.append(CostRow("iteration (median)", f"{number(total, 3)} s", of_plan))
    if math.isfinite(checkpoint := median("seconds_checkpoint")):
        rows.append(CostRow("checkpoint (median)", f"{number(checkpoint, 3)} s"))
    if peaks := [line["peak_memory_gb"] for line in lines if line.get("peak_memory_gb")]:
        of_plan = f"{planned.memory_bytes / 1e9:.1f} GB" if planned else ""
        rows.append(CostRow("peak memory per device", f"{max(peaks):.1f} GB", of_plan))
    processes = record.starts[-1]["num_processes"] if record.starts else 1
    hours = sum(line["seconds"] for line in lines) / 3600 * processes
    of_plan = ""
    if planned_seconds:
        of_plan = number(sum(planned_seconds.values()) * len(lines) / 3600 * processes, 3)
    rows.append(CostRow("device hours, iterations only", number(hours, 3), of_plan))
    return rows
