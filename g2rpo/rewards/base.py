"""The protocol of a reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

Metadata = list[dict[str, Any]]
"""One dictionary per image: the fields of the prompt's record, except its text."""


class Reward(Protocol):
    """Scores images, usually against their prompts."""

    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        """Scores N images.

        Args:
            images: [N, 3, H, W] in [0, 1], float32.
            prompts: N prompts.
            metadata: N dictionaries with further fields of the prompts' records, or None.

        Returns:
            [N], float32, on any device; NaN marks an image without a score.
        """
        ...


Options = Mapping[str, Any]
"""Keyword arguments of a reward's factory."""
