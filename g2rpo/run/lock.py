"""The lock of a run folder: two runs in one folder would mix metrics and remove each other's checkpoints.

The lock is flock(2) on RUN/.lock, which the operating system releases when its process ends in any way. The
file names its holder (host, pid, start), for the message to a second run. A file system that provides no
locks is reported once, and the run goes on without one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g2rpo.config.settings import Settings
from g2rpo.runtime.files import write_atomic
from g2rpo.runtime.processes import barrier, gathered, is_first_process, rank

if TYPE_CHECKING:
    import psutil

LOG = logging.getLogger(__name__)

LOCK = ".lock"
"""Lock file in a run folder."""

_HELD_ELSEWHERE = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""What flock answers when another process has the lock; NFS may answer EACCES. Everything else means that the
file system cannot say, such as ENOLCK, EOPNOTSUPP, ENOSYS, EIO or ESTALE."""


class _Lock:
    """The lock of one run folder, at most once per process: whoever acquires it again has it already."""

    def __init__(self, out: Path) -> None:
        self.file = out / LOCK
        self._descriptor: int | None = None

    def acquire(self) -> str:
        """Takes the lock, or warns that there are none here.

        Returns:
            "" if the run may go on; otherwise who uses the folder.

        Raises:
            ValueError: the lock file cannot be opened.
        """
        if self._descriptor is not None:
            return ""
        try:
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ValueError(
                f"cannot open the lock file {self.file}: {error.strerror}; allow yourself to read and write "
                "it, remove anything else of that name, or give another out=FOLDER"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD_ELSEWHERE:
                os.close(descriptor)
                return _in_use(self.file)
            LOG.warning(
                "%s: this file system has no locks (%s): make sure that only one run writes there%s",
                self.file,
                error.strerror or error,
                f". {_by(holder)}, may still do so" if (holder := _holder(self.file)) else "",
            )
        self._descriptor = descriptor
        with suppress(OSError):  # the lock holds without its description
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_this_process()).encode(), 0)
        return ""

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
        with suppress(OSError):  # a forked process may still have the descriptor
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        with suppress(OSError):
            os.close(descriptor)


_locks: dict[Path, _Lock] = {}


def _lock(out: Path) -> _Lock:
    path = out.absolute()
    return _locks.setdefault(path, _Lock(path))


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
    if is_first and lockable and (holder := lock.acquire()):
        raise ValueError(holder)
    try:
        yield
    finally:
        lock.release()


def begin_run(out: Path, settings: Settings) -> None:
    """Creates and locks the run folder and writes config.toml. All processes call; the first one writes.

    Raises:
        ValueError: another run, started in the meantime, is using the folder.
    """
    barrier()  # all processes have read the folder's contents
    problem = ""
    if rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        try:
            problem = _lock(out).acquire()
        except ValueError as error:
            problem = str(error)
    if problem := gathered(problem)[0]:
        raise ValueError(problem)
    if rank() == 0:
        write_atomic(out / "config.toml", settings.to_toml())
    barrier()


@dataclass(frozen=True)
class Holder:
    """The process that a lock file names.

    Attributes:
        host: name of its machine.
        pid: its process id there.
        since: when it took the lock, in ISO format.
    """

    host: str
    pid: int
    since: str

    @property
    def is_here(self) -> bool:
        """Whether the file names this machine."""
        return self.host == socket.gethostname()

    def process(self, out: Path) -> psutil.Process | None:
        """Returns the process if it is on this machine and has the run's lock file open, else None.

        A process id alone says little: after a crash another process may have it.

        Raises:
            PermissionError: the process belongs to another user, so that its files cannot be seen.
        """
        import psutil

        if not self.is_here:
            return None
        try:
            process = psutil.Process(self.pid)
            lock = (out / LOCK).stat()
            for opened in process.open_files():
                with suppress(OSError):
                    if os.path.samestat(os.stat(opened.path), lock):
                        return process
        except psutil.AccessDenied as error:
            raise PermissionError(f"process {self.pid} belongs to another user") from error
        except (psutil.NoSuchProcess, FileNotFoundError):
            return None
        return None


def read_holder(out: Path) -> Holder | None:
    """Returns the process that the lock file of a run folder names; None if it names none.

    The lock is not touched, so a run that starts at this moment is not disturbed.
    """
    holder = _holder(out / LOCK)
    return None if holder is None else Holder(**holder)


def _this_process() -> dict[str, Any]:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": since}


def _holder(file: Path) -> dict[str, Any] | None:
    """The process that a lock file names; None if it names none."""
    try:
        holder = json.loads(file.read_text("utf-8"))
        return {"host": str(holder["host"]), "pid": int(holder["pid"]), "since": str(holder["since"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _by(holder: dict[str, Any]) -> str:
    here = "this host, " if holder["host"] == socket.gethostname() else ""
    return f"process {holder['pid']} on {here}{holder['host']}, since {holder['since']}"


def _in_use(file: Path) -> str:
    """The message about a lock that another process holds, or that its file system has not released."""
    again = "or give another out=FOLDER"
    holder = _holder(file)
    if holder is None:
        return (
            f"another run is using {file.parent}: wait for it, stop it, {again}. It holds the lock {file}, "
            "which does not name its process"
        )
    here = holder["host"] == socket.gethostname()
    if here and not _is_alive(holder["pid"]):
        return (
            f"{file.parent} is locked by {_by(holder)} (lock {file}). That process has ended, so the lock is "
            "stale, or a process that it started still runs: stop that one, or remove the lock (only that "
            f"file), {again}"
        )
    stale = "" if here else "If that process no longer runs, the lock is stale: remove it (only that file). "
    return (
        f"another run is using {file.parent}: wait for it, stop it, {again}. {stale}It is {_by(holder)} "
        f"(lock {file})"
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
