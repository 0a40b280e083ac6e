"""Results of a comparison as tables: compare.csv (every measured value) and compare.md (the summary)."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g2rpo.comparison.curves import (
    AXES,
    COST,
    SMOOTHED,
    Curve,
    Reach,
    Stat,
    band,
    common_end,
    paired,
    reach,
    smoothed,
    stat,
)
from g2rpo.config.identity import EVALUATION_KEYS
from g2rpo.config.recipe import toml_value
from g2rpo.runtime.files import write_atomic
from g2rpo.runtime.progress import format_seconds

ALL_PAIRS = 4  # up to this number of arms, all pairs are compared; of more, each with the first
MANY_ARMS = 8  # up to this number of arms, each is a column of the table of settings
NOTHING = "–"
KINDS = ("eval", "eval_gain", "reward")
"""Kinds of metrics, in the order of the report: what methods are compared by comes first."""
UNITS = {"step": "iterations", "nfe": "forwards", "compute": "forwards + update"}


@dataclass(frozen=True)
class MeasuredRun:
    """One run as read from its folder.

    Attributes:
        folder: of the run.
        curves: metric -> its points, not smoothed.
        step: number of finished iterations.
        costs: total of each other axis of AXES.
        state: "finished", or what is missing.
    """

    folder: Path
    curves: Mapping[str, Curve]
    step: int
    costs: Mapping[str, float]
    state: str


@dataclass(frozen=True)
class Compared:
    """The content of a report.

    Attributes:
        arms: name -> seed -> run; differences are to the first arm.
        settings: arm -> its settings.
        smoothing: width of the window of training rewards, as a share of an axis's length.
        commands: that made the comparison and its runs.
    """

    arms: Mapping[str, Mapping[int, MeasuredRun]]
    settings: Mapping[str, Mapping[str, Any]]
    smoothing: float
    commands: Sequence[str]

    def metrics(self) -> list[str]:
        """Names of all measured metrics: evaluations, then gains in evaluation, then training rewards."""
        names = dict.fromkeys(n for runs in self.arms.values() for run in runs.values() for n in run.curves)
        return sorted(names, key=lambda name: KINDS.index(_kind(name)))

    def curves(self, metric: str, axis: str = COST) -> dict[str, dict[int, Curve]]:
        """Arm -> seed -> curve of a metric; arms without it are left out.

        Training rewards are smoothed over the same width of `axis` for all runs: `smoothing` times the axis's
        length, which is the largest cost of a run.
        """
        measured = {
            arm: {seed: run.curves[metric] for seed, run in runs.items() if metric in run.curves}
            for arm, runs in self.arms.items()
        }
        measured = {arm: curves for arm, curves in measured.items() if curves}
        if not metric.startswith(SMOOTHED):
            return measured
        length = max(float(curve.x[axis][-1]) for curves in measured.values() for curve in curves.values())
        return {
            arm: {seed: smoothed(curve, axis, self.smoothing * length) for seed, curve in curves.items()}
            for arm, curves in measured.items()
        }


@dataclass(frozen=True)
class Table:
    """A titled table, with a note below it."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def _kind(metric: str) -> str:
    return metric.partition("/")[0]


def title_of(metric: str) -> str:
    """Formats a metric's name for people: `reward/hps` becomes `hps, training reward`."""
    kind, _, name = metric.partition("/")
    label = {"reward": "training reward", "eval": "evaluation", "eval_gain": "gain in evaluation"}[kind]
    return f"{name}, {label}"


def format_stat(value: Stat, sign: str = "") -> str:
    """Formats a mean with its error, such as `0.7052 ± 0.0041`; for one seed the mean, for none a dash."""
    if not value.n:
        return NOTHING
    if not math.isfinite(value.mean):
        return "no value at this cost"
    error = f" ± {value.se:.4f}" if math.isfinite(value.se) else ""
    return f"{value.mean:{sign}.4f}{error}"


def amount(axis: str, value: float) -> str:
    """Formats a position on an axis with its unit."""
    if axis == "seconds":
        return format_seconds(value) if value >= 10 else f"{value:.2g} s"
    return f"{value:,.0f} {UNITS[axis]}"


def value_table(compared: Compared, metric: str) -> Table:
    """Makes the table of final and best values, differences to the first arm, and values at equal cost."""
    curves = compared.curves(metric)
    first = next(iter(compared.arms))
    ends = {axis: common_end([list(runs.values()) for runs in curves.values()], axis) for axis in AXES}
    rows = []
    for arm in compared.arms:
        if arm not in curves:
            rows.append([arm, "0", *["not measured"] * (3 + len(AXES))])
            continue
        runs = curves[arm]
        final = {seed: float(curve.y[-1]) for seed, curve in runs.items()}
        best = [float(curve.y.max()) for curve in runs.values()]
        reference = {seed: float(curve.y[-1]) for seed, curve in curves.get(first, {}).items()}
        equal = [
            stat([curve.at(axis, ends[axis]) for curve in compared.curves(metric, axis)[arm].values()])
            for axis in AXES
        ]
        difference = NOTHING if arm == first else format_stat(paired(final, reference), "+")
        cells = [format_stat(stat(list(final.values()))), format_stat(stat(best)), difference]
        cells += map(format_stat, equal)
        rows.append([arm, str(len(runs)), *cells])
    heads = ["arm", "seeds", "final", "best", f"final − {first}", *(f"at {amount(a, ends[a])}" for a in AXES)]
    return Table(title_of(metric), heads, rows)


def pairs(arms: Sequence[str]) -> list[tuple[str, str]]:
    """Lists the pairs (A, B) of arms for which it is shown when A reaches B's best."""
    if len(arms) <= ALL_PAIRS:
        return [(a, b) for b in arms for a in arms if a != b]
    return [pair for arm in arms[1:] for pair in ((arm, arms[0]), (arms[0], arm))]


def _position(axis: str, value: float) -> str:
    return amount(axis, value) if axis == "seconds" else f"{value:,.0f}"


def _where(axis: str, value: float) -> str:
    return f"iteration {value:,.0f}" if axis == "step" else amount(axis, value)


def _reached(axis: str, result: Reach) -> str:
    if result.own["step"] == 0:
        return "its best value is its first"
    if result.reached is None:
        return f"not reached (own best {result.best:.4f} at {_where(axis, result.own[axis])})"
    share = result.share(axis)
    cost = f"{_position(axis, result.reached[axis])} of {_position(axis, result.own[axis])}"
    return cost + ("" if share is None else f" ({share:.2f}×)")


def reach_table(compared: Compared, metric: str) -> Table:
    """Makes the table of when each arm reaches the best value of another."""
    bands = {arm: band(list(runs.values())) for arm, runs in compared.curves(metric).items()}
    rows = []
    for a, b in pairs(list(compared.arms)):
        if a not in bands or b not in bands:
            rows.append([b, a, *["not measured"] * (1 + len(AXES))])
        elif (result := reach(bands[a], bands[b])) is None:
            rows.append([b, a, *["its seeds have no iteration in common"] * (1 + len(AXES))])
        else:
            rows.append([b, a, f"{result.best:.4f}", *(_reached(axis, result) for axis in AXES)])
    columns = [f"in {UNITS.get(axis, 'time')}" for axis in AXES]
    heads = ["arm", "is reached by", "own best", *columns]
    return Table(f"{title_of(metric)}: cost to reach the best value of another arm", heads, rows)


def run_table(compared: Compared) -> Table:
    """Makes the table of all runs with their iterations, costs and states."""
    rows = [
        [arm, str(seed), str(run.step), *(_position(a, run.costs[a]) for a in AXES[1:]), run.state]
        for arm, runs in compared.arms.items()
        for seed, run in runs.items()
    ]
    note = "Costs are those of the iterations, without evaluations, loading and checkpoints."
    heads = ["arm", "seed", *(UNITS.get(axis, "time") for axis in AXES), "state"]
    return Table("Runs", heads, rows, note)


def settings_table(compared: Compared) -> Table | None:
    """Makes the table of settings in which the arms differ; None if there are none.

    Each setting is a row, or of more than `MANY_ARMS` arms a column. A dash marks an option that an algorithm
    does not have.
    """
    arms = list(compared.settings.values())
    names = dict.fromkeys(key for arm in arms for key in arm)
    keys = [key for key in names if any(arm.get(key) != arms[0].get(key) for arm in arms)]
    if not keys:
        return None
    rows = [
        [key, *(NOTHING if arm.get(key) is None else toml_value(arm[key]) for arm in arms)] for key in keys
    ]
    heads = ["setting", *compared.settings]
    if len(arms) > MANY_ARMS:
        heads, *rows = map(list, zip(heads, *rows, strict=True))
        heads[0] = "arm"
    return Table("Settings that differ", heads, rows)


def warning(compared: Compared) -> str:
    """Warns about unfinished runs and arms with different evaluations; empty if there are none."""
    states = [run.state for runs in compared.arms.values() for run in runs.values()]
    count, sentences = sum(state != "finished" for state in states), []
    if count:
        sentences.append(
            f"{count} of {len(states)} runs are not finished (see Runs); the numbers are computed from the "
            "metrics so far."
        )
    if differ := differing_evaluations(compared):
        sentences.append(
            f"Arms were evaluated in different ways ({', '.join(differ)}; see Settings that differ): their "
            "evaluations cannot be compared."
        )
    return " ".join(sentences)


def differing_evaluations(compared: Compared) -> list[str]:
    """Names the settings of evaluations in which the arms that were evaluated differ."""
    evaluated = [
        arm for arm in compared.settings.values() if arm.get("eval_every") and arm.get("eval_prompts")
    ]
    return [key for key in EVALUATION_KEYS if len({str(arm[key]) for arm in evaluated}) > 1]


TRAINING_REWARDS = (
    "Do not compare methods by training rewards. A training reward averages all images of an iteration, and "
    "each method chooses the noisy states from which these images start: the more a method explores, the "
    "lower its training reward is. G²RPO, whose images come from noise at many steps and from coarse tails, "
    "looks worst here, however good its final images are. Use these numbers to compare seeds and settings "
    "of one method, and to see whether a run was healthy."
)
"""Why training rewards come after evaluations."""


def how_to_read(compared: Compared) -> list[str]:
    """Explains how the numbers are computed, one paragraph per item."""
    first = next(iter(compared.arms))
    return [
        "± is one standard error over seeds. Final: the last value of a run; best: its highest. Evaluations "
        "are not smoothed. Training rewards have other prompts at each iteration, so they are trailing "
        f"means over {compared.smoothing:.0%} of the axis, with the same width for all arms, from the first "
        "full window on; final and best use that share of forwards + update. Higher values count as better.",
        f"Differences to {first} are paired by seed. Their 95 % interval is Student's over seeds; a "
        "difference is called higher or lower if the interval does not contain 0. With several arms and "
        "metrics some such results are chance. Equal cost: every run at the largest number of iterations, "
        "forwards or seconds that all runs with this metric reached, interpolated linearly. Forwards are "
        "those of the rollout; with the update, a training row counts as three more (a backward is counted "
        "as two), and further passes over it as one each.",
        "Cost to reach the best value of another arm: on the mean over seeds, at every iteration, "
        "interpolated linearly between evaluations. “20 of 80 (0.25×)”: the second arm first reaches the "
        "own best of the first after 20, the first itself after 80. “Not reached (own best 0.7 at iteration "
        "80)”: the first has 0.7 at iteration 80, and the second never. Costs are the seeds' means up to "
        "that iteration, in the curves too.",
        "Time can be compared only if the runs had the same machine to themselves in the same way.",
    ]


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


@dataclass(frozen=True)
class MetricTables:
    """Tables of one metric.

    Attributes:
        differences: at equal cost, with intervals; None for training rewards and for a single arm.
        values: final, best, and at equal cost on each axis.
        reached: who reaches whose best; None for a single arm.
    """

    differences: Table | None
    values: Table
    reached: Table | None

    def all(self) -> list[Table]:
        """The tables that there are, in order."""
        return [table for table in (self.differences, self.values, self.reached) if table is not None]


def write_markdown(
    path: Path,
    compared: Compared,
    verdict: str,
    tables: Mapping[str, MetricTables],
    others: Sequence[Table],
) -> None:
    """Writes compare.md: verdict, evaluations, training rewards, other tables, explanations, commands.

    Args:
        tables: metric -> its tables.
        others: further tables.
    """
    parts = ["# " + " · ".join(map(_cell, compared.arms)), f"**{_cell(verdict)}**", warning(compared)]
    groups = {
        "Evaluations": [name for name in tables if not name.startswith(SMOOTHED)],
        "Training rewards": [name for name in tables if name.startswith(SMOOTHED)],
    }
    notes = {"Evaluations": "![curves](curves.png)", "Training rewards": TRAINING_REWARDS}
    for title, metrics in groups.items():
        if metrics:
            parts += [f"## {title}", notes[title]]
            parts += [
                text for name in metrics for table in tables[name].all() for text in _markdown(table, 3)
            ]
    parts += [text for table in others for text in _markdown(table, 2)]
    fence = "~~~~"
    parts += ["## How to read this", *how_to_read(compared)]
    parts += ["## Commands", "\n".join([fence, *compared.commands, fence])]
    write_atomic(path, "\n\n".join(filter(None, parts)) + "\n")


def _markdown(table: Table, level: int) -> list[str]:
    lines = [table.heads, ["---"] * len(table.heads), *table.rows]
    rows = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
    return [f"{'#' * level} {_cell(table.title)}", rows, *([table.note] if table.note else [])]


def write_csv(path: Path, compared: Compared) -> None:
    """Writes compare.csv: one row per measured value, not smoothed."""
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(["arm", "seed", "step", *(f"{axis}_total" for axis in AXES[1:]), "metric", "value"])
    for arm, runs in compared.arms.items():
        for seed, run in runs.items():
            for metric, curve in run.curves.items():
                for *position, value in zip(*(curve.x[axis] for axis in AXES), curve.y, strict=True):
                    *counts, seconds = position
                    cells = [*(f"{n:.0f}" for n in counts), f"{seconds:.6g}"]
                    cells += [metric, repr(float(value))]
                    rows.writerow([arm, seed, *cells])
    write_atomic(path, text.getvalue())
