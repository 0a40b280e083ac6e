"""What weight files hold, read from their headers, and rows that say how it differs from what they should."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from g2rpo.models.loading.reading import FLOATS, Header
from g2rpo.setup.doctor import Row

Shapes = dict[str, tuple[int, ...]]

AGAIN = "fetch it again"


def compared(name: str, found: Header, shapes: Shapes, advice: str) -> list[Row]:
    """Keys, shapes and dtypes against what they should be."""
    misfits = [
        f"{key} {found[key][1]}, not {shape}"
        for key, shape in shapes.items()
        if key in found and found[key][1] != shape
    ]
    count = sum(math.prod(shape) for _, shape in found.values())
    return problems(
        name,
        {
            "missing keys": (shapes.keys() - found.keys(), f"{AGAIN}, if it was cut short; else {advice}"),
            "unknown keys": (found.keys() - shapes.keys(), advice),
            "shapes that do not fit": (misfits, advice),
            "tensors of no floating-point numbers": (not_floats(found), "g2rpo reads no quantised weights"),
        },
    ) or [Row(name, "ok", f"{len(found)} tensors, {count:,} numbers, {dtypes(found)}")]


def problems(name: str, kinds: Mapping[str, tuple[Iterable[str], str]]) -> list[Row]:
    """A row for each kind of problem (label -> what has it, advice) that there is, naming the first three."""
    rows = []
    for label, (items, advice) in kinds.items():
        listed = sorted(items)
        if listed:
            shown = ", ".join(listed[:3]) + (", …" if len(listed) > 3 else "")
            rows.append(Row(name, "missing", f"{len(listed)} {label}: {shown}", advice))
    return rows


def not_floats(found: Header) -> list[str]:
    return [f"{key} is {dtype}" for key, (dtype, _) in found.items() if dtype not in FLOATS]


def dtypes(found: Header) -> str:
    return " and ".join(sorted({dtype for dtype, _ in found.values()}))
