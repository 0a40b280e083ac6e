"""HPS-v2.1: cosine similarity under OpenCLIP's ViT-H-14 (erf GELU), tuned on human preferences.

Numbers of the paper's column: 0.305 for FLUX.1-dev. Pictures are shrunk until they fit, on black.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from g2rpo.rewards.clip.base import ClipReward, clip_tokenizer
from g2rpo.rewards.clip.networks import OPENCLIP_CONFIG, OPENCLIP_FILES, checked_heads, clip_network
from g2rpo.rewards.model_reward import AUTO, Use
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
    """Args:
        path: hub name, folder, or the file: HPS_v2.1_compressed.pt or another in OpenCLIP's layout.
        tokenizer: hub name or folder of CLIP's; None: beside the weights, else the hub's.
        batch, dtype, offload: as in `Use`.
        heads: (vision, text) attention heads of another network than ViT-H-14.

    Raises:
        ValueError: an option, a file or a tokenizer that does not fit.
    """
    use, heads = Use(device, batch, dtype, offload), checked_heads(heads)
    place = locate(path, (FILES[0], OPENCLIP_CONFIG), "the hps reward")
    network = clip_network(place, FILES, quick_gelu=False, heads=heads)
    words = clip_tokenizer(tokenizer, place, network, openclip=True, what="the hps reward")
    return ClipReward(network, words, use, pad)
