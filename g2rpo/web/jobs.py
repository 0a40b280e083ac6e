"""Work on models: one job at a time, with progress, cancelled between denoising steps.

All jobs run in one thread, because models share the processor, and two jobs at once take longer than one
after the other. Gradio queues the events of all users (`MODEL_QUEUE`) and shows each its position. A handler
is a generator over `Jobs.run`; when gradio closes it (a cancel button, a closed browser tab), the job stops
at its next `Job.report`.
"""

from __future__ import annotations

import html
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Report = Callable[[int, int, str], None]
"""`Job.report`: done, total, activity."""

LOG = logging.getLogger(__name__)

MODEL_QUEUE: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1}
"""Arguments of every gradio event that works on a model: they share one queue, and one runs at a time."""

POLL_SECONDS = 0.2
"""How long a handler waits for news of its job before it can notice that it was closed."""
UPDATE_SECONDS = 1.0
"""How often the elapsed time is renewed while a job reports nothing."""


class Cancelled(Exception):
    """Raised in a job by `Job.report` after it was cancelled."""


@dataclass(frozen=True)
class Progress:
    """What a job does now.

    Attributes:
        done, total: completed and all items; total is 0 while the number is not known.
        activity: what is counted, such as "denoising step".
        seconds: time since the job was submitted.
    """

    done: int
    total: int
    activity: str
    seconds: float

    @property
    def text(self) -> str:
        """Progress as text, such as "denoising step 3 of 32, 4 s"."""
        count = f" {self.done} of {self.total}" if self.total else ""
        return f"{self.activity}{count}, {self.seconds:.0f} s"


@dataclass(frozen=True)
class Done(Generic[T]):
    """The result of a job, the last value that `Jobs.run` yields."""

    value: T
    seconds: float


class Job:
    """The running job's connection to whoever waits for it."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._news: queue.SimpleQueue[tuple[int, int, str]] = queue.SimpleQueue()

    def report(self, done: int, total: int, activity: str) -> None:
        """Reports progress; call it at least once per denoising step.

        Args:
            done, total, activity: as in `Progress`.

        Raises:
            Cancelled: the job was cancelled.
        """
        self.check()
        self._news.put((done, total, activity))

    def check(self) -> None:
        """Raises Cancelled if the job was cancelled."""
        if self._cancelled.is_set():
            raise Cancelled

    def cancel(self) -> None:
        """Makes the next `report` or `check` raise."""
        self._cancelled.set()

    def news(self) -> tuple[int, int, str] | None:
        """Returns the newest report that arrives within `POLL_SECONDS`; None: there is none."""
        try:
            newest = self._news.get(timeout=POLL_SECONDS)
            while True:
                try:
                    newest = self._news.get_nowait()
                except queue.Empty:
                    return newest
        except queue.Empty:
            return None


class Jobs:
    """The one thread that works on models."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="g2rpo-model")
        self._open: set[Job] = set()
        self._lock = threading.Lock()

    def run(self, work: Callable[[Job], T]) -> Iterator[Progress | Done[T]]:
        """Runs `work` in the thread of the models.

        Closing the iterator cancels the job.

        Args:
            work: receives the job, whose `report` it calls between denoising steps. Gradients are off only
                where `work` turns them off.

        Yields:
            Progress, at each report and at least every `UPDATE_SECONDS`, and in the end Done with the result.

        Raises:
            Exception: whatever `work` raises.
        """
        job, started = Job(), time.monotonic()
        with self._lock:
            self._open.add(job)
        try:
            future: Future[T] = self._thread.submit(_unless_cancelled, job, work)
            latest, shown = (0, 0, "waiting"), 0.0
            while not future.done():
                news = job.news()
                now = time.monotonic() - started
                if news is not None or now - shown >= UPDATE_SECONDS:
                    latest, shown = news or latest, now
                    yield Progress(*latest, seconds=now)
            yield Done(future.result(), time.monotonic() - started)
        finally:
            job.cancel()
            with self._lock:
                self._open.discard(job)

    def close(self) -> None:
        """Cancels all jobs and waits until the running one has stopped."""
        with self._lock:
            for job in self._open:
                job.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)


def _unless_cancelled(job: Job, work: Callable[[Job], T]) -> T:
    job.check()
    return work(job)


@contextmanager
def messages() -> Iterator[None]:
    """Shows errors of a handler as messages on the page: what a user can correct, or where to find the rest.

    The text is escaped, because gradio renders messages as HTML and they may quote a prompt.
    """
    import gradio as gr

    try:
        yield
    except gr.Error:
        raise
    except Cancelled as error:
        raise gr.Error("The job was cancelled.", title="Cancelled", print_exception=False) from error
    except (ValueError, OSError) as error:
        raise gr.Error(html.escape(str(error)), title="Not possible", print_exception=False) from error
    except Exception as error:
        LOG.exception("a job of the web page failed")
        raise gr.Error(
            f"{type(error).__name__}: an unexpected error; the terminal of `g2rpo demo` shows its details.",
            title="Failed",
            print_exception=False,
        ) from error


def status_html(text: str, progress: Progress | None = None) -> str:
    """Returns a status line, with a bar if the number of items is known. The text is escaped."""
    bar = ""
    if progress is not None and progress.total:
        label = html.escape(progress.activity, quote=True)
        bar = f'<progress max="{progress.total}" value="{progress.done}" aria-label="{label}"></progress>'
    return f'<div class="g2rpo-status" role="status">{bar}<span>{html.escape(text)}</span></div>'
