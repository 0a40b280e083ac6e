"""The first images of a rollout and their scores, kept to score them again (training/preflight.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from g2rpo.rewards.base import Metadata


class FirstImages:
    """Complete groups of images from the start of a rollout; at least one group, and at most `most` images.

    Attributes:
        images: [n, 3, H, W], uint8, on the CPU; None: none were kept yet.
        prompts, metadata: of each image; metadata may be None.
        scores: [R, n], float32, on the CPU: NaN = no score.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[Tensor] = []
        self.prompts: list[str] = []
        self.metadata: Metadata | None = None
        self.scores: Tensor | None = None

    @property
    def images(self) -> Tensor | None:
        return torch.cat(self._kept) if self._kept else None

    def add(
        self,
        pixels: Tensor,
        prompts: Sequence[str],
        metadata: Metadata | None,
        group_size: int,
        num_groups: int,
    ) -> None:
        """Takes the next decoded images, in the order of scoring, as far as they are needed.

        Args:
            pixels: [N, 3, H, W] in [0, 1], with 8-bit values.
            prompts, metadata: one per image; metadata may be None.
            group_size: G, number of consecutive images of one prompt.
            num_groups: P; the images after the first P groups are of other noise steps.
        """
        wanted = group_size * min(num_groups, max(1, self._most // group_size)) - len(self.prompts)
        if wanted <= 0:
            return
        self._kept.append((pixels[:wanted] * 255).round().to(torch.uint8).cpu())
        self.prompts += prompts[:wanted]
        if metadata is not None:
            self.metadata = [*(self.metadata or []), *metadata[:wanted]]

    def set_scores(self, scores: Tensor) -> None:
        """Takes the scores of all images, [R, all images], in the order of `add`."""
        self.scores = scores[:, : len(self.prompts)].cpu()
