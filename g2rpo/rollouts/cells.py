"""Groupwise rewards in a rollout: each cell is judged once, as soon as all its images are decoded.

A cell is the G images of one prompt, one noise step and one granularity. Tails that end at the same images
share a cell, and so do all noise steps of a path. Exploration lists the distinct images as [distinct images,
P, G], so a cell is G consecutive images. Decode batches may cut a cell anywhere: the images of an incomplete
cell are kept in 8 bits until the next batch, and none are kept without a groupwise reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from g2rpo.rewards.base import GroupReward, Metadata
from g2rpo.rewards.checked import CheckedReward


class CellJudge:
    """Collects decoded images and lets the groupwise rewards judge complete cells."""

    def __init__(
        self,
        rewards: Mapping[str, GroupReward | CheckedReward],
        prompts: Sequence[str],
        metadata: Metadata | None,
        group_size: int,
        num_cells: int,
    ) -> None:
        """Prepares for the cells of P prompts.

        Args:
            rewards: groupwise rewards by name.
            prompts, metadata: P prompts, and P dictionaries or None.
            group_size: G.
            num_cells: distinct images per member x P; images after those of the cells are the anchors'.
        """
        self._rewards = {
            name: reward if isinstance(reward, CheckedReward) else CheckedReward(name, reward)
            for name, reward in rewards.items()
        }
        self._prompts, self._metadata = prompts, metadata
        self._group_size, self._num_cells = group_size, num_cells
        self._scores: dict[str, list[Tensor]] = {name: [] for name in rewards}
        self._kept: tuple[Tensor, Tensor] | None = None
        self._next = 0

    def add(self, pixels: Tensor, finite: Tensor) -> None:
        """Takes the next decoded images, and judges the cells that they complete.

        Args:
            pixels: [N, 3, H, W] in [0, 1], with 8-bit values.
            finite: [N], bool; other images are left out of their cells.
        """
        if not self._rewards:
            return
        if self._kept is not None:
            pixels = torch.cat([self._kept[0].to(pixels.dtype) / 255, pixels])
            finite = torch.cat([self._kept[1], finite])
        low = 0
        while low + self._group_size <= len(pixels) and self._next < self._num_cells:
            cell = slice(low, low + self._group_size)
            prompt = self._next % len(self._prompts)
            about = None if self._metadata is None else self._metadata[prompt]
            for name, reward in self._rewards.items():
                scores = reward.judge(pixels[cell], self._prompts[prompt], about, finite[cell])
                self._scores[name].append(scores)
            low, self._next = cell.stop, self._next + 1
        self._kept = (pixels[low:] * 255).round().to(torch.uint8), finite[low:]

    def scores(self, num_images: int) -> dict[str, Tensor]:
        """Returns the scores of all images by reward, [num_images], float32; NaN for the anchors' images."""
        assert self._next == self._num_cells or not self._rewards, "not all images were added"
        num_anchors = num_images - self._num_cells * self._group_size
        return {
            name: torch.cat([*parts, parts[0].new_full((num_anchors,), torch.nan)])
            for name, parts in self._scores.items()
        }
