"""PickScore: exp(logit_scale) * cosine under a CLIP ViT-H tuned on human choices, divided by 100.

The scores are in the units of the paper's tables: 0.226 in their row of the base model; PickScore's own
scores (`raw`) are a hundred times as large.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from g2rpo.rewards.base import RewardSeconds, RewardSpec, Source
from g2rpo.rewards.clip.base import ClipReward, clip_tokenizer
from g2rpo.rewards.clip.networks import TRANSFORMERS_FILES, clip_network
from g2rpo.rewards.clip.texts import CLIP_TOKENIZER_SOURCE
from g2rpo.rewards.model_reward import AUTO, ScoringOptions
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
    """Loads PickScore.

    Args:
        device: where the network computes.
        path: hub name, folder or weight file in transformers' layout, with config.json beside it.
        tokenizer, batch, dtype, offload: see `hps.load`.
        raw: return PickScore's own scores, about 22, instead of the paper's.

    Raises:
        ValueError: an option, a file or a tokenizer does not fit.
    """
    options = ScoringOptions(device, batch, dtype, offload)
    weights = locate(path, HUB_FILES, "the pickscore reward")
    network: Any = clip_network(weights, TRANSFORMERS_FILES, quick_gelu=False)
    tokenize = clip_tokenizer(tokenizer, weights, network, openclip=False, what="the pickscore reward")
    scale = math.exp(
        network.logit_scale.item()
    )  # before the weights are cast: in bfloat16 it would be wrong by 1 %
    return ClipReward(network, tokenize, options, crop_transformers, scale if raw else scale / 100)


SPEC = RewardSpec(
    load,
    title="PickScore",
    sources=(Source(REPOSITORY, HUB_FILES), CLIP_TOKENIZER_SOURCE),
    num_params=986_109_441,
    dtype=AUTO,
    seconds=RewardSeconds(per_call=7e-3, per_image=0.6e-3, machine="float16 on an H200, 720 x 720 px"),
)
