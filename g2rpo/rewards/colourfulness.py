"""Colourfulness of a picture (Hasler and Süsstrunk, 2003): a reward without weights.

    rg = R - G,  yb = (R + G) / 2 - B      (8-bit units)
    score = sqrt(std(rg)^2 + std(yb)^2) + 0.3 sqrt(mean(rg)^2 + mean(yb)^2)

0 is gray, above 109 "extremely colourful" to the people asked there. It does not look at the prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from g2rpo.rewards.base import Metadata, Reward


def load(device: torch.device) -> Reward:
    """Nothing to load."""
    return colourfulness


def colourfulness(images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
    """See `Reward`; each score depends on its own picture alone, in float64 inside."""
    red, green, blue = (255 * images.double()).unbind(1)
    opponents = torch.stack([red - green, (red + green) / 2 - blue], 1).flatten(2)
    std, mean = opponents.std(2, correction=0), opponents.mean(2)
    return (std.norm(dim=1) + 0.3 * mean.norm(dim=1)).float()
