"""Damaged safetensors files, by cause: as an adapter, as a model, and as the weights of a run."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

from faults.bad_adapters import good, save
from faults.inputs import Bad, Generator
from faults.outcomes import Expected, Words

MARKER = "ran.marker"


def _content(draw: Any, folder: Path) -> bytes:
    """Bytes of a good file: an adapter, or the weights of the embedded transformer."""
    if draw.random() < 0.7:
        save(good(draw), folder / "good.safetensors")
        content = (folder / "good.safetensors").read_bytes()
        (folder / "good.safetensors").unlink()
        return content
    from g2rpo.models.tiny import tiny_folder

    return next((tiny_folder()[0] / "transformer").glob("*.safetensors")).read_bytes()


def _bad(
    draw: Any, folder: Path, kind: str, content: bytes, found: Words, allowed: Words = ".", place: Words = ""
) -> Bad:
    name = f"weights_{draw.randrange(1000)}.safetensors"
    (folder / name).write_bytes(content)
    words = draw.choice(
        [
            ["sample", name, "--base", "tiny", "--prompt", "a star", "--steps", "1", "--out", "images"],
            ["train", "tiny", f"weights={name}", "out=run", "iterations=1", "device=cpu"],
            ["doctor", "--verify", name, "--base", "tiny"],
            [
                "evaluate",
                name,
                "--base",
                "tiny",
                "--rewards",
                "colourfulness",
                "--prompts",
                "world:demo",
                "--limit",
                "1",
            ],
        ]
    )
    return Bad(f"safetensors: {kind}", words, Expected(name, place, found, allowed))


def cut_off(draw: Any, folder: Path) -> Bad:
    content = _content(draw, folder)
    head = 8 + struct.unpack("<Q", content[:8])[0]
    length = draw.choice([draw.randrange(head, len(content)), draw.randrange(9, head), len(content) - 1])
    return _bad(
        draw,
        folder,
        "cut off",
        content[:length],
        "cut off|incomplete|truncated",
        rf"\b{length:,}\b|\b{length}\b|{length:_}|MB|kB|KiB",
    )


def web_page(draw: Any, folder: Path) -> Bad:
    page = draw.choice(
        [
            b"<!DOCTYPE html><html><body>Log in</body></html>",
            b"<html>\n<head></head>",
            b"\n<!doctype html>\n" * 50,
            b"  <HTML>",
        ]
    )
    return _bad(draw, folder, "a web page", page, "web page|HTML", "log in|again|download|fetch")


def pointer(draw: Any, folder: Path) -> Bad:
    digest, size = draw.randbytes(32).hex(), draw.randrange(10**10)
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {size}\n"
    return _bad(draw, folder, "a Git LFS pointer", text.encode(), "LFS", "git lfs pull|download|fetch")


def zip_file(draw: Any, folder: Path) -> Bad:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
    return _bad(draw, folder, "a zip", archive.getvalue(), "zip|torch.save|pickle", "safetensors")


class _Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def pickled(draw: Any, folder: Path) -> Bad:
    content = pickle.dumps({"a": _Payload(str(folder / MARKER))}, protocol=draw.choice([2, 4]))
    return _bad(draw, folder, "a pickle", content, "pickle|code", "safetensors")


def no_bytes(draw: Any, folder: Path) -> Bad:
    return _bad(draw, folder, "empty file", b"", "empty|0 bytes|no bytes")


def zeros(draw: Any, folder: Path) -> Bad:
    return _bad(draw, folder, "only zeros", bytes(draw.choice([8, 512, 100_000])), "zero|header|safetensors")


def header(draw: Any, folder: Path) -> Bad:
    content = _content(draw, folder)
    length = struct.unpack("<Q", content[:8])[0]
    broken = bytearray(content)
    kind = draw.choice(["not JSON", "a length beyond the file", "not UTF-8", "a list"])
    if kind == "not JSON":
        broken[8] = ord("[")
    elif kind == "not UTF-8":
        broken[8 + length // 2] = 0xFF
    elif kind == "a list":
        broken[8 : 8 + length] = b"[]".ljust(length)
    else:
        broken[:8] = struct.pack("<Q", draw.choice([len(content), 2**40, 2**63 - 1]))
    return _bad(draw, folder, f"header: {kind}", bytes(broken), "header|cut off|JSON")


def _with_header(content: bytes, change: Any) -> bytes:
    length = struct.unpack("<Q", content[:8])[0]
    head = json.loads(content[8 : 8 + length])
    change({key: value for key, value in head.items() if key != "__metadata__"})
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def overlap(draw: Any, folder: Path) -> Bad:
    def change(tensors: dict[str, Any]) -> None:
        first, second = draw.sample(sorted(tensors, key=lambda key: tensors[key]["data_offsets"]), 2)
        size = tensors[second]["data_offsets"][1] - tensors[second]["data_offsets"][0]
        start = tensors[first]["data_offsets"][0] + 4
        tensors[second]["data_offsets"] = [start, start + size]

    return _bad(
        draw,
        folder,
        "overlapping tensors",
        _with_header(_content(draw, folder), change),
        "overlap|offset|gap|header",
    )


def shape(draw: Any, folder: Path) -> Bad:
    def change(tensors: dict[str, Any]) -> None:
        key = draw.choice(sorted(tensors))
        tensors[key]["shape"] = [*tensors[key]["shape"][:-1], tensors[key]["shape"][-1] + 1]

    return _bad(
        draw,
        folder,
        "a shape of another size",
        _with_header(_content(draw, folder), change),
        "shape|size|bytes|offset|header",
    )


def no_dtype(draw: Any, folder: Path) -> Bad:
    def change(tensors: dict[str, Any]) -> None:
        tensors[draw.choice(sorted(tensors))]["dtype"] = draw.choice(["F33", "Q4_K", "", "float32"])

    return _bad(
        draw, folder, "an unknown dtype", _with_header(_content(draw, folder), change), "dtype|type|header"
    )


def trailing(draw: Any, folder: Path) -> Bad:
    extra = draw.choice([b"\0", b"more", bytes(5000)])
    return _bad(
        draw,
        folder,
        "trailing bytes",
        _content(draw, folder) + extra,
        "trailing|more bytes|after|longer|header|beyond|extra",
    )


GENERATORS: tuple[Generator, ...] = (
    cut_off,
    web_page,
    pointer,
    zip_file,
    pickled,
    no_bytes,
    header,
    overlap,
    trailing,
    shape,
    zeros,
    no_dtype,
)
