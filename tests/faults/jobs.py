"""Runs commands in forks of one process that has all imports, several at once.

A case is a generator: it yields a `Job`, or a list of jobs that run together, and receives a `Result` for
each. `run_cases` advances all cases and keeps so many processes at work. The parent has one thread, because
a fork copies only the thread that forks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.outcomes import TRACEBACK, Outcome
from faults.tracing import Tracer, Trigger

TIMEOUT_SECONDS = 300.0
"""For a command of a few seconds: the machine may be busy with much else."""


@dataclass(frozen=True)
class Job:
    """One command: `g2rpo WORDS` in a folder.

    Attributes:
        words: arguments of the command.
        cwd: working directory.
        watched: folder whose files the trace counts; None: `cwd`.
        environment: variables to set, or to remove where the value is None.
        trigger: what happens to it.
        disk: function that fills the disk, for triggers of that kind.
        lines: its output is a pipe whose reader goes away after so many lines; None: a file.
        timeout: seconds after which it is killed and counts as hanging.
        grace: of several jobs: seconds that it gets after a peer has died, before SIGTERM as torchrun sends.
        function: called in place of the command.
    """

    words: Sequence[str]
    cwd: Path
    watched: Path | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)
    trigger: Trigger | None = None
    disk: Any = None
    lines: int | None = None
    timeout: float = TIMEOUT_SECONDS
    grace: float = 20.0
    function: Callable[[], None] | None = None


@dataclass(frozen=True)
class Result:
    """What a command left: exit code (negative: the signal that ended it), output, and its trace."""

    words: Sequence[str]
    code: int
    output: str
    errors: str
    seconds: float
    timed_out: bool
    trace: Mapping[str, Any]
    terminated: bool = False

    @property
    def text(self) -> str:
        return self.output + self.errors

    @property
    def traceback(self) -> str:
        """The last line of a traceback, or nothing."""
        _, found, rest = self.text.rpartition("Traceback (most recent call last)")
        return next((line for line in reversed(rest.splitlines()) if line.strip()), "") if found else ""


Case = Generator[Any, Any, "Outcome | list[Outcome]"]


class _Process:
    """A forked child, from its start to its result."""

    _numbers = iter(range(10**9))

    def __init__(self, job: Job, scratch: Path) -> None:
        self.job, self.began = job, time.monotonic()
        stem = scratch / f"job_{next(self._numbers):05d}"
        self.files = [stem.with_suffix(end) for end in (".out", ".err", ".json")]
        self.code: int | None = None
        self.timed_out = self.terminated = False
        self.reader, writer = os.pipe() if job.lines is not None else (None, None)
        self.seen = b""
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if self.reader is not None:
                os.close(self.reader)
            _child(job, self.files, writer)
        if writer is not None:
            os.close(writer)
            os.set_blocking(self.reader, False)

    def poll(self) -> bool:
        """Returns whether it has ended."""
        if self.code is not None:
            return True
        self._read()
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.code = os.waitstatus_to_exitcode(status)
            self.seconds = time.monotonic() - self.began
            self._close()
            return True
        if time.monotonic() - self.began > self.job.timeout and not self.timed_out:
            self.timed_out = True
            os.kill(self.pid, signal.SIGKILL)
        return False

    def _read(self) -> None:
        """Reads from the pipe, and goes away after enough lines, as `head` does."""
        if self.reader is None:
            return
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.reader, 4096):
                self.seen += part
                if self.seen.count(b"\n") >= self.job.lines:
                    return self._close()

    def _close(self) -> None:
        if self.reader is not None:
            os.close(self.reader)
            self.reader = None

    def terminate(self) -> None:
        if self.code is None and not self.terminated:
            self.terminated = True
            os.kill(self.pid, signal.SIGTERM)

    def result(self) -> Result:
        texts = [f.read_text(encoding="utf-8", errors="replace") if f.exists() else "" for f in self.files]
        with contextlib.suppress(OSError):
            for file in self.files:
                file.unlink()
        trace = json.loads(texts[2]) if texts[2] else {}
        output = self.seen.decode(errors="replace") if self.job.lines is not None else texts[0]
        return Result(
            self.job.words,
            self.code or 0,
            output,
            texts[1],
            self.seconds,
            self.timed_out,
            trace,
            self.terminated,
        )


def _child(job: Job, files: Sequence[Path], writer: int | None) -> None:
    """The life of a forked child; never returns."""
    code = 1
    try:
        for number, path in enumerate(files[:2], start=1):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(writer if number == 1 and writer is not None else handle, number)
            os.close(handle)
        if writer is not None:
            os.close(writer)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python starts
        os.chdir(job.cwd)
        os.environ["COLUMNS"] = (
            "300"  # a table that wraps would break the names that messages are checked for
        )
        for name, value in job.environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        if "PYTHONUTF8" in job.environment:  # the encoding that a new interpreter would choose
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(
                    encoding="ascii", errors="strict" if stream is sys.stdout else "backslashreplace"
                )
        sys.path[:] = [entry for entry in sys.path if entry and Path(entry) != Path(__file__).parents[1]]
        tracer = Tracer(job.trigger, job.watched or job.cwd, files[2], job.disk)
        code = _run(job, tracer)
    finally:
        os._exit(code)


def _run(job: Job, tracer: Tracer) -> int:
    """Runs the command as the interpreter does, tracebacks and flushing at the exit included."""
    import traceback

    code = 0
    tracer.start()
    try:
        if job.function is not None:
            job.function()
        else:
            sys.argv = ["g2rpo", *job.words]
            from g2rpo.__main__ import app

            app(prog_name="g2rpo")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    tracer.write()
    try:
        sys.stdout.flush()
    except OSError:
        # What Python prints of it at its exit; the exit code of a command that has succeeded becomes 120.
        code = code or 120
    sys.stderr.flush()
    return code


def run_cases(
    cases: Iterable[tuple[str, Callable[[Path], Case]]],
    folder: Path,
    *,
    at_once: int,
    deadline: float,
    keep: bool = False,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> Iterator[Outcome]:
    """Runs cases, each in a folder of its own, and yields their outcomes as they end.

    Args:
        cases: name and generator function of each; a name is unique.
        folder: for the cases' folders, which are removed unless `keep` is set or the case failed.
        at_once: number of cases at work.
        deadline: `time.monotonic()` after which no case is begun.
    """
    waiting = iter(cases)
    active: list[tuple[str, Path, Case, list[_Process], bool]] = []

    def advance(name: str, own: Path, case: Case, answer: Any) -> list[Outcome]:
        """Sends an answer to a case; starts its next jobs or returns its outcomes."""
        try:
            asked = case.send(answer)
        except StopIteration as end:
            outcomes = end.value if isinstance(end.value, list) else [end.value]
            if not keep and all(outcome.ok for outcome in outcomes):
                shutil.rmtree(own, ignore_errors=True)
            return outcomes
        except Exception as error:  # the case itself; the other cases go on
            return [Outcome(name, "the case itself", TRACEBACK, repr(error))]
        several = isinstance(asked, list)
        processes = [_Process(job, own) for job in (asked if several else [asked])]
        active.append((name, own, case, processes, several))
        return []

    while True:
        while len(active) < at_once and time.monotonic() < deadline:
            item = next(waiting, None)
            if item is None:
                break
            name, make = item
            own = folder / name.replace(":", "_").replace("/", "_")
            shutil.rmtree(own, ignore_errors=True)
            own.mkdir(parents=True)
            yield from advance(name, own, make(own), None)
        if not active:
            return
        time.sleep(0.004)
        for entry in list(active):
            name, own, case, processes, several = entry
            _end_peers(processes)
            if all([process.poll() for process in processes]):
                active.remove(entry)
                results = [process.result() for process in processes]
                yield from advance(name, own, case, results if several else results[0])


def _end_peers(processes: list[_Process]) -> None:
    """Sends SIGTERM to the peers of a process that has died, after their time of grace, as torchrun does."""
    dead = [process for process in processes if process.code not in (None, 0)]
    if dead:
        since = min(process.began + process.seconds for process in dead)
        for process in processes:
            if time.monotonic() - since > process.job.grace:
                process.terminate()
