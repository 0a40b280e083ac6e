"""The live display of a command on a terminal: phases with their time left, and the state of a training run.

    iteration 6/66 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  left 13 min 02 s
    rollout: 16/360 forwards, 38 forwards/s, 9 s left
    verifier 0.8997 (+0.0798)   invalid 0.0%   NFE/s 28   GPU 0.4 GB
    evaluation:   verifier 0.8882 (+0.0385 ± 0.0160)
    samples: runs/tiny/samples/step_000005/grid.png

What is printed meanwhile, by a reward or by a library, appears above it as ordinary lines. The streams are
replaced once, for the whole command, so that code that puts `sys.stdout` back has no effect on the display.
Where there is no terminal that can redraw lines (a pipe, TERM=dumb, a CI service), nothing of this is used,
and `runtime.progress.Lines` prints plain lines.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from g2rpo.runtime.progress import TICKER, Phase, RunStatus, format_seconds, showing
from g2rpo.runtime.stop_signals import acknowledging

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live

APPEARS_AFTER = 1.0
"""Seconds before a phase outside of a run is shown: what is done by then would only flicker."""

BAR_WIDTH = 40


def has_live_terminal() -> bool:
    """Whether standard output is a terminal that can redraw lines, and nobody asked for plain output."""
    if os.environ.get("TERM", "").lower() in ("", "dumb", "unknown"):
        return False
    if os.environ.get("CI", "").lower() not in ("", "0", "false") or os.environ.get("RANK", "") not in (
        "",
        "0",
    ):
        return False
    return sys.stdout is not None and sys.stdout.isatty()


@contextmanager
def live_progress() -> Iterator[None]:
    """Shows the progress of a command: live on a terminal, by plain lines elsewhere."""
    if not has_live_terminal():
        yield
        return
    out, err = sys.stdout, sys.stderr
    display = LiveDisplay(out)
    sys.stdout = _Stream(out, display)  # it delegates the rest to the stream
    if err is not None and err.isatty():
        sys.stderr = _Stream(err, display)
    try:
        with showing(display), acknowledging(display.later):
            yield
    finally:
        display.close()
        sys.stdout, sys.stderr = out, err


class _Stream:
    """A standard stream whose complete lines appear above a live display while there is one."""

    def __init__(self, stream: Any, display: LiveDisplay) -> None:
        self._stream, self._display = stream, display
        self._partial = ""  # a line that is not complete yet

    def write(self, text: str) -> int:
        with self._display.unless_live() as plain:
            if plain or not isinstance(text, str):
                self._write_partial()
                return int(self._stream.write(text))
        *lines, self._partial = (self._partial + text).split("\n")
        # What precedes a carriage return was to be overwritten, such as earlier states of a progress bar.
        self._display.print_lines(line.rstrip("\r").rpartition("\r")[2] for line in lines)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._display.unless_live() as plain:
            if plain:
                self._write_partial()
        self._stream.flush()

    def _write_partial(self) -> None:
        partial, self._partial = self._partial, ""
        if partial:
            self._stream.write(partial)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class LiveDisplay:
    """Shows phases and the state of a run in a few lines that are redrawn in place.

    One thread draws everything. A stop signal raises KeyboardInterrupt in the main thread, whatever it does:
    if it were drawing, the lines on the terminal would no longer be those that the display remembers, and
    parts of the block would stay. In the same way, what a destructor or a library prints while that thread
    draws is kept until it has drawn.

    Attributes:
        is_live: these lines are on the terminal now.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._lock = threading.RLock()  # of the terminal, and of the change to and from `is_live`
        self._phases: list[Phase] = []
        self._status: RunStatus | None = None
        self._live: Live | None = None
        self._console: Console | None = None
        self._closed = False
        self._pending: SimpleQueue[str] = SimpleQueue()
        self._process = os.getpid()
        # A SimpleQueue can be used again while it is in use: a destructor that prints may come at any moment.
        self._work: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._drawer = threading.Thread(target=self._draw_all, name="g2rpo-display", daemon=True)
        self._drawer.start()

    @property
    def is_live(self) -> bool:
        return self._live is not None

    def note(self, text: str) -> None:
        self.print_lines(text.split("\n"))

    def begin(self, phase: Phase) -> None:
        self._phases.append(phase)
        TICKER.watch(self)

    def end(self, phase: Phase) -> None:
        with suppress(ValueError):  # an interrupted one may not have begun
            self._phases.remove(phase)
        self._rest()

    def run(self, status: RunStatus | None, *, iteration: bool = False) -> None:
        if status is None:
            self._draw(self._leave)
        else:
            self._status = status
            TICKER.watch(self)
        self._rest()

    def later(self, text: str) -> None:
        """Prints a line soon, from another thread: a signal handler may have interrupted this one."""
        if self.is_live:
            self._pending.put(text)
        else:
            with suppress(OSError):  # nobody reads it
                os.write(2, f"{text}\n".encode("ascii", "replace"))

    def tick(self) -> None:
        """Redraws; called regularly while there is something to show."""
        self._draw(self._redraw)

    def close(self) -> None:
        """Removes the display and leaves the terminal as it was."""
        TICKER.forget(self)
        self._draw(self._remove)
        self._closed = True
        self._work.put(None)
        self._drawer.join()

    def print_lines(self, lines: Iterable[str]) -> None:
        """Prints lines above the display, as they are; returns when they are written."""
        text = list(lines)
        if threading.current_thread() is self._drawer:
            for line in text:
                self._pending.put(line)
        elif self._is_drawn:
            self._draw(lambda: self._print(text))
        else:
            print(*text, sep="\n", file=self._stream, flush=True)

    @contextmanager
    def unless_live(self) -> Iterator[bool]:
        """Yields whether a stream may be written directly, which stays so within the block if it is True."""
        if not self._is_drawn:
            yield True
        elif threading.current_thread() is self._drawer:
            yield False
        else:
            with self._lock:
                if not self.is_live:
                    yield True
                    return
            yield False

    @property
    def _is_drawn(self) -> bool:
        """Whether there is a thread that draws; a fork of the process has none."""
        return not self._closed and os.getpid() == self._process

    def _rest(self) -> None:
        """Removes the display if there is nothing to show."""
        if not self._phases and self._status is None:
            TICKER.forget(self)
            self._draw(self._remove_if_idle)

    def _draw(self, work: Callable[[], None]) -> None:
        """Lets the thread that draws do `work`, and waits for it."""
        if self._is_drawn:
            done: Future[None] = Future()
            self._work.put((done, work))
            while self._drawer.is_alive() and not wait([done], 1.0).done:
                pass
            if done.done():
                done.result()

    # Everything below runs in the thread that draws.

    def _draw_all(self) -> None:
        while (item := self._work.get()) is not None:
            done, work = item
            try:
                work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._print_line(line)
        self._print_pending()

    def _print_line(self, line: str) -> None:
        from rich.text import Text

        if self._live is None or self._console is None:
            print(line, file=self._stream, flush=True)
        else:
            text = Text.from_ansi(line, no_wrap=True, overflow="ignore")
            self._console.print(text, soft_wrap=True, highlight=False)

    def _redraw(self) -> None:
        self._print_pending()
        if self._live is None and self._is_due():
            self._start()
        if self._live is not None:
            self._live.refresh()

    def _is_due(self) -> bool:
        if self._status is not None:
            return True
        phases = list(self._phases)
        return bool(phases) and time.monotonic() - phases[0].began >= APPEARS_AFTER

    def _leave(self) -> None:
        """The run has ended: its last state stays on the terminal."""
        if self._live is not None and self._status is not None:
            self._live.transient = False
            self._stop()
        self._status = None

    def _remove_if_idle(self) -> None:
        if not self._phases and self._status is None:
            self._stop()

    def _remove(self) -> None:
        self._phases, self._status = [], None
        self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            with self._lock:
                try:
                    self._live.stop()
                finally:
                    self._live = None
            self._print_pending()

    def _start(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=self._stream, markup=False, emoji=False)
        live = Live(
            self,
            console=self._console,
            auto_refresh=False,  # TICKER's thread does it
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with self._lock:
            live.start()
            self._live = live

    def _print_pending(self) -> None:
        with suppress(Empty):
            while True:
                self._print_line(self._pending.get_nowait())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines of the display, none wider than the terminal: wrapped lines could not be redrawn."""
        from rich.text import Text

        width, ellipsis = max(options.max_width - 1, 1), "..." if options.ascii_only else "…"
        lines: list[Text] = []
        status, phases, now = self._status, list(self._phases), time.monotonic()
        if status is not None:
            lines.append(_head(status, width, ascii_only=options.ascii_only))
        if phases:
            lines.append(Text(cropped(phases[-1].describe(now), width, ellipsis), style="cyan"))
        if status is not None:
            cells = [cell for cell in status.cells()[1:] if not cell.startswith("left ")]
            lines += [Text(line) for line in packed(cells, width, ellipsis)]
            if status.evaluations:
                evaluation = packed(["evaluation:", *status.evaluation_cells()], width, ellipsis)
                lines += [Text(line) for line in evaluation]
            if status.samples is not None:
                path = cropped_path(f"{status.samples}", width - len("samples: "), ellipsis)
                lines.append(Text(f"samples: {path}"))
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
            yield line


def _head(status: RunStatus, width: int, *, ascii_only: bool) -> Any:
    """The first line: iteration, bar and time left, as far as they fit."""
    from rich.text import Text

    count = f"{status.iteration}/{status.iterations}"
    name = f"iteration {count}" if len(f"iteration {count}") <= width else count[:width]
    left = "" if status.seconds_left is None else f"left {format_seconds(status.seconds_left)}"
    free = width - len(name) - len(left) - 3
    line = Text(name, style="bold")
    if free >= 10:
        length = min(free, BAR_WIDTH)
        full = length * status.iteration // max(status.iterations, 1)
        done, rest = ("#", "-") if ascii_only else ("━", "━")
        line.append(" ").append(done * full, style="not bold green")
        line.append(rest * (length - full), style="not bold bright_black")
    if len(name) + len(left) + 2 <= width and left:
        line.append(f"  {left}", style="not bold")
    return line


def packed(cells: Iterable[str], width: int, ellipsis: str = "…") -> list[str]:
    """Distributes texts over as many lines as they need, with three blanks between them."""
    lines: list[str] = []
    for cell in cells:
        if lines and len(lines[-1]) + 3 + len(cell) <= width:
            lines[-1] += f"   {cell}"
        else:
            lines.append(cropped(cell, width, ellipsis))
    return lines


def cropped(text: str, width: int, ellipsis: str = "…") -> str:
    """Returns the text, or as much of its beginning as fits."""
    return text if len(text) <= width else text[: max(width - len(ellipsis), 0)] + ellipsis[:width]


def cropped_path(text: str, width: int, ellipsis: str = "…") -> str:
    """Returns the path, or as much of its end, which tells files apart, as fits."""
    kept = max(width - len(ellipsis), 1)
    return text if len(text) <= width else ellipsis + text[-kept:]
