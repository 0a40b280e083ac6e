"""What the tab "Runs" shows of run folders: state, curves, health and sample grids; and stopping a run.

Run folders are read by the report's reader (report/record.py), which imports nothing of a run and loads no
model. Every function takes the folder from a fixed list of runs, never a path of the browser.
"""

from __future__ import annotations

import signal
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
from markupsafe import Markup

from g2rpo.inference.images import read_png_text
from g2rpo.report.charts import COLOURS, Series, line_chart, number
from g2rpo.report.findings import (
    evaluated_names,
    evaluation_series,
    largest_of,
    metric_series,
    reward_series,
)
from g2rpo.report.page import HEALTH
from g2rpo.report.pictures import data_uri
from g2rpo.report.record import RunRecord, read_run
from g2rpo.run.lock import read_holder

MAX_RUNS = COLOURS
"""Most runs that are shown together: one per colour."""

Point = tuple[float, float, float | None]
"""Iteration, value, and half width of the band, as in `charts.Series`."""

SAMPLE_PX = 256
"""Longer side of the images of a sample grid."""

WATCHED = (
    "config.toml",
    "metrics.jsonl",
    "groups.jsonl",
    "warnings.jsonl",
    "finished",
    ".lock",
    "latest",
    "samples",
)
"""Files and folders of a run whose time tells that the page must be drawn again."""


@dataclass(frozen=True)
class RunView:
    """A run as it was read, or why it cannot be shown.

    Attributes:
        name: its short name.
        record: None if it cannot be read.
        problem: the reason, else "".
    """

    name: str
    record: RunRecord | None
    problem: str = ""


def read_view(name: str, folder: Path) -> RunView:
    """Reads a run; a folder that is deleted, foreign or damaged gives a view with the reason."""
    try:
        if not folder.is_dir():
            return RunView(name, None, f"{folder} no longer exists; it was deleted or moved")
        record = read_run(folder)
        _check(record)
    except (ValueError, OSError) as error:
        return RunView(name, None, str(error))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        # The records have the right format and other content than g2rpo writes.
        return RunView(name, None, f"{folder} contains records that g2rpo did not write ({error!r})")
    return RunView(name, record)


def _check(record: RunRecord) -> None:
    """Checks what charts rely on: the metrics of a run are numbers, or None where there is none.

    Raises:
        ValueError: they are not.
    """
    for line in (*record.iterations, *record.evaluations):
        for key, value in line.items():
            if value is not None and not isinstance(value, int | float):
                file = record.folder / "metrics.jsonl"
                raise ValueError(f"{file}: {key} of iteration {line['step']} is not a number: {value!r:.80}")


def fingerprint(folders: Sequence[Path]) -> tuple[Any, ...]:
    """Returns what changes whenever the page of these runs would."""
    marks: list[Any] = []
    for folder in folders:
        for name in WATCHED:
            try:
                stat = (folder / name).stat()
                marks.append((str(folder), name, stat.st_mtime_ns, stat.st_size))
            except OSError:
                marks.append((str(folder), name, None))
    return tuple(marks)


# ---- state and stopping


@dataclass(frozen=True)
class RunState:
    """Whether a run is at work.

    Attributes:
        kind: "finished", "running" (on this machine, verified), "elsewhere" (another machine, or a process
            that cannot be verified) or "stopped".
        text: for people.
        pid, since: the process of a running run.
    """

    kind: str
    text: str
    pid: int | None = None
    since: str = ""


def run_state(record: RunRecord) -> RunState:
    """Returns the state of a run."""
    total = record.config.get("iterations", "?")
    progress = f"{record.done} of {total} iterations"
    holder = read_holder(record.folder)
    if holder is not None:
        try:
            process = holder.process(record.folder)
        except PermissionError as error:
            return RunState("elsewhere", f"running: {progress}; {error}, so it cannot be stopped here")
        if process is not None:
            text = f"running: {progress}{_left(record)}; process {holder.pid}, since {holder.since}"
            return RunState("running", text, holder.pid, holder.since)
        if not holder.is_here:
            return RunState(
                "elsewhere",
                f"{progress}; in use by process {holder.pid} on {holder.host}, since {holder.since}. It "
                "cannot be verified or stopped from this machine",
            )
    if record.finished:
        return RunState("finished", f"finished after {record.done} iterations")
    return RunState("stopped", f"stopped after {progress}; `g2rpo train` with the same settings continues it")


def _left(record: RunRecord) -> str:
    total = record.config.get("iterations")
    seconds = [line["seconds"] for line in record.iterations if isinstance(line.get("seconds"), int | float)]
    if not isinstance(total, int) or not seconds or record.done >= total:
        return ""
    left = statistics.median(seconds[-20:]) * (total - record.done)
    shown = (
        f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min" if left < 6000 else f"{left / 3600:.1f} h"
    )
    return f", about {shown} left"


def stop_run(folder: Path, pid: int, since: str) -> str:
    """Asks a run to stop: SIGTERM, on which it writes a checkpoint.

    Args:
        folder: the run folder.
        pid, since: the process that the person confirmed; another one is left alone.

    Returns:
        What happens now.

    Raises:
        ValueError: the run is no longer at work in that process, or it cannot be signalled.
    """
    holder = read_holder(folder)
    if holder is None or (holder.pid, holder.since) != (pid, since):
        raise ValueError("that process no longer runs this run, so nothing was stopped")
    try:
        process = holder.process(folder)
        if process is None:
            raise ValueError(f"process {pid} does not hold the lock of {folder}, so nothing was stopped")
        process.send_signal(signal.SIGTERM)  # psutil refuses a pid that another process took in the meantime
    except (PermissionError, psutil.AccessDenied) as error:
        raise ValueError(f"process {pid} cannot be stopped from here: {error}") from error
    except psutil.NoSuchProcess as error:
        raise ValueError(f"process {pid} has ended, so nothing was stopped") from error
    return (
        f"stop requested (SIGTERM to process {pid}): the run writes a checkpoint and ends. "
        "`g2rpo train` with the same settings continues from it"
    )


# ---- charts


@dataclass(frozen=True)
class Section:
    """Charts under one heading.

    Attributes:
        title: the heading.
        charts: figures as HTML.
        missing: what to say without charts.
    """

    title: str
    charts: tuple[Markup, ...]
    missing: str


def sections(views: Sequence[RunView]) -> list[Section]:
    """Returns the charts of several runs, one line per run in each chart."""
    records = {view.name: view.record for view in views if view.record is not None}
    return [
        Section(
            "Evaluations",
            _charts(records, _union(records, evaluated_names), _evaluation_title, evaluation_series),
            "no evaluation is recorded yet (eval_every, eval_prompts)",
        ),
        Section(
            "Rewards of training images",
            _charts(
                records,
                _union(records, lambda record: record.trained),
                lambda name, _: f"{name}, training images (band: standard error over the groups)",
                reward_series,
            ),
            "no iteration is recorded yet",
        ),
        Section("Health", _health(records), "no iteration is recorded yet"),
    ]


def _union(records: Mapping[str, RunRecord], names: Callable[[RunRecord], list[str]]) -> list[str]:
    return list(dict.fromkeys(name for record in records.values() for name in names(record)))


def _evaluation_title(name: str, records: Mapping[str, RunRecord]) -> str:
    trained = [name in record.trained for record in records.values()]
    kind = "trained" if all(trained) else "held out" if not any(trained) else "trained by some of the runs"
    return f"{name}, evaluation ({kind}; band: standard error)"


def _charts(
    records: Mapping[str, RunRecord],
    keys: Sequence[str],
    title: Callable[[str, Mapping[str, RunRecord]], str],
    series: Callable[[RunRecord, str], Series],
) -> tuple[Markup, ...]:
    charts = []
    for key in keys:
        lines = [
            Series(run, drawn.points, drawn.dots)
            for run, record in records.items()
            if (drawn := series(record, key)).points
        ]
        if lines:
            only = f" ({lines[0].name} only)" if len(lines) == 1 < len(records) else ""
            charts.append(line_chart(title(key, records) + only, lines))
    return tuple(charts)


def _health(records: Mapping[str, RunRecord]) -> tuple[Markup, ...]:
    titles = dict(HEALTH)
    charts = _charts(
        records,
        list(titles),
        lambda key, _: titles[key],
        lambda record, key: metric_series(record.iterations, key),
    )
    deviation = _charts(
        records,
        ["velocity_dev/"],
        lambda key, _: "Velocity deviation of update against rollout, largest noise step",
        lambda record, key: largest_of(record.iterations, key, key),
    )
    return (*charts, *deviation)


@dataclass(frozen=True)
class Facts:
    """The line of a run in the table.

    Attributes:
        name: short name.
        state: see `RunState`.
        iterations: done / all.
        rewards: last mean of each trained reward and its change since the first iterations.
        seconds: median of an iteration.
        invalid: share of invalid samples in the last iteration.
        warnings: number of warnings, with the latest.
    """

    name: str
    state: RunState
    iterations: str
    rewards: str
    seconds: str
    invalid: str
    warnings: str


def facts(view: RunView) -> Facts:
    """Returns the line of a run."""
    record = view.record
    assert record is not None
    lines = record.iterations
    last: Mapping[str, Any] = lines[-1] if lines else {}
    seconds = [line["seconds"] for line in lines if isinstance(line.get("seconds"), int | float)]
    warning = record.warnings[-1] if record.warnings else None
    return Facts(
        view.name,
        run_state(record),
        f"{record.done} / {record.config.get('iterations', '?')}",
        "; ".join(filter(None, (_reward_change(record, name) for name in record.trained))) or "none yet",
        f"{number(statistics.median(seconds), 3)} s" if seconds else "none yet",
        f"{100 * float(last['invalid_fraction']):.1f} %" if "invalid_fraction" in last else "none yet",
        "none"
        if warning is None
        else f"{len(record.warnings)}: {warning.get('message') or warning.get('kind')} "
        f"(iteration {warning.get('step')})",
    )


def _reward_change(record: RunRecord, name: str) -> str:
    """The mean of the last tenth of the iterations against that of the first tenth."""
    values = [y for _, y, _ in reward_series(record, name).points]
    if not values:
        return ""
    span = max(1, len(values) // 10)
    end, start = statistics.fmean(values[-span:]), statistics.fmean(values[:span])
    change = number(end - start, 3) if end < start else f"+{number(end - start, 3)}"
    return f"{name} {number(end)}" + (f" ({change})" if len(values) > 1 else "")


# ---- sample grids


def grid_steps(views: Sequence[RunView]) -> list[int]:
    """Returns the iterations at which any of the runs drew its sample grid, ascending."""
    return sorted(
        {step for view in views if view.record for step, images in view.record.samples.items() if images}
    )


@dataclass(frozen=True)
class GridImage:
    """One image of a sample grid.

    Attributes:
        uri: the image as data URI.
        prompt, seed: of the image; None if the file does not say.
    """

    uri: str
    prompt: str
    seed: Any


def grid_at(view: RunView, step: int) -> tuple[int | None, list[GridImage]]:
    """Returns a run's sample grid at an iteration, or its last one before that.

    Returns:
        The iteration of the grid (None: there is none yet), and the images in the order of prompts and seeds.

    Raises:
        ValueError: an image is damaged, or was deleted.
    """
    assert view.record is not None
    before = [s for s, images in view.record.samples.items() if images and s <= step]
    if not before:
        return None, []
    chosen = max(before)
    images = []
    for file in view.record.samples[chosen]:
        try:
            images.append(_image(file, file.stat().st_mtime_ns))
        except (OSError, ValueError, SyntaxError) as error:  # PIL raises SyntaxError for a broken PNG
            raise ValueError(f"{file} cannot be read: {error}") from error
    return chosen, images


@lru_cache(maxsize=2000)
def _image(file: Path, changed: int) -> GridImage:
    prompt, info = read_png_text(file)
    return GridImage(data_uri(file, SAMPLE_PX), prompt or file.name, info.get("seed"))
