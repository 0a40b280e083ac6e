"""The lock of a run folder: two runs in one folder would mix metrics and remove each other's checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from g2rpo.config.settings import Settings
from g2rpo.runtime.files import write_atomic
from g2rpo.runtime.processes import any_process, barrier, is_first_process, rank

LOG = logging.getLogger(__name__)

LOCK = ".lock"
"""Lock file in a run folder. The operating system releases the lock when its process ends in any way."""


@contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """Locks a run folder for this run until exit. A folder that does not exist is locked by `begin_run`.

    With several processes the first (RANK=0) takes the lock for all, before the process group exists.

    Raises:
        ValueError: another run is using the folder.
    """
    lock = _lock(out)
    is_first = is_first_process()
    lockable = out.is_dir() and os.access(out, os.W_OK)  # otherwise check_files reports the problem
    if is_first and lockable and not _acquired(lock):
        raise ValueError(_in_use(out))
    try:
        yield
    finally:
        lock.release(force=True)


def begin_run(out: Path, settings: Settings) -> None:
    """Creates and locks the run folder and writes config.toml. All processes call; the first one writes.

    Raises:
        ValueError: another run, started in the meantime, is using the folder.
    """
    barrier()  # all processes have read the folder's contents
    if rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
    if any_process(rank() == 0 and not _acquired(_lock(out))):
        raise ValueError(_in_use(out))
    if rank() == 0:
        write_atomic(out / "config.toml", settings.to_toml())
    barrier()


def _lock(out: Path) -> FileLock:
    return FileLock(out / LOCK, timeout=0, is_singleton=True)  # the same object each time for the same path


def _acquired(lock: FileLock) -> bool:
    try:
        lock.acquire()
    except Timeout:
        return False
    except NotImplementedError:  # some Lustre mounts; newer versions of filelock fall back by themselves
        LOG.warning(
            "%s: this file system has no locks: make sure that only one run writes there", lock.lock_file
        )
    return True


def _in_use(out: Path) -> str:
    return f"another run is using {out}: wait for it, stop it, or give another out=FOLDER"
