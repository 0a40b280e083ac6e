"""The embedded preference model: a cosine, as in HPS, under a CLIP tuned on the choices of a simulated rater.

It favours vivid images without limit and is nearly insensitive to relations: the deliberate weakness that
g2rpo.world.preference describes.
"""

from __future__ import annotations

import torch

from g2rpo.models.tiny import assets
from g2rpo.rewards.base import RewardSpec
from g2rpo.rewards.tiny_clip import TinyClip


def load(device: torch.device) -> TinyClip:
    """Loads the embedded preference model."""
    return TinyClip(assets() / "tiny_preference", device)


SPEC = RewardSpec(load, num_params=1_399_169, title="embedded preference score")
