"""Files that are complete or absent, never half written, and that are on the disk when the call returns.

Every file that a later command reads goes through `write_atomic`, or through `atomic_path` where another
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
    """Writes a file, replacing an earlier one in one step; text is encoded as UTF-8."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path to write to; on leaving the block its file is synced and takes the place of `path`.

    The temporary name keeps the suffix, which some writers need, and is unique among hosts and containers
    that share the folder. If the block raises, it is removed and `path` is left as it was.
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


def write_synced(path: Path, text: str) -> None:
    """Writes a file that is on the disk when this returns."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """After this call the names of the files in `folder` are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
