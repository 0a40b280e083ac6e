"""Why a file cannot be read as weights, from its first bytes and its header; nothing in it is executed.

`file_kind` recognises other kinds of file, such as a web page, a pointer of Git LFS, a zip or a pickle, and
`safetensors_damage` names the first thing that is wrong with a safetensors file. Both are only called for
files that a reader has rejected, or that have another name than weights have.
"""

from __future__ import annotations

import json
import os
import pickletools
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PICKLE = "a pickle, which can contain code; g2rpo runs none of it and reads only safetensors"
"""What a pickle is, for messages."""

MAX_HEADER = 100_000_000
"""Largest header of a safetensors file in bytes, a limit of the library."""

_MAX_PICKLE = 64 * 2**20
_OF_TENSORS = re.compile(
    r"torch\._utils\._rebuild\w+|torch\.(\w+Storage|\w*float\w*|\w*int\d+|bool|Size|device|storage\.\w+)"
    r"|torch\.nn\.parameter\.Parameter|collections\.OrderedDict|_codecs\.encode"
    r"|numpy\.(ndarray|dtype|(_?core)\.(multiarray\._reconstruct|multiarray\.scalar|numeric\._frombuffer))"
)
"""Functions and classes that a pickle of tensors needs."""

_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
}

_MAGIC = (
    (b"GGUF", "a GGUF file, whose weights are quantised"),
    (b"\x1f\x8b", "a gzip archive: unpack it"),
    (b"BZh", "a bzip2 archive: unpack it"),
    (b"\xfd7zXZ\x00", "an xz archive: unpack it"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive: unpack it"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it"),
    (b"Rar!", "a rar archive: unpack it"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "an array of numpy"),
    (b"\x89PNG", "an image"),
    (b"\xff\xd8\xff", "an image"),
    (b"%PDF", "a PDF"),
    (b"\x7fELF", "a program"),
    (b"MZ", "a program"),
    (b"#!", "a script"),
)

_TEXT = re.compile(rb"[\t\r\n -~]{4,}")
"""The beginning of a text, such as the error message that a server sent in place of a file."""

_UNPICKLABLE = (
    ValueError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    TypeError,
    struct.error,
)
"""What `pickletools` raises for bytes that are no pickle."""


def file_kind(path: Path) -> str | None:
    """Returns what a file is, for a message after "is"; None: its bytes do not tell.

    Code that a pickle would run is named, and never run.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(4096)
    except OSError as error:
        return f"a file that cannot be read ({error.strerror or error})"
    if not size:
        return "empty (0 bytes)"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b"version http"):
        return _pointer(head, size)
    if text.startswith(b"<"):
        return _web_page(text, size)
    if head.startswith(b"PK"):
        return _zip(path, size)
    if head[257:262] == b"ustar":
        return f"a tar archive ({size:,} bytes), not safetensors: unpack it"
    for magic, kind in _MAGIC:
        if head.startswith(magic) and not _is_header_length(head, size):
            return f"{kind} ({size:,} bytes), not safetensors"
    if (code := pickled_code(path)) is not None:
        return f"{_pickle(code)} ({size:,} bytes)"
    if _TEXT.fullmatch(text[:80]) and not _is_header_length(head, size):
        shown = " ".join(text[:80].decode("utf-8", "replace").split())
        return f"text ({size:,} bytes, {shown!r}), not safetensors: is it an error message of a server?"
    return None


def file_note(path: Path) -> str:
    """Returns what `path` is, as the end of a message about it; empty: unknown, or nothing is there."""
    if path.is_file():
        kind = file_kind(path)
    elif path.is_symlink() and not path.exists():
        kind = f"a link to {os.readlink(path)}, which does not exist"
    else:
        kind = "a pipe or a device, not a file" if path.exists() and not path.is_dir() else None
    return "" if kind is None else f"; this is {kind}"


def _is_header_length(head: bytes, size: int) -> bool:
    """Whether the first 8 bytes may be the length of a safetensors header in this file."""
    return len(head) >= 8 and int.from_bytes(head[:8], "little") <= size - 8


def _pointer(head: bytes, size: int) -> str:
    match = re.search(rb"^size (\d+)", head, re.M)
    target = f" to {int(match[1]):,} bytes" if match else ""
    return (
        f"a Git LFS pointer{target} (git-lfs; this file has {size:,} bytes): `git lfs pull` fetches the file"
    )


def _web_page(text: bytes, size: int) -> str:
    title = re.search(rb"<title[^>]*>\s*(.*?)\s*</title>", text, re.S | re.I)
    shown = " ".join(title[1].decode("utf-8", "replace").split())[:80] if title else ""
    named = f", titled {shown!r}" if shown else ""
    return f"a web page{named} ({size:,} bytes), not safetensors: is a login needed to fetch the file? Log in"


def _zip(path: Path, size: int) -> str:
    if not zipfile.is_zipfile(path):
        return f"a damaged zip archive ({size:,} bytes), not safetensors; it was cut off or changed"
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        pickled = next((name for name in names if name.split("/")[-1] == "data.pkl"), None)
        if pickled is None:
            first = f", which begins with {names[0]!r}" if names else ""
            return f"a zip archive of {len(names)} files{first} ({size:,} bytes), not safetensors: unpack it"
        is_script = any("/code/" in name for name in names)
        with archive.open(pickled) as stream:
            code = _globals(stream.read(_MAX_PICKLE)) or []
    kind = "a TorchScript program, which is code" if is_script else "a zip archive of PyTorch (.pt) with"
    return f"{kind} {_pickle(code)} ({size:,} bytes)"


def _pickle(code: list[str]) -> str:
    if not code:
        return PICKLE
    named = ", ".join(code[:3])
    return f"a pickle that contains code ({named}); none of it was run: g2rpo reads only safetensors"


def pickled_code(path: Path) -> list[str] | None:
    """Returns the functions and classes, beside those of tensors, that a pickle would import.

    Returns:
        None: the file is no pickle. A list that is empty: it is one, without such names.
    """
    with path.open("rb") as stream:
        content = stream.read(_MAX_PICKLE)
    # The length of a header of 640 to 1407 bytes begins as a pickle does, and continues with zeros.
    if content[:1] == b"\x80" and content[2:8] == bytes(6):
        return None
    return _globals(content)


def _globals(content: bytes) -> list[str] | None:
    """Returns the names that a pickle imports, except those of tensors; None: it is no pickle."""
    names: list[str] = []
    strings: list[str] = []
    count = 0
    try:
        for opcode, argument, _ in pickletools.genops(content):
            count += 1
            if opcode.name in ("GLOBAL", "INST"):
                names.append(str(argument).replace(" ", "."))
            elif opcode.name == "STACK_GLOBAL":
                names.append(".".join(strings[-2:]))
            elif isinstance(argument, str):
                strings.append(argument)
    except _UNPICKLABLE:  # a file of another kind, or one that was cut off; both fail in many ways
        if not (content[:1] == b"\x80" and content[1:2] <= b"\x05" and count > 2) and not names:
            return None
    names = [name.replace("__builtin__.", "builtins.") for name in names]  # Python 2's name
    found = [name for name in dict.fromkeys(names) if not _OF_TENSORS.fullmatch(name)]
    return None if count < 2 else found


# ---- safetensors


def safetensors_damage(path: Path, error: Exception) -> str:
    """Returns what is wrong with a file that the safetensors library rejected, for a message after its path.

    Args:
        path: the file.
        error: the library's error, which is shown if the file's bytes explain nothing.
    """
    size = path.stat().st_size
    kind = file_kind(path)
    if kind is not None:
        return f"is damaged: it is {kind}"
    return f"is damaged ({size:,} bytes): {_header_damage(path, size) or error}"


def _header_damage(path: Path, size: int) -> str:
    """Returns the first problem of a safetensors header; empty: there is none."""
    if size < 8:
        return f"cut off: {size} bytes, and a safetensors file begins with 8 that give the header's length"
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > MAX_HEADER:
            return (
                f"its first 8 bytes give a header of {length:,} bytes (allowed: {MAX_HEADER:,}), so it is "
                "not a safetensors file, or its beginning was overwritten"
            )
        if length > size - 8:
            return f"cut off in its header: {size:,} of more than {8 + length:,} bytes"
        text = stream.read(length)
    if length < 2:
        return f"its header has {length} bytes, and a header is a JSON object: its beginning was overwritten"
    try:
        entries = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return f"its header of {length:,} bytes is not JSON ({_first_line(error)})"
    if not isinstance(entries, dict):
        return f"its header is a JSON {type(entries).__name__}, not an object"
    return next(_entry_problems(entries, 8 + length, size), "")


def _entry_problems(entries: Mapping[str, Any], begin: int, size: int) -> Iterator[str]:
    """Yields the problems of a header's entries.

    Args:
        entries: content of the header.
        begin: position in the file at which the tensors begin.
        size: size of the file.
    """
    ranges, wrong = [], []
    for key, entry in entries.items():
        if key == "__metadata__":
            if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
                yield "the metadata in its header is not an object of texts"
            continue
        try:
            start, end = (int(offset) for offset in entry["data_offsets"])
            shape, dtype = [int(number) for number in entry["shape"]], str(entry["dtype"])
        except (TypeError, KeyError, ValueError):
            yield f"its header has no dtype, shape and data_offsets for {key!r}"
            return
        expected = _BYTES.get(dtype, 0)
        for number in shape:
            expected *= number
        if dtype in _BYTES and expected != end - start:
            wrong.append(
                f"{key} of {dtype} {shape} needs {expected:,} bytes, its header gives it {end - start:,}"
            )
        ranges.append((start, end, key))
    ranges.sort()
    last = max((end for _, end, _ in ranges), default=0)
    if begin + last > size:
        yield f"cut off: {size:,} of {begin + last:,} bytes"
    previous, name = 0, "the header"
    for start, end, key in ranges:
        if start < previous:
            yield f"the offsets in its header overlap: bytes {start:,} to {previous:,} of {name} and {key}"
        if start > previous:
            yield f"the offsets in its header leave a gap: bytes {previous:,} to {start:,}, before {key}"
        previous, name = end, key
    if begin + last < size:
        trailing = size - begin - last
        yield f"{trailing:,} trailing bytes: it should end after {begin + last:,} of {size:,} bytes"
    yield from wrong


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
