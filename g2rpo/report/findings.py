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
from g2rpo.report.record import Line, PairedSet, RunRecord

UNCHANGED = "no measurable change"
"""Verdict on a difference whose interval contains zero."""


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
        return "fell" if self.high < 0 else UNCHANGED

    @property
    def sentence(self) -> str:
        """Returns the difference with its interval as text."""
        measured = f"{signed(self.difference)}, 95 % interval {signed(self.low)} to {signed(self.high)}"
        if self.verdict == UNCHANGED:
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


def headline(rows: Sequence[Difference]) -> str:
    """Returns the verdict in one line: which trained rewards and which held-out metrics rose or fell."""
    parts = []
    for kind, trained in (("Trained", True), ("Held out", False)):
        by_verdict: dict[str, list[str]] = defaultdict(list)
        for row in rows:
            if row.trained == trained:
                by_verdict[row.verdict].append(row.reward)
        texts = [
            f"{', '.join(names)} {'did not change measurably' if verdict == UNCHANGED else verdict}"
            for verdict, names in by_verdict.items()
        ]
        parts += [f"{kind}: {'; '.join(texts)}."] if texts else []
    return " ".join(parts)


def unpaired_evaluations(record: RunRecord) -> list[str]:
    """Sentences on the first and the last evaluation of a run that did not keep the scores of each image."""
    if len(record.evaluations) < 2:
        return []
    first, last = record.evaluations[0], record.evaluations[-1]
    sentences = []
    for name in evaluated_names(record):
        key, error = f"eval/{name}", f"eval_se/{name}"
        if not all(isinstance(line.get(key), int | float) for line in (first, last)):
            continue
        before, after = (
            number(line[key])
            + (f" ± {number(line[error], 2)}" if isinstance(line.get(error), int | float) else "")
            for line in (first, last)
        )
        kind = "trained" if name in record.trained else "held out"
        sentences.append(f"{name} ({kind}): {before} at iteration {first['step']}, {after} at {last['step']}")
    return sentences


def _by_prompt(pairs: PairedSet, name: str) -> list[list[tuple[float, float]]]:
    """The (before, after) scores of each prompt that has any."""
    grouped: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for prompt, before, after in zip(pairs.prompts, pairs.before[name], pairs.after[name], strict=False):
        if math.isfinite(before) and math.isfinite(after):
            grouped[prompt].append((float(before), float(after)))
    return list(grouped.values())


@dataclass(frozen=True)
class Gain:
    """Gain of a prompt in the trained rewards.

    Attributes:
        prompt: its text.
        gain: mean over its image pairs, in spreads of the scores before training.
        pairs: positions of its image pairs in their set, those without scores left out.
    """

    prompt: str
    gain: float
    pairs: tuple[int, ...]


def gains(pairs: PairedSet, weights: Mapping[str, float]) -> list[Gain]:
    """Computes the gain of each prompt in the trained rewards, the largest first.

    Each reward's difference is divided by the spread of its scores before training, and the rewards are
    weighted as in training. Prompts without a scored pair are left out.
    """
    scored = [name for name in weights if name in pairs.before and name in pairs.after]
    if not scored:
        return []
    total = np.zeros(len(pairs.prompts))
    for name in scored:
        before = pairs.before[name]
        finite = before[np.isfinite(before)]
        spread = float(finite.std()) if len(finite) else 0.0
        total = total + weights[name] * (pairs.after[name] - before) / (spread or 1.0)
    of_prompt: dict[str, list[int]] = defaultdict(list)
    for i, prompt in enumerate(pairs.prompts):
        if math.isfinite(total[i]):
            of_prompt[prompt].append(i)
    found = [Gain(prompt, float(total[rows].mean()), tuple(rows)) for prompt, rows in of_prompt.items()]
    return sorted(found, key=lambda gain: -gain.gain)


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
    """A row of the cost table: what was measured and what `plan` predicts, as text; "" if it is unknown."""

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

    def values(key: str, of: Sequence[Line]) -> list[float]:
        return [line[key] for line in of if isinstance(line.get(key), int | float)]

    def median(key: str) -> float:
        measured = values(key, lines[1:] or lines)
        return statistics.median(measured) if measured else math.nan

    def seconds(value: float) -> str:
        return f"{number(value, 3)} s" if math.isfinite(value) else ""

    update = planned.update_forwards if planned else {}
    # Of a backward and of recomputed activations, as in `nfe_update`.
    factors = {"policy": 3 + bool(record.config.get("gradient_checkpointing"))}
    of_plan = {
        "nfe": planned.forwards["total"] if planned else None,
        "nfe_update": sum(factors.get(part, 1) * n for part, n in update.items()) if planned else None,
    }
    titles = {
        "nfe": "forwards of the rollout, per iteration (mean)",
        "nfe_update": "forwards of the update, a backward counts as two (mean)",
    }
    rows = [
        CostRow(
            title,
            number(statistics.fmean(measured)) if (measured := values(key, lines)) else "",
            "" if (predicted := of_plan[key]) is None else number(predicted),
        )
        for key, title in titles.items()
    ]
    planned_seconds = dict(planned.seconds) if planned else {}
    of_parts = {
        "rollout": median("seconds_anchor") + median("seconds_tails"),
        **{part: median(f"seconds_{part}") for part in ("decode", "reward", "update")},
    }
    if not math.isfinite(of_parts["rollout"]):  # runs of earlier versions
        of_parts |= {"rollout": median("seconds_rollout"), "reward": median("seconds_score")}
    rows += [
        CostRow(f"{part} (median)", seconds(value), seconds(planned_seconds.get(part, math.nan)))
        for part, value in of_parts.items()
        if math.isfinite(value) or part in planned_seconds
    ]
    total = sum(planned_seconds.values()) if planned_seconds else math.nan
    rows.append(CostRow("iteration (median)", seconds(median("seconds")), seconds(total)))
    if math.isfinite(checkpoint := median("seconds_checkpoint")):
        rows.append(CostRow("checkpoint (median)", seconds(checkpoint)))
    peaks = [peak for peak in values("peak_memory_gb", lines) if peak > 0]
    rows.append(
        CostRow(
            "peak memory per device",
            f"{number(max(peaks), 3)} GB" if peaks else "",
            f"{number(planned.memory_bytes / 1e9, 3)} GB" if planned else "",
        )
    )
    processes = record.num_processes
    hours = sum(values("seconds", lines)) / 3600 * processes
    rows.append(
        CostRow(
            f"device hours of {len(lines)} iterations",
            number(hours, 3),
            number(total * len(lines) / 3600 * processes, 3) if planned_seconds else "",
        )
    )
    return rows
