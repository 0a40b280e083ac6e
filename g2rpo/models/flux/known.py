"""Built-in architectures, which need no configuration files: FLUX.1-dev and a small one for tests."""

from __future__ import annotations

from g2rpo.models.family import Configs

FLUX_1_DEV: Configs = {
    "transformer": {"guidance_embeds": True},  # diffusers' defaults are FLUX.1's
    "vae": {
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "latent_channels": 16,
        "layers_per_block": 2,
        "sample_size": 1024,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
    },
    "text_encoder": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "projection_dim": 768,
    }
    | {"num_attention_heads": 12, "vocab_size": 49408, "max_position_embeddings": 77},
    "text_encoder_2": {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    | {"vocab_size": 32128, "feed_forward_proj": "gated-gelu"},
}
"""Configuration of FLUX.1-dev, so that runs can be planned without access to the gated model."""

RANDOM_TINY: Configs = {  # the classes of FLUX.1, with a few thousand weights
    "transformer": {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "guidance_embeds": True,
        "axes_dims_rope": [4, 6, 6],
    },
    "vae": {
        "block_out_channels": [8, 8],
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "sample_size": 32,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
    },
    "text_encoder": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "projection_dim": 32}
    | {"num_attention_heads": 2, "vocab_size": 99, "max_position_embeddings": 77},
    "text_encoder_2": {
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 48,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": 99,
    },
}

KNOWN: dict[str, Configs] = {
    "black-forest-labs/FLUX.1-dev": FLUX_1_DEV,
    "black-forest-labs/FLUX.1-Krea-dev": FLUX_1_DEV,
}
"""Hub models with the sizes of FLUX.1-dev."""

RANDOM: dict[str, Configs] = {"random:flux-dev": FLUX_1_DEV, "random:tiny": RANDOM_TINY}
"""Architectures that can be created with random weights (models/flux/random.py)."""
