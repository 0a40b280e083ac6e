"""Colourfulness of an image (Hasler and Süsstrunk, 2003): a reward without weights.

    rg = R - G,  yb = (R + G) / 2 - B      (8-bit units)
    score = sqrt(std(rg)^2 + std(yb)^2) + 0.3 sqrt(mean(rg)^2 + mean(yb)^2)

0 is gray; participants of that study called values above 109 "extremely colourful". The prompt is ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from g2rpo.rewards.base import Metadata, Reward, RewardSpec


def load(device: torch.device) -> Reward:
    """Returns the reward, which has nothing to load."""
    return colourfulness


def colourfulness(images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
    """Scores images as `Reward.__call__` does; the computation is in float64."""
    red, green, blue = (255 * images.double()).unbind(1)
    opponents = torch.stack([red - green, (red + green) / 2 - blue], 1).flatten(2)
    std, mean = opponents.std(2, correction=0), opponents.mean(2)
    return (std.norm(dim=1) + 0.3 * mean.norm(dim=1)).float()


SPEC = RewardSpec(load, num_params=0)
