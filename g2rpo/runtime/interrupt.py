"""Handlers for SIGINT and SIGTERM that let a run stop at any moment without losing an update."""

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

# Signals within this interval count as one request: `timeout` signals a process and its group, and a batch
# system signals all processes of a job, some of which forward the signal.
SAME_REQUEST_SECONDS = 3.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """State of a stop request (SIGINT or SIGTERM), raised as KeyboardInterrupt when it is safe to stop.

    A request raises immediately, or, within `deferred`, is only recorded. With several processes no process
    may leave a collective operation alone, so requests are deferred everywhere (`waits`) except in work
    without communication (`together`). A second request always raises immediately.

    Attributes:
        requested: a stop signal reached this process; peers learn of it from `together` or `any_process`.
        requested_again: a second stop signal reached this process, so the processes may be out of step and
            must not communicate any more.
    """

    def __init__(self, waits: bool = False) -> None:
        """With `waits`, requests are deferred everywhere but in `together`."""
        self.requested = self.requested_again = False
        self._waits = waits
        self._since: float | None = None  # time of the last request to this process

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Records the request of a signal; `interruptible` installs this as the handler.

        Raises:
            KeyboardInterrupt: unless the request is deferred or repeats the last one.
        """
        if self._same_request():
            return
        self.requested, self.requested_again, self._since = True, self._since is not None, time.monotonic()
        if not self._waits or self.requested_again:
            raise KeyboardInterrupt

    def _same_request(self) -> bool:
        return self._since is not None and time.monotonic() - self._since < SAME_REQUEST_SECONDS

    def handler_afterwards(self, before: Handler) -> Handler:
        """Returns the handler to install when the run has ended.

        It ignores repeats of the request that ended the run and passes later signals to `before`.
        """
        if self._since is None:
            return before
        atexit.register(self._ignore_repeats)

        def handle(number: int, frame: FrameType | None) -> None:
            if not self._same_request():
                signal.signal(number, before)
                signal.raise_signal(number)

        return handle

    def _ignore_repeats(self) -> None:
        """Ignores signals at interpreter exit, where Python handlers no longer run and the default kills."""
        if self._same_request():
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def deferred(self) -> AbstractContextManager[None]:
        """Defers requests within the block: they are recorded in `requested` and do not raise."""
        return self._waiting(True)

    @contextmanager
    def around(self, manager: AbstractContextManager[object]) -> Iterator[None]:
        """Wraps `manager` so that a request cannot interrupt its entry or exit.

        Inside the block requests are handled as before it.
        """
        waits = self._waits
        with self._waiting(True), manager, self._waiting(waits):
            if self.requested and not waits:
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
        """Runs interruptible work that does not communicate; every process must call this.

        Returns:
            The result of `work` on this process.

        Raises:
            KeyboardInterrupt: on every process, if a request interrupted `work` on any of them.
            StopTogether: on every process, if `work` raised it on any of them.
        """
        result: list[T] = []
        error: StopTogether | None = None
        try:
            with self._waiting(False):
                if self.requested:
                    raise KeyboardInterrupt
                result.append(work())
        except KeyboardInterrupt:
            self.requested = True
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
    """Applies `Interrupt.around` of the active `interruptible` block to `manager`, if there is one."""
    with _active[-1].around(manager) if _active else manager:
        yield


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Installs handlers for SIGINT and SIGTERM for the block; only the main thread can.

    In another thread the signals keep their handlers, and the yielded Interrupt never receives a request.
    """
    interrupt = Interrupt(waits=world_size() > 1)
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {number: signal.signal(number, interrupt.handle) for number in STOP_SIGNALS}
    _active.append(interrupt)
    try:
        yield interrupt
    finally:
        _active.remove(interrupt)
        for number, handler in before.items():
            signal.signal(number, interrupt.handler_afterwards(handler))
