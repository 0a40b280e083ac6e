"""Stopping a run at any moment without losing an update: SIGINT and SIGTERM, taken over for its length."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import TypeVar

from g2rpo.distributed import any_process, world_size

T = TypeVar("T")


# Signals within so many seconds are one request: `timeout` sends it to a process and to its group, and on
# Ctrl-C the terminal sends it to the processes of torchrun, and torchrun sends them its own.
ONE_REQUEST = 3.0


class Interrupt:
    """Has SIGINT or SIGTERM come? Outside an update it raises at once, inside it waits for its end.

    Of several processes none may leave alone what all do together: there it waits everywhere (`waits`) but in
    work that a process does by itself (`immediate`). A second request raises at once in any case.
    """

    def __init__(self, waits: bool = False) -> None:
        self.asked = False
        self._waits = waits
        self._first: float | None = None  # when this process's own signal came

    def handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = self._first is not None
        if self._first is not None and now - self._first < ONE_REQUEST:
            return
        self.asked, self._first = True, now
        if not self._waits or again:
            raise KeyboardInterrupt

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
        """Work without communication that a signal may cut off on any process; then all of them raise."""
        result: list[T] = []
        try:
            with self._waiting(False):
                if self.asked:
                    raise KeyboardInterrupt
                result.append(work())
        except KeyboardInterrupt:
            self.asked = True
        with self.deferred():
            if any_process(not result):
                raise KeyboardInterrupt
        return result[0]


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Take over SIGINT and SIGTERM for the run, where that is possible (the main thread)."""
    interrupt = Interrupt(waits=world_size() > 1)
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {number: signal.signal(number, interrupt.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
