"""What a reward is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

Metadata = list[dict[str, Any]]


class Reward(Protocol):
    """Scores images against their prompts."""

    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        """Args: images [N, 3, H, W] in [0, 1], float32; N prompts; what else is known of each prompt.

        Returns: [N], float32, on any device; NaN marks a sample that could not be judged.
        """
        ...


Options = Mapping[str, Any]
