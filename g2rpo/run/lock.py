"""A run folder is one run's at a time: two would mix their metrics and remove each other's checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from g2rpo.config.settings import Settings
from g2rpo.runtime.processes import any_process, barrier, rank

LOG = logging.getLogger(__name__)

LOCK = ".lock"
"""File in a run folder, held by the process that writes there; the system lets go of it however that ends."""


@contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """Keeps a run folder to this run; one that is not there yet is taken by `begin_run`.

    Of several processes the first holds it for all; it asks before they are joined.

    Raises:
        ValueError: another run is at work there.
    """
    lock = _lock(out)
    first = os.environ.get("RANK", "0") == "0"
    there = out.is_dir() and os.access(out, os.W_OK)  # else the settings' own check has something to say
    if first and there and not _taken(lock):
        raise ValueError(_busy(out))
    try:
        yield
    finally:
        lock.release(force=True)


def begin_run(out: Path, settings: Settings) -> None:
    """Makes the run folder, takes it and leaves the settings there. All processes call; the first writes.

    Raises:
        ValueError: another run, begun meanwhile, is at work there.
    """
    barrier()  # all have read what the folder holds
    if rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
    if any_process(rank() == 0 and not _taken(_lock(out))):
        raise ValueError(_busy(out))
    if rank() == 0:
        (out / "config.toml").write_text(settings.to_toml(), encoding="utf-8")
    barrier()


def _lock(out: Path) -> FileLock:
    return FileLock(out / LOCK, timeout=0, is_singleton=True)  # the same one each time, for the same path


def _taken(lock: FileLock) -> bool:
    try:
        lock.acquire()
    except Timeout:
        return False
    except NotImplementedError:  # Lustre may be mounted without; newer versions of filelock make do
        LOG.warning(
            "%s: this file system has no locks: see to it that one run alone writes there", lock.lock_file
        )
    return True


def _busy(out: Path) -> str:
    return f"another run is at work in {out}: wait for it, stop it, or give another out=FOLDER"
