"""CLIP score: cosine similarity under DFN5B's ViT-H-14 (quick GELU), at 224 or 378 pixels.

Numbers of the paper's column: 0.388 for FLUX.1-dev. Pictures are squashed to a square, whatever their shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from g2rpo.rewards.clip.base import ClipReward, clip_tokenizer
from g2rpo.rewards.clip.networks import (
    OPENCLIP_CONFIG,
    OPENCLIP_FILES,
    TRANSFORMERS_FILES,
    checked_heads,
    clip_network,
)
from g2rpo.rewards.model_reward import AUTO, Use
from g2rpo.rewards.preprocess import squash
from g2rpo.rewards.published import locate

REPOSITORY = "apple/DFN5B-CLIP-ViT-H-14"
HUB_FILES = (OPENCLIP_CONFIG, "open_clip_pytorch_model.bin")
FILES = (*TRANSFORMERS_FILES, *OPENCLIP_FILES)


def load(
    device: torch.device,
    path: str = REPOSITORY,
    tokenizer: str | None = None,
    batch: int = 32,
    dtype: str = AUTO,
    offload: str = "none",
    heads: Sequence[int] | None = None,
) -> ClipReward:
    """Args:
        path: hub name, folder or weight file, in transformers' layout (config.json beside it) or OpenCLIP's;
            apple/DFN5B-CLIP-ViT-H-14-378 looks at 378 pixels.
        tokenizer, batch, dtype, offload, heads: as of `hps.load`.

    Raises:
        ValueError: an option, a file or a tokenizer that does not fit.
    """
    use, heads = Use(device, batch, dtype, offload), checked_heads(heads)
    place = locate(path, HUB_FILES, "the clip reward")
    network = clip_network(place, FILES, quick_gelu=True, heads=heads)
    words = clip_tokenizer(tokenizer, place, network, openclip=True, what="the clip reward")
    return ClipReward(network, words, use, squash)
