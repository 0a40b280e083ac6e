"""How far a count has come: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.progress import TimeRemainingColumn as TimeLeft
from rich.text import Text

from g2rpo.run.metrics import format_seconds

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
