"""Stopping a run at any moment without losing an update: SIGINT and SIGTERM, taken over for its length."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Has SIGINT or SIGTERM come? Outside an update it raises at once, inside it waits for its end."""

    def __init__(self) -> None:
        self.asked = False
        self._waits = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if not self._waits or again:
            raise KeyboardInterrupt

    @contextmanager
    def deferred(self) -> Iterator[None]:
        self._waits = True
        try:
            yield
        finally:
            self._waits = False


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Take over SIGINT and SIGTERM for the run, where that is possible (the main thread)."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {number: signal.signal(number, interrupt.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
