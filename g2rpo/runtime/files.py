"""Durable file writes: a file is either complete or absent, and is on the disk when the call returns.

Every file that a later command reads is written with `write_atomic`, or with `atomic_path` where another
library does the writing: a temporary file in the same folder is written, synced and renamed over the old one.
Files that grow line by line are written with `append_line`.

A full disk, a used-up quota and a limit for the size of files end all of these with `DiskFull`, which names
the file and the free space. What was there before stays as it was.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from g2rpo.runtime.text import shortened

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a limit for the size of files (ulimit -f, or the file system's own) is reached",
}
# safetensors and torch report an error of the operating system as text.
_OS_ERROR = re.compile(r"os error (\d+)|(No space left on device)|(Disk quota exceeded)|(File too large)")


class DiskFull(ValueError):
    """A file could not be written because there is no space left; its only argument is the message."""


def disk_full(path: Path | None, error: BaseException) -> DiskFull | None:
    """Returns the error to raise if `error`, or what caused it, says that there is no space for `path`.

    Args:
        path: the file that was written; None: the one that the error names, else standard output.
    """
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if isinstance(cause, DiskFull):
            return cause
        if (number := _full_number(cause)) is not None:
            named = path or (Path(name) if (name := getattr(cause, "filename", None)) else None)
            return DiskFull(
                f"{named or 'standard output (a file)'} could not be written: {_REASONS[number]}; "
                f"{free_bytes(named or Path()):,} bytes are free on that disk. All files that were complete "
                "before are kept: free some space, and run the same command to continue"
            )
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return None


def _full_number(error: BaseException) -> int | None:
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (match := _OS_ERROR.search(str(error))):
        numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        number = (
            int(match[1])
            if match[1]
            else next(n for n, text in zip(numbers, match.groups()[1:], strict=True) if text)
        )
    return number if number in _REASONS else None


@contextmanager
def disk_errors(path: Path | None = None) -> Iterator[None]:
    """Raises DiskFull in place of an error in the block that says that there is no space left.

    Args:
        path: the file that the block writes; None: the block is a command, the file is the one that the error
            names, else standard output, and other errors of the file system become a ValueError too.
    """
    try:
        yield
    except Exception as error:
        problem: ValueError | None = disk_full(path, error)
        if problem is None and path is None:
            problem = _path_problem(error)
        if problem is None or problem is error:
            raise
        raise problem from error


_PATH_ERRORS = {
    errno.EACCES: "give this user the permission, or give another path",
    errno.EPERM: "give this user the permission, or give another path",
    errno.EROFS: "give a path on a file system that can be written",
    errno.ENOENT: "check the path; another program may have removed it",
    errno.ENOTDIR: "a part of this path is a file; give another path",
    errno.EISDIR: "this is a folder; give a file",
    errno.EEXIST: "it is a file, or a link to a path that does not exist; remove it, or give another path",
    errno.ELOOP: "its links lead back to themselves; give another path",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EIO: "the disk or the network behind it failed; try again, or copy the file elsewhere",
    errno.ESTALE: "the network file system lost it; try again",
    errno.ETIMEDOUT: "the disk or the network behind it does not answer; try again",
    errno.EMFILE: "too many files are open at once; raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine; close other programs",
}
"""Errors of the file system that a user can correct -> what to do."""


def _path_problem(error: BaseException) -> ValueError | None:
    """Returns the error to raise if `error` is about a path that a user gave or can repair."""
    if isinstance(error, RuntimeError) and str(error).startswith("Could not determine home directory"):
        return ValueError("a path begins with ~ and there is no home folder of that name; give the full path")
    number, name = getattr(error, "errno", None), getattr(error, "filename", None)
    if not isinstance(error, OSError) or number not in _PATH_ERRORS or not isinstance(name, str | bytes):
        return None
    return ValueError(f"{shortened(os.fsdecode(name), 200)}: {error.strerror}; {_PATH_ERRORS[number]}")


def free_bytes(path: Path) -> int:
    """Free bytes on the disk of `path`, which need not exist yet."""
    return shutil.disk_usage(nearest_folder(path)).free


def nearest_folder(path: Path) -> Path:
    """The innermost folder on the way to `path` that exists, or `path` itself."""
    absolute = path.expanduser().absolute()
    return next((folder for folder in (absolute, *absolute.parents) if folder.is_dir()), Path("/"))


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes `content` to `path`, replacing an existing file atomically. Text is encoded as UTF-8.

    Raises:
        DiskFull: there is no space for it; an existing file is unchanged.
    """
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to; on a normal exit its file is synced and renamed to `path`.

    If the block raises, the temporary file is removed and `path` is left unchanged. The temporary name keeps
    the suffix of `path`, because some writers choose the format by it, and is unique across hosts and
    containers that share the folder.

    Raises:
        DiskFull: there is no space for it.
    """
    host = socket.gethostname().split(".")[0]
    temporary = path.with_name(f".tmp-{host}-{os.getpid()}-{secrets.token_hex(4)}-{path.name}")
    with disk_errors(path):
        try:
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def append_line(path: Path, line: str) -> None:
    """Appends `line` and a line break to `path`, completely or not at all.

    Raises:
        DiskFull: there is no space for it; the file is as before.
    """
    append_bytes(path, (line + "\n").encode("utf-8"))


def append_bytes(path: Path, content: bytes) -> None:
    """Appends `content` to `path`, completely or not at all; see `append_line`."""
    with disk_errors(path), open(path, "ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        rest = memoryview(content)
        try:
            while rest:  # a nearly full disk takes a part
                rest = rest[file.write(rest) :]
        except BaseException:
            with suppress(OSError):
                file.truncate(before)
            raise


def sync_file(path: Path) -> None:
    """Waits until what was written to the file at `path` is on the disk."""
    with disk_errors(path), open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Syncs the directory entries of `folder`, so that new and renamed files survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
            errno.EBADF,
        ):  # no such sync on some network disks
            raise
    finally:
        os.close(handle)


def release_output() -> None:
    """Gives up standard output if it is a file on a full disk, where the exit would fail again."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
