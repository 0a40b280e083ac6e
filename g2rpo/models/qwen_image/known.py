"""Built-in architectures, which need no configuration files: Qwen-Image and a small one for tests."""

from __future__ import annotations

from typing import Any

# Per channel of the VAE's latents.
# fmt: off
_MEAN = [
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
]
_STD = [
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
]
# fmt: on

QWEN_IMAGE: dict[str, dict[str, Any]] = {
    "transformer": {
        "patch_size": 2,
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 60,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 3584,
        "guidance_embeds": False,
        "axes_dims_rope": [16, 56, 56],
    },
    "vae": {
        "base_dim": 96,
        "z_dim": 16,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "attn_scales": [],
        "temperal_downsample": [False, True, True],
        "dropout": 0.0,
        "latents_mean": _MEAN,
        "latents_std": _STD,
    },
    "text_encoder": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
}
"""Configuration of Qwen/Qwen-Image, so that runs can be planned without a download.

The text encoder is the language part of Qwen2.5-VL-7B; its vision tower is never loaded.
"""

RANDOM_TINY: dict[str, dict[str, Any]] = {  # the classes of Qwen-Image, with a few thousand weights
    "transformer": {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "guidance_embeds": False,
        "axes_dims_rope": [4, 6, 6],
    },
    "vae": {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 2],
        "num_res_blocks": 1,
        "attn_scales": [],
        "temperal_downsample": [True],
        "dropout": 0.0,
        "latents_mean": [-0.7, 0.1, 0.9, -0.2],
        "latents_std": [2.8, 1.4, 0.6, 1.2],
    },
    "text_encoder": {
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}

KNOWN = {"Qwen/Qwen-Image": QWEN_IMAGE}
"""Hub models with the sizes of Qwen-Image."""

RANDOM = {"random:qwen-image": QWEN_IMAGE, "random:qwen-tiny": RANDOM_TINY}
"""Architectures that can be created with random weights (models/qwen_image/random.py)."""
