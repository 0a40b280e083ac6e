"""Stopping a run at any moment without losing an update: SIGINT and SIGTERM, taken over for its length."""

from __future__ import annotations

import atexit
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, TypeVar

from g2rpo.runtime.processes import StopTogether, any_process, raise_together, world_size

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], Any] | int | None

# Signals within so many seconds are one request: `timeout` sends it to a process and to its group, a batch
# system to all processes of a job, some of whom pass it on.
ONE_REQUEST = 3.0
STOPPING = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Has SIGINT or SIGTERM come? Outside an update it raises at once, inside it waits for its end.

    Of several processes none may leave alone what all do together: there it waits everywhere (`waits`) but in
    work that a process does by itself (`together`). A second request raises at once in any case.

    Attributes:
        asked: it has, to this process or to one that it works with.
        twice: so has a second request: the processes are no longer in step for any work in common.
    """

    def __init__(self, waits: bool = False) -> None:
        self.asked = self.twice = False
        self._waits = waits
        self._since: float | None = None  # when this process's own request came, the last one

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self._same_request():
            return
        self.asked, self.twice, self._since = True, self._since is not None, time.monotonic()
        if not self._waits or self.twice:
            raise KeyboardInterrupt

    def _same_request(self) -> bool:
        return self._since is not None and time.monotonic() - self._since < ONE_REQUEST

    def left(self, before: Handler) -> Handler:
        """The handler after all this: what is left of a request is past, anything later is `before`'s."""
        if self._since is None:
            return before
        atexit.register(self._deaf)

        def handle(number: int, frame: FrameType | None) -> None:
            if not self._same_request():
                signal.signal(number, before)
                signal.raise_signal(number)

        return handle

    def _deaf(self) -> None:
        """At the interpreter's end, where handlers of ours no longer run and the default would kill."""
        if self._same_request():
            for number in STOPPING:
                signal.signal(number, signal.SIG_IGN)

    def deferred(self) -> AbstractContextManager[None]:
        """Within it a signal waits."""
        return self._waiting(True)

    @contextmanager
    def around(self, manager: AbstractContextManager[object]) -> Iterator[None]:
        """`manager`, entered and left as a whole; within it signals are as they were."""
        waits = self._waits
        with self._waiting(True), manager, self._waiting(waits):
            if self.asked and not waits:
                raise KeyboardInterrupt
            yield

    @contextmanager
    def _waiting(self, waits: bool) -> Iterator[None]:
        before, self._waits = self._waits, waits
        try:
            yield
        finally:
            self._waits = before

    def together(self, work: Callable[[], T]) -> T:
        """Work without communication that a signal may cut off on any process; then all of them raise.

        So they do where `work` raises StopTogether on any process.
        """
        result: list[T] = []
        error: StopTogether | None = None
        try:
            with self._waiting(False):
                if self.asked:
                    raise KeyboardInterrupt
                result.append(work())
        except KeyboardInterrupt:
            self.asked = True
        except StopTogether as raised:
            error = raised
        with self.deferred():
            raise_together(error)
            if any_process(not result):
                raise KeyboardInterrupt
        return result[0]


_active: list[Interrupt] = []


@contextmanager
def undisturbed(manager: AbstractContextManager[object]) -> Iterator[None]:
    """`Interrupt.around` of the work that this is part of, if any can be interrupted."""
    with _active[-1].around(manager) if _active else manager:
        yield


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Take over SIGINT and SIGTERM for the run, where that is possible (the main thread)."""
    interrupt = Interrupt(waits=world_size() > 1)
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {number: signal.signal(number, interrupt.handle) for number in STOPPING}
    _active.append(interrupt)
    try:
        yield interrupt
    finally:
        _active.remove(interrupt)
        for number, handler in before.items():
            signal.signal(number, interrupt.left(handler))
