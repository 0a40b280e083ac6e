"""JSON records with a checksum: damage of a file is found when it is read, before its numbers are used.

The last entry of a record, "crc32", is the checksum of all bytes before it. Other programs read the file as
ordinary JSON. Files of earlier versions have no checksum and are read without one.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

from g2rpo.runtime.files import write_atomic

CHECKSUM = "crc32"
_SEAL = re.compile(rb',\s*"crc32": "([0-9a-f]{8})"\s*\}\s*\Z')


class DamagedFile(ValueError):
    """A file is not as it was written; its only argument is the message, which names file and cause."""


def crc32(content: bytes | memoryview, start: int = 0) -> str:
    """The checksum of `content` as 8 hexadecimal digits."""
    return f"{zlib.crc32(content, start):08x}"


def sealed_json(record: dict[str, Any], *, indent: int | None = None) -> str:
    """`record`, which is not empty, as JSON text whose last entry is its checksum."""
    text = json.dumps(
        {name: value for name, value in record.items() if name != CHECKSUM},
        indent=indent,
        ensure_ascii=False,
    )
    body = text[:-1].rstrip()
    space, end = (" ", "") if indent is None else ("\n" + " " * indent, "\n")
    return f'{body},{space}"{CHECKSUM}": "{crc32(body.encode("utf-8"))}"{end}}}'


def write_record(path: Path, record: dict[str, Any], *, indent: int | None = None) -> None:
    """Writes `record` atomically, with its checksum.

    Raises:
        DiskFull: there is no space for it.
    """
    write_atomic(path, sealed_json(record, indent=indent) + ("" if indent is None else "\n"))


def checked_content(path: Path) -> bytes:
    """The content of a record's file, after its checksum was compared, if it has one.

    Raises:
        DamagedFile: the file cannot be read, or the checksum of its content differs.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror}") from error
    seal = _SEAL.search(content, max(0, len(content) - 100))
    if seal and crc32(content[: seal.start()]) != seal[1].decode():
        raise DamagedFile(f"{path} is damaged: its content differs from the checksum that was stored in it")
    return content


def read_record(path: Path) -> dict[str, Any]:
    """Reads a record, without its checksum.

    Raises:
        DamagedFile: the file is no JSON object, or the checksum of its content differs.
    """
    content = checked_content(path)
    try:
        record: Any = json.loads(content)
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise DamagedFile(f"{path} is damaged: {error}") from error
    if not isinstance(record, dict):
        raise DamagedFile(f"{path} is damaged: it is not a JSON object")
    if CHECKSUM in record and not _SEAL.search(content, max(0, len(content) - 100)):
        raise DamagedFile(f"{path} is damaged: its checksum is not the last entry")
    record.pop(CHECKSUM, None)
    return record
