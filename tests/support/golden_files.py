"""Reads the golden numbers in tests/golden (conventions in its README)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "golden"
DTYPES = {"float32": torch.float32, "float64": torch.float64}
# Relative to 1 + |x|, as the README gives them.
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}


def cases(name: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / f"{name}.json").read_text())["cases"]


def tensor(entry: Any, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
    """Reads a {"shape", "data"} entry, or a flat list with the given shape."""
    if isinstance(entry, dict):
        entry, shape = entry["data"], tuple(entry["shape"])
    values = torch.tensor([float(value) for value in entry], dtype=torch.float64).to(dtype)
    return values if shape is None else values.reshape(shape)


def assert_close(given: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Asserts |given - expected| <= tolerance (1 + |expected|); the default depends on the dtype."""
    assert given.shape == expected.shape, f"{given.shape} against {expected.shape}"
    tolerance = TOLERANCES[expected.dtype] if tolerance is None else tolerance
    both_nan = given.isnan() & expected.isnan()
    off = ((given.double() - expected.double()).abs() / (1 + expected.double().abs())).masked_fill(
        both_nan, 0
    )
    assert off.max() <= tolerance, f"off by {off.max():.3g}, allowed {tolerance:.3g}"
