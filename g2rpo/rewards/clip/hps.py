"""HPS-v2.1: cosine similarity under OpenCLIP's ViT-H-14 (erf GELU), tuned on human preferences.

The scores are in the units of the paper's tables: 0.305 in their row of the base model. Images are
resized to fit and padded with black.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from g2rpo.rewards.base import RewardSeconds, RewardSpec, Source
from g2rpo.rewards.clip.base import ClipReward, clip_tokenizer
from g2rpo.rewards.clip.networks import OPENCLIP_CONFIG, OPENCLIP_FILES, checked_heads, clip_network
from g2rpo.rewards.clip.texts import CLIP_TOKENIZER_SOURCE
from g2rpo.rewards.model_reward import AUTO, ScoringOptions
from g2rpo.rewards.preprocess import pad
from g2rpo.rewards.published import locate

REPOSITORY = "xswu/HPSv2"
FILES = ("HPS_v2.1_compressed.pt", *OPENCLIP_FILES)


def load(
    device: torch.device,
    path: str = REPOSITORY,
    tokenizer: str | None = None,
    batch: int = 32,
    dtype: str = AUTO,
    offload: str = "none",
    heads: Sequence[int] | None = None,
) -> ClipReward:
    """Loads HPS-v2.1.

    Args:
        device: where the network computes.
        path: hub name, folder or weight file: HPS_v2.1_compressed.pt or another in OpenCLIP's layout.
        tokenizer: hub name or folder of CLIP's tokenizer; None = beside the weights, else from the hub.
        batch, dtype, offload: see `ScoringOptions`.
        heads: (vision, text) attention heads of a network other than ViT-H-14.

    Raises:
        ValueError: an option, a file or a tokenizer does not fit.
    """
    options, heads = ScoringOptions(device, batch, dtype, offload), checked_heads(heads)
    weights = locate(path, (FILES[0], OPENCLIP_CONFIG), "the hps reward")
    network = clip_network(weights, FILES, quick_gelu=False, heads=heads)
    tokenize = clip_tokenizer(tokenizer, weights, network, openclip=True, what="the hps reward")
    return ClipReward(network, tokenize, options, pad)


SPEC = RewardSpec(
    load,
    title="HPS-v2.1",
    sources=(Source(REPOSITORY, FILES[:1]), CLIP_TOKENIZER_SOURCE),
    num_params=986_109_441,
    dtype=AUTO,
    seconds=RewardSeconds(per_call=7e-3, per_image=0.6e-3, machine="float16 on an H200, 720 x 720 px"),
)
