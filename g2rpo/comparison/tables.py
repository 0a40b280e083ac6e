"""What a comparison found, as tables: compare.csv (every measured value) and compare.md (the numbers)."""

from __future__ import annotations

import csv
import math
import os
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
from g2rpo.runtime.progress import format_seconds

ALL_PAIRS = 4  # of so many arms each is told against each; of more, each against the first
NOTHING = "–"
UNITS = {"step": "iterations", "nfe": "forwards", "compute": "forwards + update"}


@dataclass(frozen=True)
class MeasuredRun:
    """One run as it was found.

    Attributes:
        curves: metric -> its points, as measured.
        step: iterations done. costs: what they took, by the other names of AXES.
        state: "finished", or what is amiss.
    """

    folder: Path
    curves: Mapping[str, Curve]
    step: int
    costs: Mapping[str, float]
    state: str


@dataclass(frozen=True)
class Compared:
    """Everything that the report tells.

    Attributes:
        arms: name -> seed -> run; the first is what differences refer to.
        settings: arm -> its settings; window: trailing mean of the training rewards, in points.
        commands: what made it, and the runs.
    """

    arms: Mapping[str, Mapping[int, MeasuredRun]]
    settings: Mapping[str, Mapping[str, Any]]
    window: int
    commands: Sequence[str]

    def metrics(self) -> list[str]:
        """Names of all that was measured: training rewards first, then evaluations, then their gains."""
        names = dict.fromkeys(n for runs in self.arms.values() for run in runs.values() for n in run.curves)
        return sorted(names, key=lambda name: ("reward/", "eval/", "eval_gain/").index(f"{_kind(name)}/"))

    def curves(self, metric: str) -> dict[str, dict[int, Curve]]:
        """Arm -> seed -> curve, training rewards smoothed; an arm without the metric is left out."""
        found = {
            arm: {
                seed: smoothed(run.curves[metric], self.window)
                if metric.startswith(SMOOTHED)
                else run.curves[metric]
                for seed, run in runs.items()
                if metric in run.curves
            }
            for arm, runs in self.arms.items()
        }
        return {arm: curves for arm, curves in found.items() if curves}


@dataclass(frozen=True)
class Table:
    """A titled table; `note` stands below it."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def _kind(metric: str) -> str:
    return metric.partition("/")[0]


def title_of(metric: str) -> str:
    """`reward/hps` as a person would say it."""
    kind, _, name = metric.partition("/")
    what = {"reward": "training reward", "eval": "evaluation", "eval_gain": "gain in evaluation"}[kind]
    return f"{name}, {what}"


def told(value: Stat, sign: str = "") -> str:
    """`0.7052 ± 0.0041`; of one seed the mean alone, of none a dash."""
    if not value.n:
        return NOTHING
    if not math.isfinite(value.mean):
        return "no value so early"
    error = f" ± {value.se:.4f}" if math.isfinite(value.se) else ""
    return f"{value.mean:{sign}.4f}{error}"


def amount(axis: str, value: float) -> str:
    """A place on an axis in words."""
    if axis == "seconds":
        return format_seconds(value) if value >= 10 else f"{value:.2g} s"
    return f"{value:,.0f} {UNITS[axis]}"


def value_table(compared: Compared, metric: str) -> Table:
    """Final and best values, differences to the first arm, and values at equal cost."""
    curves = compared.curves(metric)
    first = next(iter(compared.arms))
    ends = {axis: common_end([list(one.values()) for one in curves.values()], axis) for axis in AXES}
    rows = []
    for arm in compared.arms:
        if arm not in curves:
            rows.append([arm, "0", *["not measured"] * (3 + len(AXES))])
            continue
        runs = curves[arm]
        final = {seed: float(curve.y[-1]) for seed, curve in runs.items()}
        best = [float(curve.y.max()) for curve in runs.values()]
        against = {seed: float(curve.y[-1]) for seed, curve in curves.get(first, {}).items()}
        equal = [stat([curve.at(axis, ends[axis]) for curve in runs.values()]) for axis in AXES]
        difference = NOTHING if arm == first else told(paired(final, against), "+")
        cells = [told(stat(list(final.values()))), told(stat(best)), difference, *map(told, equal)]
        rows.append([arm, str(len(runs)), *cells])
    heads = ["arm", "seeds", "final", "best", f"final − {first}", *(f"at {amount(a, ends[a])}" for a in AXES)]
    return Table(title_of(metric), heads, rows)


def pairs(arms: Sequence[str]) -> list[tuple[str, str]]:
    """(A, B): does A reach B's best?"""
    if len(arms) <= ALL_PAIRS:
        return [(a, b) for b in arms for a in arms if a != b]
    return [pair for arm in arms[1:] for pair in ((arm, arms[0]), (arms[0], arm))]


def _place(axis: str, value: float) -> str:
    return amount(axis, value) if axis == "seconds" else f"{value:,.0f}"


def _reached(axis: str, found: Reach) -> str:
    own = _place(axis, found.own[axis])
    if found.own["step"] == 0:
        return "its best is its start"
    if found.reached is None:
        return f"never (itself: {own})"
    share = found.share(axis)
    return f"{_place(axis, found.reached[axis])} of {own}" + ("" if share is None else f" ({share:.2f}×)")


def reach_table(compared: Compared, metric: str) -> Table:
    """When each arm has the best of another."""
    bands = {arm: band(list(runs.values())) for arm, runs in compared.curves(metric).items()}
    rows = []
    for a, b in pairs(list(compared.arms)):
        if a not in bands or b not in bands:
            rows.append([b, a, *["not measured"] * (1 + len(AXES))])
        elif (found := reach(bands[a], bands[b])) is None:
            rows.append([b, a, *["no iteration common to its seeds"] * (1 + len(AXES))])
        else:
            rows.append([b, a, f"{found.best:.4f}", *(_reached(axis, found) for axis in AXES)])
    places = [f"in {UNITS.get(axis, 'time')}" for axis in AXES]
    heads = ["the best of", "is reached by", "best", *places]
    return Table(f"{title_of(metric)}: who reaches whose best", heads, rows)


def run_table(compared: Compared) -> Table:
    """Every run and how far it got."""
    rows = [
        [arm, str(seed), str(run.step), *(_place(a, run.costs[a]) for a in AXES[1:]), run.state]
        for arm, runs in compared.arms.items()
        for seed, run in runs.items()
    ]
    note = "Costs are those of the iterations, without evaluations, loading and checkpoints."
    heads = ["arm", "seed", *(UNITS.get(axis, "time") for axis in AXES), "state"]
    return Table("Runs", heads, rows, note)


def settings_table(compared: Compared) -> Table | None:
    """Settings in which the arms differ; an option that an algorithm does not take is a dash."""
    every = list(compared.settings.values())
    names = dict.fromkeys(key for one in every for key in one)
    keys = [key for key in names if any(one.get(key) != every[0].get(key) for one in every)]
    if not keys:
        return None
    rows = [
        [key, *(NOTHING if one.get(key) is None else toml_value(one[key]) for one in every)] for key in keys
    ]
    return Table("Settings that differ", ["setting", *compared.settings], rows)


def warning(compared: Compared) -> str:
    """Which runs are not whole, which arms are not judged alike, or nothing."""
    states = [run.state for runs in compared.arms.values() for run in runs.values()]
    count, told = sum(state != "finished" for state in states), []
    if count:
        told.append(
            f"{count} of {len(states)} runs are not finished (see Runs); numbers are those of what is there."
        )
    judged = [one for one in compared.settings.values() if one.get("eval_every") and one.get("eval_prompts")]
    differ = [key for key in EVALUATION_KEYS if len({str(one[key]) for one in judged}) > 1]
    if differ:
        told.append(
            f"Arms were evaluated in different ways ({', '.join(differ)}; see Settings that differ): their "
            "evaluations do not compare."
        )
    return " ".join(told)


def how_to_read(compared: Compared) -> list[str]:
    """The rules by which the numbers were made, a paragraph each."""
    return [
        "± is one standard error over seeds. Final: the last value of a run; best: its highest. Training "
        f"rewards are trailing means of {compared.window} iterations (each has other prompts), from the "
        "first whole window on; of as many lines, where a run's lines were merged. Evaluations are as "
        "measured. Higher counts as better.",
        f"Differences to {next(iter(compared.arms))} are paired by seed. Equal cost: every run at the "
        "largest number of iterations, forwards or seconds that all runs with that measure reached, "
        "interpolated linearly. Forwards are those of the rollout; with the update, a trained row counts as "
        "three more (its backward is worth two), and further passes over it as one each.",
        "A training reward is the mean over all pictures of an iteration, noisy paths and coarse tails "
        "included, so it compares seeds and settings of one method; between methods compare evaluations.",
        "Who reaches whose best: on the mean over seeds, iteration by iteration, between evaluations along a "
        "straight line. “20 of 80 (0.25×)”: A is first at least as high as B's highest value after 20, B "
        "itself after 80. Costs are the seeds' means up to that iteration, in the curves too.",
        "Time compares only where the runs had the same machine to themselves in the same way.",
    ]


def whole(path: Path, text: str) -> None:
    """Writes a file so that it is never seen half."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def write_markdown(path: Path, compared: Compared, tables: Sequence[Table]) -> None:
    """compare.md."""
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
    whole(path, "\n\n".join(parts) + "\n")


def write_csv(path: Path, compared: Compared) -> None:
    """compare.csv: a row a measured value, not smoothed."""
    unfinished = path.with_name(path.name + ".tmp")
    with open(unfinished, "w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["arm", "seed", "step", *(f"{axis}_total" for axis in AXES[1:]), "metric", "value"])
        for arm, runs in compared.arms.items():
            for seed, run in runs.items():
                for metric, curve in run.curves.items():
                    for *place, value in zip(*(curve.x[axis] for axis in AXES), curve.y, strict=True):
                        *whole_numbers, seconds = place
                        cells = [*(f"{n:.0f}" for n in whole_numbers), f"{seconds:.6g}"]
                        cells += [metric, repr(float(value))]
                        rows.writerow([arm, seed, *cells])
    os.replace(unfinished, path)
