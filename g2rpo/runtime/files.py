"""Durable file writes: a file is either complete or absent, and is on the disk when the call returns.

Every file that a later command reads is written with `write_atomic`, or with `atomic_path` where another
library does the writing: a temporary file in the same folder is written, synced and renamed over the old one.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes `content` to `path`, replacing an existing file atomically. Text is encoded as UTF-8."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to; on a normal exit its file is synced and renamed to `path`.

    If the block raises, the temporary file is removed and `path` is left unchanged. The temporary name keeps
    the suffix of `path`, because some writers choose the format by it, and is unique across hosts and
    containers that share the folder.
    """
    host = socket.gethostname().split(".")[0]
    temporary = path.with_name(f".tmp-{host}-{os.getpid()}-{secrets.token_hex(4)}-{path.name}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Syncs the directory entries of `folder`, so that new and renamed files survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
