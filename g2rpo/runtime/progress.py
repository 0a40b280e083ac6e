"""Progress display: a bar or a live table on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.progress import TimeRemainingColumn as TimeLeft
from rich.table import Table
from rich.text import Text

from g2rpo.runtime.processes import rank

LINE_SECONDS = 10.0
"""Seconds between lines of progress where the output is not a terminal."""


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.1f} {self.unit}/s")


@contextmanager
def show_progress(
    total: int, unit: str, activity: str, console: Console | None = None
) -> Iterator[Callable[[int], None]]:
    """Shows the progress of counted items; yields a function to call with the number of items done so far.

    Args:
        total: number of items; 0 shows nothing.
        unit: name of the items in the plural, such as "images".
        activity: text before the bar, such as "scoring".
        console: where to write; None: stderr. A quiet console shows nothing.
    """
    console = console or Console(stderr=True)
    if not total or console.quiet:
        yield lambda done: None
    elif console.is_terminal:
        columns = (TextColumn(activity), BarColumn(), MofNCompleteColumn(), _Rate(unit), TimeLeft())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda done: bar.update(task, completed=done)
    else:
        started = last_line = time.monotonic()

        def print_line(done: int) -> None:
            nonlocal last_line
            if not done or ((now := time.monotonic()) - last_line < LINE_SECONDS and done < total):
                return
            rate, last_line = done / max(now - started, 1e-9), now
            left = f", {format_seconds((total - done) / rate)} left" if done < total else ""
            text = f"{done}/{total} {unit}, {rate:.1f} {unit}/s{left}"
            console.print(text, soft_wrap=True, markup=False, emoji=False, highlight=False)

        yield print_line


class RunProgress:
    """Progress of a training run: iteration, rewards, forwards per second and remaining time.

    On a terminal a table is updated in place; elsewhere (a log file, a pipe) each iteration prints a line.
    """

    def __init__(self, iterations: int, done: int = 0, *, console: Console | None = None) -> None:
        """Starts the display.

        Args:
            iterations: number of iterations of the run.
            done: how many of them were completed before this start.
            console: where to write; None: stdout of rank 0.
        """
        self._iterations = iterations
        self._console = console or Console(quiet=rank() > 0)
        self._started = time.monotonic()
        self._done_before = done
        self._nfe = 0
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=False)
            self._live.start()

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Shows the metrics of one iteration: `step` (counted from 1), `nfe`, `reward/...`."""
        if not self._nfe and "seconds" in metrics:  # start-up is not repeated, so the rate leaves it out
            self._started = time.monotonic() - metrics["seconds"]
        self._nfe += metrics.get("nfe", 0)
        cells = self._cells(metrics)
        if self._live is None:
            self._console.print("  ".join(f"{name} {value}" for name, value in cells.items()), soft_wrap=True)
            return
        table = Table(*cells, box=None, pad_edge=False)
        table.add_row(*cells.values())
        self._live.update(table)

    def note(self, text: str) -> None:
        """Prints a permanent line above the live table."""
        self._console.print(text, soft_wrap=True, markup=False, emoji=False, highlight=False)

    def close(self) -> None:
        """Stops the live table; its last state stays on the terminal."""
        if self._live is not None:
            self._live.stop()

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cells(self, metrics: Mapping[str, Any]) -> dict[str, str]:
        seconds = max(time.monotonic() - self._started, 1e-9)
        done = metrics["step"] - self._done_before
        left = seconds / max(done, 1) * (self._iterations - metrics["step"])
        cells = {"step": f"{metrics['step']}/{self._iterations}"}
        for name, value in metrics.items():
            if name.startswith(("reward/", "eval/")):
                cells[name.removeprefix("reward/")] = f"{value:.4f}"
        return cells | {"NFE/s": f"{self._nfe / seconds:.0f}", "left": format_seconds(left)}


def format_seconds(seconds: float) -> str:
    """Formats a duration as `45 s`, `3 min 05 s` or `2 h 07 min`."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"
