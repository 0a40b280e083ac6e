"""Compares methods: trains arms x seeds with the ordinary trainer, and reports values at equal cost.

    DIR/runs/<arm>/<seed>    ordinary run folders      DIR/logs/    output of the runs
    DIR/compare.json         arms and their folders    DIR/compare.md .csv, curves.png .svg, index.html

The same command continues an interrupted comparison; finished runs are not trained again.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from g2rpo.comparison.arms import Arm, check_names, read_runs
from g2rpo.comparison.curves import AXES, SMOOTHED, cost, curves_of
from g2rpo.comparison.launcher import Job, train_side_by_side
from g2rpo.comparison.page import write_curves, write_page
from g2rpo.comparison.tables import (
    Compared,
    MeasuredRun,
    MetricTables,
    Table,
    reach_table,
    run_table,
    settings_table,
    value_table,
    warning,
    write_csv,
    write_markdown,
)
from g2rpo.comparison.verdict import difference_table, verdict
from g2rpo.config.identity import evaluation_identity, identity
from g2rpo.config.load import Settings, read_settings
from g2rpo.evaluation.monitor import is_evaluation
from g2rpo.run.metrics import read_metrics
from g2rpo.run.run import checkpoint_to_resume, is_finished
from g2rpo.runtime.records import DamagedFile, read_record, write_record
from g2rpo.runtime.secrets import masked

RECORD = "compare.json"
SMOOTHING = 0.1
"""Share of an axis over which training rewards are averaged."""


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`.

    Attributes:
        out: the folder of the comparison.
        failed: title of each failed run -> reason.
        interrupted: a signal stopped the training.
        values: metric -> its table of values.
        verdict: which arm is best by evaluations, in a sentence.
    """

    out: Path
    failed: dict[str, str]
    interrupted: bool
    values: dict[str, Table] = field(default_factory=dict)
    verdict: str = ""


def compare(
    out: Path,
    arms: Sequence[Arm] = (),
    seeds: Sequence[int] = (),
    runs: Sequence[str] = (),
    *,
    jobs: int = 1,
    smoothing: float = SMOOTHING,
    report_only: bool = False,
    command: str = "",
    say: Callable[[str], None] = print,
) -> Comparison:
    """Trains the missing runs and writes the report.

    Args:
        out: folder of runs, logs and report.
        arms, seeds: what to train.
        runs: `NAME=FOLDER` of existing runs.
        jobs: number of runs that are trained at the same time.
        smoothing: width of the window of training rewards, as a share of the axis's length, in [0, 1).
        report_only: train nothing; without arms and runs, report on those of an earlier call.
        command: the command line, for the report.
        say: as in `train_side_by_side`.

    Raises:
        ValueError: invalid settings, or folders of other runs, before anything is trained; or no run has
            metrics to report on.
    """
    _check_share(smoothing)
    if arms and not seeds:
        raise ValueError("no seeds: give --seeds, such as --seeds 0,1,2")
    existing = read_runs(runs)
    check_names([*(arm.name for arm in arms), *existing])
    commands = [command] if command else []
    folders: dict[str, dict[int, Path]] = {}
    todo = [(arm, seed, out / "runs" / arm.folder / str(seed)) for seed in seeds for arm in arms]
    # All settings first: nothing is trained if one of the runs is invalid.
    planned = [(arm, seed, arm.settings(seed, folder)) for arm, seed, folder in todo]
    jobs_left = []
    for arm, seed, settings in planned:
        _check(arm, settings)
        folders.setdefault(arm.name, {})[seed] = Path(settings.out)
        if not is_finished(settings):
            log = out / "logs" / f"{arm.folder}_{seed}.txt"
            jobs_left.append(Job(f"{arm.name}, seed {seed}", settings, log))
        words = ["g2rpo", "train", arm.recipe, *arm.words(seed, Path(settings.out))]
        commands.append(shlex.join(words))
    folders |= existing
    if not folders:
        if not report_only:
            raise ValueError("nothing to compare: give recipes or --arm with --seeds, or --run NAME=FOLDER")
        folders, commands = _recorded(out)
    commands = [masked(words) for words in commands]  # loading the settings noted their secrets
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "commands": commands,
        "arms": {
            name: {str(seed): _recorded_path(out, path) for seed, path in seeds_of.items()}
            for name, seeds_of in folders.items()
        },
    }
    write_record(out / RECORD, record, indent=1)
    failed: dict[str, str] = {}
    if jobs_left and not report_only:
        if done := len(planned) - len(jobs_left):
            say(f"{done} of {len(planned)} runs are finished already")
        ended = train_side_by_side(jobs_left, jobs, say)
        failed = ended.failed
        if ended.interrupted:
            return Comparison(out, failed, True)
    settings_of = {arm.name: settings for arm, _, settings in reversed(planned)}
    try:
        compared = measured(folders, settings_of, smoothing, commands, failed)
    except NothingMeasured:
        if failed:  # the reasons of the failures are more informative
            return Comparison(out, failed, False)
        raise
    if text := warning(compared):
        say(f"note: {text}")
    return Comparison(out, failed, False, report(out, compared), verdict(compared))


def _check_share(smoothing: float) -> None:
    if not 0 <= smoothing < 1:
        raise ValueError(
            f"--smooth {smoothing:g} is not a share of the cost axis: give a number >= 0 (0 = not smoothed) "
            "and < 1, such as 0.1"
        )


class NothingMeasured(ValueError):
    """No run has written a line of metrics yet."""


def _check(arm: Arm, settings: Settings) -> None:
    try:
        checkpoint_to_resume(settings)
    except ValueError as error:
        raise ValueError(f"arm {arm.name}: {error}") from error
    folder = Path(settings.out).expanduser()
    if (folder / "config.toml").is_file():
        there, here = evaluation_identity(read_settings(folder)), evaluation_identity(settings)
        if there and here and (differ := _differences(there, here)):
            raise ValueError(
                f"arm {arm.name}: {folder} was evaluated with other settings, which cannot be part of the "
                f"same curve: {differ}. Give the same settings, or choose another --out"
            )


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{key}: {there.get(key)!r} and {here[key]!r}" for key in here if here[key] != there.get(key)
    )


def _recorded_path(out: Path, path: Path) -> str:
    """A run's folder as the record stores it: relative if it is inside `out`, so that both can be moved."""
    absolute, base = path.expanduser().absolute(), out.absolute()
    return str(absolute.relative_to(base) if absolute.is_relative_to(base) else absolute)


def _recorded(out: Path) -> tuple[dict[str, dict[int, Path]], list[str]]:
    path = out / RECORD
    if not path.is_file():
        raise ValueError(
            f"{out} contains no comparison (no {RECORD}); give the arms, or choose another --out"
        )
    try:
        record = read_record(path)
        arms = record["arms"]
        folders = {name: {int(s): out / p for s, p in paths.items()} for name, paths in arms.items()}
        return folders, list(record["commands"])
    except DamagedFile as error:
        raise ValueError(f"{error}; give the arms again, which writes a new record") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is not a record of a comparison ({error}); give the arms again") from error


def measured(
    folders: Mapping[str, Mapping[int, Path]],
    planned: Mapping[str, Settings],
    smoothing: float,
    commands: Sequence[str] = (),
    failed: Mapping[str, str] | None = None,
) -> Compared:
    """Reads the metrics and settings of the runs.

    Args:
        folders: arm -> seed -> run folder.
        planned: arm -> its settings, for arms without a run yet.
        smoothing: as in `compare`.
        commands: for the report.
        failed: title of each failed run -> reason.

    Raises:
        ValueError: runs of one arm differ in more than the seed.
        NothingMeasured: no run has metrics.
    """
    arms: dict[str, dict[int, MeasuredRun]] = {}
    settings: dict[str, Any] = {}
    for name, seeds in folders.items():
        arms[name] = {}
        there = {seed: read_settings(p) for seed, p in seeds.items() if (p / "config.toml").is_file()}
        for seed, run_settings in there.items():
            _check_same_arm(name, run_settings, next(iter(there.values())), seeds[seed])
        first = next(iter(there.values()), planned.get(name))
        settings[name] = (
            {k: v for k, v in first.resolved().model_dump().items() if k not in ("seed", "out")}
            if first
            else {}
        )
        for seed, path in seeds.items():
            reason = (failed or {}).get(f"{name}, seed {seed}")
            arms[name][seed] = _run(path, there.get(seed), reason)
    compared = Compared(arms, settings, smoothing, list(commands))
    if not compared.metrics():
        runs = ", ".join(str(path) for seeds in folders.values() for path in seeds.values())
        raise NothingMeasured(f"nothing was measured yet in {runs}; train first")
    return compared


def _check_same_arm(name: str, settings: Settings, first: Settings, path: Path) -> None:
    differ = _differences(identity(first) | {"seed": 0}, identity(settings) | {"seed": 0})
    there, here = evaluation_identity(first), evaluation_identity(settings)
    if there and here:
        differ = "; ".join(filter(None, (differ, _differences(there, here))))
    if differ:
        raise ValueError(
            f"arm {name}: its runs may differ only in the seed, but {path} has other settings than the first "
            f"run: {differ}. Give the two runs different names"
        )


def _run(path: Path, settings: Settings | None, reason: str | None) -> MeasuredRun:
    lines = read_metrics(path / "metrics.jsonl") if (path / "metrics.jsonl").is_file() else []
    trained = [line for line in lines if "nfe" in line]
    step = max((line["step"] for line in trained), default=0)
    if reason is not None:
        state = reason
    elif settings is None:
        state = "not begun"
    elif step < settings.iterations:
        state = f"stopped before iteration {settings.iterations}"
    elif evaluation_identity(settings) and not any(is_evaluation(x) and x["step"] == step for x in lines):
        state = "its last evaluation is missing"
    else:
        state = "finished"
    try:
        costs = {axis: sum(cost(line, axis) for line in trained) for axis in AXES[1:]}
        return MeasuredRun(path, curves_of(lines), step, costs, state)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def report(out: Path, compared: Compared) -> dict[str, Table]:
    """Writes compare.md and .csv, curves.png and .svg, and index.html.

    Returns:
        Metric -> its table of values.
    """
    several = len(compared.arms) > 1
    tables = {
        metric: MetricTables(
            difference_table(compared, metric) if several and not metric.startswith(SMOOTHED) else None,
            value_table(compared, metric),
            reach_table(compared, metric) if several else None,
        )
        for metric in compared.metrics()
    }
    differ = settings_table(compared)
    others = [*([differ] if differ else []), run_table(compared)]
    sentence = verdict(compared)
    write_csv(out / "compare.csv", compared)
    write_curves(out, compared)
    write_markdown(out / "compare.md", compared, sentence, tables, others)
    write_page(out / "index.html", compared, sentence, tables, others)
    return {metric: found.values for metric, found in tables.items()}
