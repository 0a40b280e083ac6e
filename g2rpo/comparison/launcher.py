"""Trains several runs, a few at a time, each in its own process: a failed run does not stop the others.

A run's process is forked from a server that has imported torch once and holds no device. A signal to this
process is passed on, and every run leaves a checkpoint. If this process is killed, its runs stop.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from g2rpo.config.load import Settings
from g2rpo.runtime.interrupt import interruptible
from g2rpo.runtime.secrets import masked
from g2rpo.runtime.stop_signals import STOP_SIGNALS, command_signals

INTERRUPTED = 130


@dataclass(frozen=True)
class Job:
    """A run to train.

    Attributes:
        title: its name on the terminal.
        settings: of the run.
        log: file for its output.
    """

    title: str
    settings: Settings
    log: Path


@dataclass(frozen=True)
class Ended:
    """Result of `train_side_by_side`.

    Attributes:
        failed: title of each failed job -> reason.
        interrupted: a signal stopped all jobs.
    """

    failed: dict[str, str]
    interrupted: bool


def train_side_by_side(
    jobs: Sequence[Job],
    at_once: int,
    say: Callable[[str], None] = print,
) -> Ended:
    """Trains the jobs in order, `at_once` of them at a time.

    GPUs are assigned in turn; on CPUs each job uses an equal share of the cores as threads.

    Args:
        jobs: runs to train.
        at_once: number of jobs that run at the same time.
        say: receives a line when a job starts or ends.
    """
    waiting, running = list(jobs), dict[int, tuple[Job, Any]]()
    failed: dict[str, str] = {}
    context: Any = multiprocessing.get_context(
        "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    )
    if jobs and context.get_start_method() == "forkserver":
        context.set_forkserver_preload(["g2rpo.training.trainer"])
        _start_server()
    with interruptible() as interrupt:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    slot = next(i for i in range(at_once) if i not in running)
                    with interrupt.deferred():  # every started process is recorded, so that it is stopped
                        job = waiting.pop(0)
                        job.log.parent.mkdir(parents=True, exist_ok=True)
                        values = job.settings.model_dump()
                        process = context.Process(target=_train, args=(values, job.log, slot, at_once))
                        process.start()
                        running[slot] = job, process
                    if interrupt.requested:
                        raise KeyboardInterrupt
                    say(f"{job.title}: started; its output is in {job.log}")
                connection.wait([process.sentinel for _, process in running.values()])
                for slot, (job, process) in list(running.items()):
                    if process.exitcode is not None:
                        del running[slot]
                        if process.exitcode:
                            failed[job.title] = _reason(process.exitcode, job.log)
                        outcome = f"failed: {failed[job.title]}" if process.exitcode else "finished"
                        say(f"{job.title}: {outcome} ({len(waiting) + len(running)} left)")
        except KeyboardInterrupt:
            say("stopping: every run saves a checkpoint")
            _stop([process for _, process in running.values()])
            return Ended(failed, True)
    return Ended(failed, False)


def _start_server() -> None:
    """Starts the fork server with signals blocked: a signal to the process group is passed on by this one.

    Without the server no run's end would be noticed. It ends with this process; runs unblock the signals.
    """
    resource_tracker.ensure_running()  # starting it later would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop(processes: Sequence[BaseProcess]) -> None:
    """Sends each process SIGTERM and waits until all have ended; after a second request it kills them."""
    number = signal.SIGTERM
    while any(process.exitcode is None for process in processes):
        for process in processes:
            if process.exitcode is None and process.pid is not None:
                os.kill(process.pid, number)
        try:
            for process in processes:
                process.join()
        except KeyboardInterrupt:
            number = signal.SIGKILL  # the checkpoints that they have written remain


def _reason(code: int, log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    last = f": {lines[-1].strip()}" if lines else ""
    return f"signal {signal.Signals(-code).name}{last}" if code < 0 else f"exit code {code}{last}"


def _train(values: dict[str, Any], log: Path, slot: int, at_once: int) -> None:
    """Trains a run in this process; exit code 0: finished, 2: refused with a message, 130: stopped."""
    os.setsid()  # Ctrl-C on the terminal reaches the parent alone, which passes it on once
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the log is UTF-8 in any locale, and can be followed
            stream.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    import torch

    from g2rpo.training.trainer import train

    if at_once > 1:
        if torch.cuda.is_available():
            torch.cuda.set_device(slot % torch.cuda.device_count())
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // at_once))
    try:
        with command_signals(process_ends=True):
            run = train(Settings.model_validate(values))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except ValueError as error:
        print(f"error: {masked(str(error))}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if run.finished else INTERRUPTED)


def _stop_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
