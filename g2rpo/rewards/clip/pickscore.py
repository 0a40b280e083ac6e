"""PickScore: exp(logit_scale) * cosine under a CLIP ViT-H tuned on choices, divided by 100.

Numbers of the paper's column: 0.226 for FLUX.1-dev; PickScore's own are a hundred times that (`raw`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from g2rpo.rewards.clip.base import ClipReward, clip_tokenizer
from g2rpo.rewards.clip.networks import TRANSFORMERS_FILES, clip_network
from g2rpo.rewards.model_reward import AUTO, Use
from g2rpo.rewards.preprocess import crop_transformers
from g2rpo.rewards.published import locate

REPOSITORY = "yuvalkirstain/PickScore_v1"
HUB_FILES = ("config.json", "model.safetensors")


def load(
    device: torch.device,
    path: str = REPOSITORY,
    tokenizer: str | None = None,
    batch: int = 32,
    dtype: str = AUTO,
    offload: str = "none",
    raw: bool = False,
) -> ClipReward:
    """Args:
        path: hub name, folder or weight file in transformers' layout, config.json beside it.
        tokenizer, batch, dtype, offload: as of `hps.load`.
        raw: PickScore's own numbers, about 22, not the paper's.

    Raises:
        ValueError: an option, a file or a tokenizer that does not fit.
    """
    use = Use(device, batch, dtype, offload)
    place = locate(path, HUB_FILES, "the pickscore reward")
    network: Any = clip_network(place, TRANSFORMERS_FILES, quick_gelu=False)
    words = clip_tokenizer(tokenizer, place, network, openclip=False, what="the pickscore reward")
    scale = math.exp(network.logit_scale.item())  # before weights are cast: bfloat16 would be 1 % off
    return ClipReward(network, words, use, crop_transformers, scale if raw else scale / 100)
