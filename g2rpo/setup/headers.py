"""Compares the headers of weight files with the expected keys, shapes and dtypes, and checks values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from g2rpo.models.loading.reading import FLOATS, Header, all_finite, read_header
from g2rpo.setup.doctor import Row

Shapes = dict[str, tuple[int, ...]]

AGAIN = "fetch it again"


def compared(name: str, header: Header, shapes: Shapes, advice: str) -> list[Row]:
    """Compares keys, shapes and dtypes of a file with the expected ones.

    Args:
        name: of the file, for the rows.
        header: key -> (dtype, shape), as in the file.
        shapes: expected key -> shape.
        advice: what to do if the file does not match.

    Returns:
        A row for each kind of problem, or a single row that says "ok".
    """
    mismatches = [
        f"{key} {header[key][1]}, not {shape}"
        for key, shape in shapes.items()
        if key in header and header[key][1] != shape
    ]
    count = sum(math.prod(shape) for _, shape in header.values())
    return problems(
        name,
        {
            "missing keys": (
                shapes.keys() - header.keys(),
                f"{AGAIN}, if it was truncated; otherwise {advice}",
            ),
            "unknown keys": (header.keys() - shapes.keys(), advice),
            "shapes that do not fit": (mismatches, advice),
            "tensors that are not floating-point": (
                not_floats(header),
                "g2rpo does not read quantised weights",
            ),
        },
    ) or [Row(name, "ok", f"{len(header)} tensors, {count:,} numbers, {dtypes(header)}")]


def problems(name: str, kinds: Mapping[str, tuple[Iterable[str], str]]) -> list[Row]:
    """Returns a row for each kind of problem that occurs, naming its first three cases.

    Args:
        name: of the file or part, for the rows.
        kinds: label of the problem -> (cases of it, advice).
    """
    rows = []
    for label, (items, advice) in kinds.items():
        listed = sorted(items)
        if listed:
            shown = ", ".join(listed[:3]) + (", …" if len(listed) > 3 else "")
            rows.append(Row(name, "missing", f"{len(listed)} {label}: {shown}", advice))
    return rows


def not_floats(header: Header) -> list[str]:
    """Lists the tensors of a file that are not floating-point, with their dtypes."""
    return [f"{key} is {dtype}" for key, (dtype, _) in header.items() if dtype not in FLOATS]


def dtypes(header: Header) -> str:
    """Names the dtypes of a file, such as `BF16 and F32`."""
    return " and ".join(sorted({dtype for dtype, _ in header.values()}))


def not_finite_rows(path: Path) -> list[Row]:
    """Reads all tensors of a safetensors file, or of a folder's, and reports those that are not finite.

    Returns:
        One row per file with NaN or infinite values.
    """
    rows = []
    for file in sorted(path.rglob("*.safetensors")) if path.is_dir() else [path]:
        if file.suffix == ".safetensors" and (broken := _not_finite(file)):
            kinds = {"tensors with NaN or infinite values": (broken, f"weights must be finite; {AGAIN}")}
            rows += problems(file.name, kinds)
    return rows


def _not_finite(file: Path) -> list[str]:
    from safetensors import safe_open

    header = read_header(file)
    with safe_open(file, framework="pt") as opened:
        return [
            key
            for key, (dtype, _) in header.items()
            if dtype in FLOATS and not all_finite(opened.get_tensor(key))
        ]
