"""Stopping a run at any moment without losing an update: SIGINT and SIGTERM, taken over for its length."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from g2rpo.distributed import any_process, world_size

T = TypeVar("T")


class Interrupt:
    """Has SIGINT or SIGTERM come? Outside an update it raises at once, inside it waits for its end.

    Of several processes none may leave alone what all do together: there it waits everywhere (`waits`) but in
    work that a process does by itself (`immediate`). A second signal raises at once in any case.
    """

    def __init__(self, waits: bool = False) -> None:
        self.asked = False
        self._waits = waits

    def handle(self, number: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if not self._waits or again:
            raise KeyboardInterrupt

    @contextmanager
    def deferred(self) -> Iterator[None]:
        before, self._waits = self._waits, True
        try:
            yield
        finally:
            self._waits = before

    def together(self, work: Callable[[], T]) -> T:
        """Work without communication that a signal may cut off on any process; then all of them raise."""
        result: list[T] = []
        before, self._waits = self._waits, False
        try:
            if self.asked:
                raise KeyboardInterrupt
            result.append(work())
        except KeyboardInterrupt:
            self.asked = True
        finally:
            self._waits = before
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
