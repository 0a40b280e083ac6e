"""The rows of a file's tensor that a parameter is read from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Source:
    """Location of the rows of a tensor in diffusers' layout within a tensor of another layout.

    Attributes:
        key: key of the other tensor, or name of its layer.
        start, stop: rows of the other tensor, stop exclusive; None: to the end.
        swapped: whether the two halves of these rows are swapped.
    """

    key: str
    start: int = 0
    stop: int | None = None
    swapped: bool = False

    def read(self, stored: Any, first: int = 0, last: int | None = None) -> Tensor:
        """Returns rows [first, last) of the diffusers tensor, and reads only these.

        Args:
            stored: the other tensor [rows, …], or safetensors' slice of it (`get_slice(key)`).
            first: first row.
            last: last row, exclusive; None: to the end.
        """
        size = (stored.shape if isinstance(stored, Tensor) else stored.get_shape())[0]
        stop = size if self.stop is None else self.stop
        half = (self.start + stop) // 2
        pieces = [(half, stop), (self.start, half)] if self.swapped else [(self.start, stop)]
        last = stop - self.start if last is None else last
        parts, done = [], 0
        for begin, end in pieces:
            low, high = max(first - done, 0), min(last - done, end - begin)
            if low < high:
                parts.append(stored[begin + low : begin + high])
            done += end - begin
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else stored[0:0]
