"""Stop requests (see stop_signals) that let a run stop at any moment without losing an update."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import TypeVar

from g2rpo.runtime import stop_signals
from g2rpo.runtime.processes import StopTogether, any_process, raise_together, world_size

T = TypeVar("T")


class Interrupt:
    """State of a stop request, raised as KeyboardInterrupt when it is safe to stop.

    A request raises immediately, or, within `deferred`, is only recorded. With several processes no process
    may leave a collective operation alone, so requests are deferred everywhere (`waits`) except in work
    without communication (`together`). A second request always raises immediately; copies of the first one
    never do (`stop_signals` has the rule).

    Attributes:
        requested: a stop signal reached this process; peers learn of it from `together` or `any_process`.
        requested_again: a second request reached this process, so the processes may be out of step and must
            not communicate any more.
        request: the signals of this process.
    """

    def __init__(self, waits: bool = False) -> None:
        """With `waits`, requests are deferred everywhere but in `together`."""
        self.requested = self.requested_again = False
        self.request = stop_signals.StopRequest()
        self._waits = waits

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Records a signal; `interruptible` installs this as the handler.

        Raises:
            KeyboardInterrupt: unless the request is deferred, or the signal is a copy of it.
        """
        if not self.request.add(number):
            return
        self.requested, self.requested_again = True, self.request.made_again
        if not self._waits or self.requested_again:
            raise KeyboardInterrupt

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
    """Installs handlers for the stop signals for the block; only the main thread can.

    In another thread the signals keep their handlers, and the yielded Interrupt never receives a request.
    """
    interrupt = Interrupt(waits=world_size() > 1)
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = stop_signals.install(interrupt.handle)
    _active.append(interrupt)
    try:
        yield interrupt
    finally:
        _active.remove(interrupt)
        stop_signals.answered(interrupt.request)
        stop_signals.restore(before)
