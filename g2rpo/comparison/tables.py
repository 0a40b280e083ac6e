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
NOTHING = "–"
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
        window: of the trailing mean over training rewards, in points.
        commands: that made the comparison and its runs.
    """

    arms: Mapping[str, Mapping[int, MeasuredRun]]
    settings: Mapping[str, Mapping[str, Any]]
    window: int
    commands: Sequence[str]

    def metrics(self) -> list[str]:
        """Names of all measured metrics: training rewards, then evaluations, then gains in evaluation."""
        names = dict.fromkeys(n for runs in self.arms.values() for run in runs.values() for n in run.curves)
        return sorted(names, key=lambda name: ("reward/", "eval/", "eval_gain/").index(f"{_kind(name)}/"))

    def curves(self, metric: str) -> dict[str, dict[int, Curve]]:
        """Arm -> seed -> curve of a metric, smoothed for training rewards; arms without it are left out."""
        measured = {
            arm: {
                seed: smoothed(run.curves[metric], self.window)
                if metric.startswith(SMOOTHED)
                else run.curves[metric]
                for seed, run in runs.items()
                if metric in run.curves
            }
            for arm, runs in self.arms.items()
        }
        return {arm: curves for arm, curves in measured.items() if curves}


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
        return "no value so early"
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
        equal = [stat([curve.at(axis, ends[axis]) for curve in runs.values()]) for axis in AXES]
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


def _reached(axis: str, result: Reach) -> str:
    own = _position(axis, result.own[axis])
    if result.own["step"] == 0:
        return "its best is its start"
    if result.reached is None:
        return f"never (itself: {own})"
    share = result.share(axis)
    return f"{_position(axis, result.reached[axis])} of {own}" + ("" if share is None else f" ({share:.2f}×)")


def reach_table(compared: Compared, metric: str) -> Table:
    """Makes the table of when each arm reaches the best value of another."""
    bands = {arm: band(list(runs.values())) for arm, runs in compared.curves(metric).items()}
    rows = []
    for a, b in pairs(list(compared.arms)):
        if a not in bands or b not in bands:
            rows.append([b, a, *["not measured"] * (1 + len(AXES))])
        elif (result := reach(bands[a], bands[b])) is None:
            rows.append([b, a, *["no iteration common to its seeds"] * (1 + len(AXES))])
        else:
            rows.append([b, a, f"{result.best:.4f}", *(_reached(axis, result) for axis in AXES)])
    columns = [f"in {UNITS.get(axis, 'time')}" for axis in AXES]
    heads = ["the best of", "is reached by", "best", *columns]
    return Table(f"{title_of(metric)}: who reaches whose best", heads, rows)


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

    A dash marks an option that an algorithm does not have.
    """
    arms = list(compared.settings.values())
    names = dict.fromkeys(key for arm in arms for key in arm)
    keys = [key for key in names if any(arm.get(key) != arms[0].get(key) for arm in arms)]
    if not keys:
        return None
    rows = [
        [key, *(NOTHING if arm.get(key) is None else toml_value(arm[key]) for arm in arms)] for key in keys
    ]
    return Table("Settings that differ", ["setting", *compared.settings], rows)


def warning(compared: Compared) -> str:
    """Warns about unfinished runs and arms with different evaluations; empty if there are none."""
    states = [run.state for runs in compared.arms.values() for run in runs.values()]
    count, sentences = sum(state != "finished" for state in states), []
    if count:
        sentences.append(
            f"{count} of {len(states)} runs are not finished (see Runs); numbers are of the metrics so far."
        )
    evaluated = [
        arm for arm in compared.settings.values() if arm.get("eval_every") and arm.get("eval_prompts")
    ]
    differ = [key for key in EVALUATION_KEYS if len({str(arm[key]) for arm in evaluated}) > 1]
    if differ:
        sentences.append(
            f"Arms were evaluated in different ways ({', '.join(differ)}; see Settings that differ): their "
            "evaluations cannot be compared."
        )
    return " ".join(sentences)


def how_to_read(compared: Compared) -> list[str]:
    """Explains how the numbers are computed, one paragraph per item."""
    return [
        "± is one standard error over seeds. Final: the last value of a run; best: its highest. Training "
        f"rewards are trailing means of {compared.window} iterations (each has other prompts), from the "
        "first full window on; where a run's lines were merged, of as many lines. Evaluations are not "
        "smoothed. Higher values count as better.",
        f"Differences to {next(iter(compared.arms))} are paired by seed. Equal cost: every run at the "
        "largest number of iterations, forwards or seconds that all runs with this metric reached, "
        "interpolated linearly. Forwards are those of the rollout; with the update, a training row counts as "
        "three more (a backward is counted as two), and further passes over it as one each.",
        "A training reward is the mean over all images of an iteration, including those of noisy paths and "
        "coarse tails. Use it to compare seeds and settings of one method; between methods compare "
        "evaluations.",
        "Who reaches whose best: on the mean over seeds, at every iteration, interpolated linearly between "
        "evaluations. “20 of 80 (0.25×)”: A first reaches B's highest value after 20, B itself after 80. "
        "Costs are the seeds' means up to that iteration, in the curves too.",
        "Time can be compared only if the runs had the same machine to themselves in the same way.",
    ]


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def write_markdown(path: Path, compared: Compared, tables: Sequence[Table]) -> None:
    """Writes compare.md: the explanations, the tables and the commands."""
    parts = ["# " + " · ".join(map(_cell, compared.arms)), warning(compared), *how_to_read(compared)]
    parts = [*filter(None, parts), "![curves](curves.png)"]
    for table in tables:
        lines = [table.heads, ["---"] * len(table.heads), *table.rows]
        parts += [
            f"## {_cell(table.title)}",
            "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines),
        ]
        parts += [table.note] if table.note else []
    fence = "~~~~"
    parts += ["## Commands", "\n".join([fence, *compared.commands, fence])]
    write_atomic(path, "\n\n".join(parts) + "\n")


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
