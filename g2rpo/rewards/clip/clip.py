"""CLIP score: cosine similarity under DFN5B's ViT-H-14 (quick GELU), at 224 or 378 pixels.

The scores are in the units of the paper's tables: 0.388 in their row of the base model. Images are
resized to a square, whatever their aspect ratio.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from g2rpo.rewards.base import RewardSeconds, RewardSpec, Source
from g2rpo.rewards.clip.base import ClipReward, clip_tokenizer
from g2rpo.rewards.clip.networks import (
    OPENCLIP_CONFIG,
    OPENCLIP_FILES,
    TRANSFORMERS_FILES,
    checked_heads,
    clip_network,
)
from g2rpo.rewards.clip.texts import CLIP_TOKENIZER_SOURCE
from g2rpo.rewards.model_reward import AUTO, ScoringOptions
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
    """Loads the CLIP score.

    Args:
        device: where the network computes.
        path: hub name, folder or weight file, in transformers' layout (with config.json beside it) or
            OpenCLIP's; apple/DFN5B-CLIP-ViT-H-14-378 uses 378 pixels.
        tokenizer, batch, dtype, offload, heads: see `hps.load`.

    Raises:
        ValueError: an option, a file or a tokenizer does not fit.
    """
    options, heads = ScoringOptions(device, batch, dtype, offload), checked_heads(heads)
    weights = locate(path, HUB_FILES, "the clip reward")
    network = clip_network(weights, FILES, quick_gelu=True, heads=heads)
    tokenize = clip_tokenizer(tokenizer, weights, network, openclip=True, what="the clip reward")
    return ClipReward(network, tokenize, options, squash)


SPEC = RewardSpec(
    load,
    title="CLIP score",
    sources=(Source(REPOSITORY, HUB_FILES), CLIP_TOKENIZER_SOURCE),
    num_params=986_109_441,
    dtype=AUTO,
    seconds=RewardSeconds(per_call=7e-3, per_image=0.6e-3, machine="float16 on an H200, 720 x 720 px"),
)
