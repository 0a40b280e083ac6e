"""Progress of long work: what the engine reports, and the display that shows it.

    with phase("sampling", 64, "images") as sampling:   a part of the work, shown with count and time left
        sampling.to(12)
    note("pre-flight: ...")                             a line that stays

The engine reports to whichever display is installed (`showing`) and knows none of them. Without one, `Lines`
prints plain lines. The command line installs a live display on a terminal (cli/display.py). A report only
stores a number: displays read it when they draw, so that counting costs nothing.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

LINE_SECONDS = 10.0
"""Seconds between plain lines about a phase; a shorter phase prints none."""

REPEATED_SECONDS = 60.0
"""The same for a phase that every iteration repeats, because each iteration prints a line of its own."""


class Phase:
    """A part of the work, such as the sampling of 64 images.

    Attributes:
        name: what is done, such as "sampling".
        total: number of items; 0: they are not counted.
        unit: name of the items in the plural.
        done: number of items done so far, which may be a fraction.
        repeated: every iteration of a run has this phase.
        outer: the phase of which it is a part.
        began: time of its beginning, of `time.monotonic`.
        completed: it has ended without an exception.
    """

    def __init__(
        self,
        name: str,
        total: float = 0,
        unit: str = "",
        *,
        repeated: bool = False,
        outer: Phase | None = None,
    ) -> None:
        self.name, self.total, self.unit, self.repeated, self.outer = name, total, unit, repeated, outer
        self.done, self.completed = 0.0, False
        self.began = time.monotonic()
        # Images of a batch count for the images of the work to which the batch belongs.
        self._counts_for = outer if outer is not None and total and outer.unit == unit else None
        self._base = self._counts_for.done if self._counts_for else 0.0

    @property
    def is_shown(self) -> bool:
        """Whether it is shown on its own; otherwise it counts for the phase around it."""
        return self._counts_for is None

    def to(self, done: float) -> None:
        """Reports that `done` items are done."""
        self.done = done
        if self._counts_for is not None:
            self._counts_for.to(self._base + done)

    def add(self, items: float = 1) -> None:
        """Reports that so many more items are done."""
        self.to(self.done + items)

    @property
    def title(self) -> str:
        """Its name after those of the phases of which it is a part."""
        return self.name if self.outer is None else f"{self.outer.title}, {self.name}"

    def seconds_left(self, now: float) -> float | None:
        """Estimated seconds until its end; None: it is not counted, or nothing of it is done yet."""
        if not self.total or self.done <= 0:
            return None
        return max(now - self.began, 0.0) / self.done * max(self.total - self.done, 0.0)

    def describe(self, now: float) -> str:
        """A line such as `sampling: 12/64 images, 1.5 images/s, 35 s left`."""
        if not self.total:
            return f"{self.title}: {format_seconds(now - self.began)} so far"
        text = f"{self.title}: {_count(self.done, self.total)}/{_count(self.total, self.total)} {self.unit}"
        left = self.seconds_left(now)
        if left is None:
            return f"{text}, {format_seconds(now - self.began)} so far"
        rate = self.done / max(now - self.began, 1e-9)
        return f"{text}, {format_rate(rate)} {self.unit}/s, {format_seconds(left)} left"


@dataclass(frozen=True)
class RunStatus:
    """The state of a training run, as a display shows it.

    Attributes:
        iteration, iterations: iterations done, and of the run.
        rewards: name -> mean of the last iteration, and its difference to the run's first; None without one.
        evaluations: name -> mean of the last evaluation, its paired gain and the gain's standard error.
        invalid_share: share of the last iteration's samples that are invalid, in [0, 1]; None: not known.
        nfe_per_second: forwards per second since this start.
        seconds_left: estimated seconds until the last iteration; None before the first one.
        memory_gb: largest GPU memory of a process in the last iteration, in 10^9 bytes; None on a CPU.
        samples: the latest sample grid; None before the first one.
    """

    iteration: int
    iterations: int
    rewards: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)
    evaluations: Mapping[str, tuple[float, float | None, float | None]] = field(default_factory=dict)
    invalid_share: float | None = None
    nfe_per_second: float = 0.0
    seconds_left: float | None = None
    memory_gb: float | None = None
    samples: Path | None = None

    def cells(self) -> list[str]:
        """Its parts as short texts, in the order in which they are shown, without the samples."""
        cells = [f"iteration {self.iteration}/{self.iterations}"]
        cells += [f"{name} {_score(value, change)}" for name, (value, change) in self.rewards.items()]
        if self.invalid_share is not None:
            cells.append(f"invalid {100 * self.invalid_share:.1f}%")
        if self.nfe_per_second:
            cells.append(f"NFE/s {format_rate(self.nfe_per_second)}")
        if self.memory_gb is not None:
            cells.append(f"GPU {self.memory_gb:.1f} GB")
        if self.seconds_left is not None:
            cells.append(f"left {format_seconds(self.seconds_left)}")
        return cells

    def evaluation_cells(self) -> list[str]:
        """The last evaluation, one text per reward."""
        return [
            f"{name} {_score(value, gain, error)}" for name, (value, gain, error) in self.evaluations.items()
        ]


def _score(value: float, change: float | None, error: float | None = None) -> str:
    """Formats a mean with its change and the change's standard error, as far as they are numbers."""
    if not math.isfinite(value):
        return "no score"
    if change is None or not math.isfinite(change):
        return f"{value:.4f}"
    uncertainty = "" if error is None or not math.isfinite(error) else f" ± {error:.4f}"
    return f"{value:.4f} ({change:+.4f}{uncertainty})"


class Display(Protocol):
    """What shows progress to a user. Calls may come from several threads."""

    def note(self, text: str) -> None:
        """Shows a permanent line."""

    def begin(self, phase: Phase) -> None:
        """A phase begins."""

    def end(self, phase: Phase) -> None:
        """A phase has ended."""

    def run(self, status: RunStatus | None, *, iteration: bool = False) -> None:
        """The state of a run has changed, with `iteration` because one was done; None: the run has ended."""


class Lines:
    """Plain lines, for log files and pipes, and where nothing else is installed.

    Notes and one line per iteration go to standard output. Lines about phases go to standard error, every
    `LINE_SECONDS`. Only the first process of several prints.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._phases: list[Phase] = []
        self._last_line = 0.0
        self._described: list[Phase] = []  # of which a line was printed

    def note(self, text: str) -> None:
        if _is_first():
            self._print(text, sys.stdout)

    def begin(self, phase: Phase) -> None:
        with self._lock:
            if not self._phases:
                self._last_line = self._clock()
            self._phases.append(phase)
        TICKER.watch(self)

    def end(self, phase: Phase) -> None:
        with self._lock:
            if phase in self._phases:
                self._phases.remove(phase)
            if phase in self._described:
                self._described.remove(phase)
                if phase.completed:
                    seconds = format_seconds(self._clock() - phase.began)
                    count = f"{_count(phase.total, phase.total)} {phase.unit} in " if phase.total else ""
                    self._print(f"{phase.title}: {count}{seconds}", sys.stderr)
            if not self._phases:
                TICKER.forget(self)

    def run(self, status: RunStatus | None, *, iteration: bool = False) -> None:
        if iteration and status is not None and _is_first():
            self._print("  ".join(status.cells()), sys.stdout)

    def tick(self) -> None:
        """Prints a line about the current phase if one is due."""
        with self._lock:
            if not self._phases or not _is_first():
                return
            phase, now = self._phases[-1], self._clock()
            if now - self._last_line >= (REPEATED_SECONDS if phase.repeated else LINE_SECONDS):
                self._print(phase.describe(now), sys.stderr)
                if phase not in self._described:
                    self._described.append(phase)

    def _print(self, text: str, stream: Any) -> None:
        with self._lock:
            print(text, file=stream, flush=True)
            self._last_line = self._clock()


class _Ticker:
    """A thread that lets displays draw while the work goes on, as long as one has something to show."""

    def __init__(self, seconds: float = 0.5) -> None:
        self._seconds, self._lock = seconds, threading.Lock()
        self._displays: list[Any] = []
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()

    def watch(self, display: Any) -> None:
        """Calls the `tick` of a display regularly from now on."""
        with self._lock:
            if display not in self._displays:
                self._displays.append(display)
                self._wake.set()
            if self._thread is None or not self._thread.is_alive():  # none, or this is a fork of its process
                self._thread = threading.Thread(target=self._run, name="g2rpo-progress", daemon=True)
                self._thread.start()

    def forget(self, display: Any) -> None:
        """Ends the calls."""
        with self._lock:
            if display in self._displays:
                self._displays.remove(display)
            if not self._displays:
                self._wake.clear()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            time.sleep(self._seconds)
            with self._lock:
                displays = list(self._displays)
            for display in displays:
                display.tick()


TICKER = _Ticker()
"""The thread that draws."""

_LINES = Lines()
_display: ContextVar[Display] = ContextVar("display", default=_LINES)
_phases = threading.local()


def current_display() -> Display:
    """Returns the display that is installed, or the plain lines."""
    return _display.get()


@contextmanager
def showing(display: Display) -> Iterator[None]:
    """Installs a display for the block; other threads keep theirs."""
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)


@contextmanager
def phase(name: str, total: float = 0, unit: str = "", *, repeated: bool = False) -> Iterator[Phase]:
    """Shows a part of the work for the block; yields the `Phase`, whose count the work reports.

    A phase within another one is shown as a part of it. If both count the same unit, the inner one adds to
    the count of the outer one instead: a batch of images counts for the images to which it belongs.

    Args:
        name: what is done, such as "sampling".
        total: number of items; 0: they are not counted.
        unit: name of the items in the plural, such as "images".
        repeated: every iteration of a run has this phase.
    """
    stack: list[Phase] = _phases.__dict__.setdefault("stack", [])
    depth, display = len(stack), current_display()
    part = Phase(name, total, unit, repeated=repeated, outer=stack[-1] if stack else None)
    try:
        stack.append(part)
        if part.is_shown:
            display.begin(part)
        yield part
        part.completed = True
    finally:
        del stack[depth:]
        if part.is_shown:
            display.end(part)


def note(text: str) -> None:
    """Shows a permanent line."""
    current_display().note(text)


class RunProgress:
    """Progress of a training run, which it computes from the metrics and gives to the display."""

    def __init__(
        self,
        iterations: int,
        done: int = 0,
        *,
        metrics: Sequence[Mapping[str, Any]] = (),
        samples: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the display.

        Args:
            iterations: number of iterations of the run.
            done: how many of them were completed before this start.
            metrics: the lines of metrics so far; changes are shown since the first iteration among them.
            samples: the latest sample grid so far.
            clock: returns seconds.
        """
        self._clock, self._started, self._done_before, self._nfe = clock, clock(), done, 0
        self._first: dict[str, float] = {}
        self._status = RunStatus(done, iterations, samples=samples)
        for line in metrics:
            self._observe(line)
        self._display = current_display()
        self._display.run(self._status)

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Shows the metrics of one iteration: `step` (counted from 1), `nfe`, `reward/...`."""
        now = self._clock()
        if not self._nfe and "seconds" in metrics:  # start-up is not repeated, so the rate leaves it out
            self._started = now - metrics["seconds"]
        self._nfe += metrics.get("nfe", 0)
        seconds, done = max(now - self._started, 1e-9), metrics["step"] - self._done_before
        self._observe(metrics)
        self._status = replace(
            self._status,
            nfe_per_second=self._nfe / seconds,
            seconds_left=seconds / max(done, 1) * (self._status.iterations - metrics["step"]),
            memory_gb=metrics.get("peak_memory_gb"),
        )
        self._display.run(self._status, iteration=True)

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        """Shows the metrics of an evaluation: `step`, `eval/...`, `eval_gain/...`; also as a line."""
        self._observe(metrics)
        self._display.run(self._status)
        after = f"after iteration {metrics['step']}" if metrics["step"] else "before training"
        self.note(f"evaluation {after}: {'  '.join(self._status.evaluation_cells())}")

    def sampled(self, grid: Path) -> None:
        """Shows the path of a new sample grid."""
        self._status = replace(self._status, samples=grid)
        self._display.run(self._status)

    def note(self, text: str) -> None:
        """Shows a permanent line."""
        self._display.note(text)

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.run(None)

    def _observe(self, metrics: Mapping[str, Any]) -> None:
        """Takes rewards and evaluations from a line of metrics."""
        values = {n.removeprefix("reward/"): v for n, v in metrics.items() if n.startswith("reward/")}
        if values:
            for name, value in values.items():
                if value is not None and math.isfinite(value):
                    self._first.setdefault(name, value)
            known = {n: v for n, v in values.items() if v is not None}
            self._status = replace(
                self._status,
                iteration=metrics["step"],
                rewards={n: (v, self._change(n, v, metrics["step"])) for n, v in known.items()},
                invalid_share=metrics.get("invalid_fraction"),
            )
        evaluated = {n.removeprefix("eval/"): v for n, v in metrics.items() if n.startswith("eval/")}
        if evaluated:
            self._status = replace(
                self._status,
                evaluations={
                    name: (value, metrics.get(f"eval_gain/{name}"), metrics.get(f"eval_gain_se/{name}"))
                    for name, value in evaluated.items()
                    if value is not None
                },
            )

    def _change(self, name: str, value: float, iteration: int) -> float | None:
        """Difference to the run's first iteration with a score."""
        return value - self._first[name] if iteration > 1 and name in self._first else None


def _is_first() -> bool:
    """Whether this process prints for all; unlike `processes.rank` it needs no torch."""
    return os.environ.get("RANK", "").strip() in ("", "0")


def _count(number: float, total: float) -> str:
    """A whole number of items; of few and large ones, such as gigabytes, with a decimal."""
    return f"{number:.1f}" if total != int(total) else f"{int(number)}"


def format_rate(rate: float) -> str:
    """Formats items per second with two or three digits: `0.25`, `3.1`, `812`."""
    if rate < 1:
        return f"{rate:.2g}"
    return f"{rate:.1f}" if rate < 10 else f"{rate:.0f}"


def format_seconds(seconds: float) -> str:
    """Formats a duration as `45 s`, `3 min 05 s` or `2 h 07 min`."""
    rounded = round(max(seconds, 0.0))
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"
