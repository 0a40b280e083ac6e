"""The signals that stop a command, and the rule that tells a repeated signal from a second request.

SIGINT (Ctrl-C), SIGTERM (`kill`, batch systems, torchrun), SIGHUP (a closed terminal), SIGUSR1 and SIGUSR2 (a
batch system's warning before the time limit) all mean the same: stop and keep what is done. So does an output
whose reader has gone, such as the pipe of `g2rpo train | head -1` (`request_stop`).

One request often arrives several times: `timeout` signals a process and its process group, torchrun and srun
pass on what they receive, and a batch system signals every process of a job. On a busy machine the copies
arrive seconds apart, so the time between two signals says nothing. Nor does their sender: `timeout` sends
both copies itself, and so does a shell in which a person types `kill` twice. The rule therefore counts
signals, and asks who can want more than the first one does:

* The first signal is the request. It is acknowledged by a line on stderr that says how to stop at once.
* SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 after it never count. Programs send them, and a program that wants a
  process to end at once sends SIGKILL after a grace period (`timeout -k`, torchrun, Slurm's KillWait).
* SIGINT after it may be a person who does not want to wait. The first SPARE_COPIES of them may still be
  copies of the request, as `timeout` sends them; in a process of a launcher or of a batch job the first
  SPARE_COPIES_IN_JOBS, one for each of the three ways above. They are answered by a line with the number that
  is left. The next one is a second request.

A copy that is mistaken for a second request loses the iterations since the last checkpoint. A second request
that is mistaken for a copy costs one more Ctrl-C.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SPARE_COPIES, SPARE_COPIES_IN_JOBS = 1, 3
"""Number of SIGINTs after the request that may be copies of it, elsewhere and in jobs."""

_JOB_VARIABLES = ("WORLD_SIZE", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
"""Environment variables of launchers and batch systems."""


def spare_copies() -> int:
    """Number of SIGINTs after the request that may be copies of it, in this process."""
    in_job = any(os.environ.get(name, "").strip() for name in _JOB_VARIABLES)
    return SPARE_COPIES_IN_JOBS if in_job else SPARE_COPIES


NO_READER = "closed output"
"""Cause of a stop when nobody reads the output any more."""

# A caller that ignores these (nohup ignores SIGHUP) or handles them itself (as launchers of batch jobs do)
# knows why.
_ONLY_WHERE_THEY_KILL = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class StopRequest:
    """The request to stop one piece of work, made by the first stop signal.

    Attributes:
        made: the request has arrived.
        made_again: a second request has arrived as well.
        cause: why the work stops, such as "SIGTERM"; "" before a request.
    """

    def __init__(self) -> None:
        self.made = self.made_again = False
        self.cause = ""
        self._copies = 0

    def add(self, number: int) -> bool:
        """Counts a signal, and acknowledges it on stderr.

        Returns:
            Whether it is a request: the first signal, or a second request. Copies are not.
        """
        if not self.made:
            self.made, self.cause = True, _take_cause() or signal.Signals(number).name
            _say(f"{self.cause}: stopping; finished work is kept. {_at_once(spare_copies() + 1)}")
            return True
        _take_cause()
        if number != signal.SIGINT:
            return False
        self._copies += 1
        self.made_again = self._copies > spare_copies()
        if not self.made_again:
            _say(f"SIGINT again: still stopping. {_at_once(spare_copies() + 1 - self._copies)}")
        return self.made_again


def _at_once(count: int) -> str:
    times = f"{count} more times" if count > 1 else "once more"
    return f"To stop at once and lose unfinished work, press Ctrl-C {times}."


_listeners: list[Callable[[str], None]] = []


@contextmanager
def acknowledging(listener: Callable[[str], None]) -> Iterator[None]:
    """Gives the lines that acknowledge signals to `listener` within the block, instead of to stderr.

    Args:
        listener: called from signal handlers, so it must not write to a stream or wait for a lock.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _say(line: str) -> None:
    """Writes a line on stderr from a signal handler, which may have interrupted a write to `sys.stderr`."""
    if os.environ.get("RANK", "").strip() in ("", "0"):
        if _listeners:
            _listeners[-1](line)
            return
        with suppress(OSError):  # nobody reads it
            os.write(2, f"{line}\n".encode("ascii", "replace"))


_causes: list[str] = []


def request_stop(cause: str) -> None:
    """Requests a stop from any thread, as SIGTERM does.

    Args:
        cause: why, in words that replace the signal's name.
    """
    _causes[:] = [cause]
    _thread.interrupt_main(signal.SIGTERM)


def _take_cause() -> str:
    return _causes.pop() if _causes else ""


def install(handler: Handler) -> dict[int, Any]:
    """Installs `handler` for the stop signals; returns the handlers that were there, for `restore`.

    SIGHUP, SIGUSR1 and SIGUSR2 are taken only where they would end the process, or where `command_signals`
    handles them. A handler that is not Python's is left alone.
    """
    before: dict[int, Any] = {}
    for number in STOP_SIGNALS:
        current = signal.getsignal(number)
        ours = _command is not None and current == _command.handle
        if current is None or (number in _ONLY_WHERE_THEY_KILL and current != signal.SIG_DFL and not ours):
            continue
        before[number] = signal.signal(number, handler)
    return before


def restore(before: Mapping[int, Any]) -> None:
    """Installs the handlers that `install` returned."""
    for number, handler in before.items():
        signal.signal(number, handler)


class CommandStop:
    """The request to stop a command outside of its `interruptible` work: at start-up, and when it leaves.

    Attributes:
        cause: why the command stops; "" if nothing requested it.
    """

    def __init__(self) -> None:
        self.cause = ""

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raises KeyboardInterrupt at the first signal; those after a request are copies of it."""
        if self.cause:
            return
        self.cause = _take_cause() or signal.Signals(number).name
        raise KeyboardInterrupt


_command: CommandStop | None = None


@contextmanager
def command_signals(*, process_ends: bool = False) -> Iterator[CommandStop]:
    """Lets every stop signal raise KeyboardInterrupt within the block, once; only the main thread can.

    Within `interruptible` that one's rule applies. What follows a request, there or here, is a copy of it and
    is ignored until the block ends. Nested blocks are one.

    Args:
        process_ends: the process ends after the block, so that what follows a request stays ignored. Python
            handlers no longer run while the interpreter exits, and a copy would change the exit code.
    """
    global _command
    if _command is not None or threading.current_thread() is not threading.main_thread():
        yield _command or CommandStop()
        return
    _command = stop = CommandStop()
    before = install(stop.handle)
    try:
        yield stop
    finally:
        restore(dict.fromkeys(STOP_SIGNALS, signal.SIG_IGN) if process_ends and stop.cause else before)
        _command = None


def answered(request: StopRequest) -> None:
    """Tells the running command that `request` has ended a piece of its work: what follows are copies."""
    if _command is not None and request.made:
        _command.cause = request.cause
