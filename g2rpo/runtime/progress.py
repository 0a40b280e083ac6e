"""How far work has come: a bar or a table on a terminal, a line now and then elsewhere."""

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
"""Between lines of progress where there is no terminal to draw a bar on."""


class _Rate(ProgressColumn):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.1f} {self.what}/s")


@contextmanager
def counted(
    total: int, what: str, doing: str, console: Console | None = None
) -> Iterator[Callable[[int], None]]:
    """A function to be called with how many are done so far.

    Args:
        total: of them; 0 shows nothing.
        what: they are, such as "pictures".
        doing: what happens to them, before the bar, such as "scoring".
        console: to write to; None = stderr. A quiet one shows nothing.
    """
    console = console or Console(stderr=True)
    if not total or console.quiet:
        yield lambda done: None
    elif console.is_terminal:
        columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), _Rate(what), TimeLeft())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda done: bar.update(task, completed=done)
    else:
        began = told = time.monotonic()

        def line(done: int) -> None:
            nonlocal told
            if not done or ((now := time.monotonic()) - told < LINE_SECONDS and done < total):
                return
            rate, told = done / max(now - began, 1e-9), now
            left = f", {format_seconds((total - done) / rate)} left" if done < total else ""
            text = f"{done}/{total} {what}, {rate:.1f} {what}/s{left}"
            console.print(text, soft_wrap=True, markup=False, emoji=False, highlight=False)

        yield line


class RunProgress:
    """The run's line on the terminal: step, rewards, forwards per second, time left.

    On a terminal one table is kept up to date in place; elsewhere (a log file, a pipe) each step is a line.
    """

    def __init__(self, iterations: int, done: int = 0, *, console: Console | None = None) -> None:
        """`iterations` of the whole run, of which `done` are behind."""
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
        """Takes the metrics of one iteration: `step` (counted from 1), `nfe`, `reward/...`."""
        if not self._nfe and "seconds" in metrics:  # what comes before the first iteration comes once
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
        """A line that stays, above the live table."""
        self._console.print(text, soft_wrap=True, markup=False, emoji=False, highlight=False)

    def close(self) -> None:
        """Leaves the last state standing."""
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
    """`45 s`, `3 min 05 s`, `2 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
