"""The embedded preference model's score: a cosine, as HPS's, of a CLIP tuned on a made-up rater's choices.

It likes vivid pictures without limit and hardly sees relations: the planted blind spot that
g2rpo.world.preference describes.
"""

from __future__ import annotations

import torch

from g2rpo.models.tiny import assets
from g2rpo.rewards.tiny_clip import TinyClip


def load(device: torch.device) -> TinyClip:
    """The embedded preference model."""
    return TinyClip(assets() / "tiny_preference", device)
