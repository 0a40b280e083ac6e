"""The networks of the embedded model: the classes of FLUX.1 at a size that trains in minutes.

    transformer      FluxTransformer2DModel, 2 double and 4 single blocks, 6 heads of 32, guidance embedded
    vae              AutoencoderKL, f4, 4 channels: 64 px -> 16 x 16 x 4 -> 64 packed tokens of 16
    text encoders    T5 (tokens) and CLIP (pooled), both of width 128, trained together with the transformer

They are created untrained here; g2rpo.world trains them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

WIDTH = 128
"""Channels of the text encoders."""


def transformer() -> Any:
    """Creates the flow transformer."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=6,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )


def vae() -> Any:
    """Creates the autoencoder."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(24, 48, 64),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=64,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0,
        scaling_factor=1.0,
    )


def text_encoder(settings: Mapping[str, Any]) -> Any:
    """Creates the pooled text encoder, a CLIP text tower, with settings of its CLIPTextConfig."""
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(CLIPTextConfig(**settings))


def text_encoder_2(*, vocab_size: int, max_tokens: int, pad_token_id: int, eos_token_id: int) -> Any:
    """Creates the token text encoder, a T5 encoder."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=vocab_size,
            d_model=WIDTH,
            d_kv=32,
            d_ff=2 * WIDTH,
            num_layers=3,
            num_heads=4,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=max_tokens,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=pad_token_id,
            pad_token_id=pad_token_id,
            eos_token_id=eos_token_id,
            use_cache=False,
        )
    )


def scheduler() -> Any:
    """Creates the scheduler of the pipeline, with a fixed shift of 3."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=False)


def network_class(part: str) -> Any:
    """Returns the class of a part: transformer, vae, text_encoder or text_encoder_2."""
    import diffusers
    import transformers

    return {
        "transformer": diffusers.FluxTransformer2DModel,
        "vae": diffusers.AutoencoderKL,
        "text_encoder": transformers.CLIPTextModel,
        "text_encoder_2": transformers.T5EncoderModel,
    }[part]


def pipeline(**parts: Any) -> Any:
    """Creates the stock pipeline of these parts."""
    from diffusers import FluxPipeline

    return FluxPipeline(**parts)


def velocity(
    transformer: Any,
    text_encoder: Any,
    text_encoder_2: Any,
    x: Tensor,
    sigma: Tensor,
    ids: Tensor,
    guidance: Tensor,
) -> Tensor:
    """Computes the velocity at x, differentiable in all three networks.

    Args:
        x: packed latents of a square image, [N, L, C].
        sigma: noise level, [N].
        ids: token ids of the prompts, [N, Lt].
        guidance: guidance scale, [N].

    Returns:
        [N, L, C].
    """
    side = round(x.shape[1] ** 0.5)
    rows, columns = torch.meshgrid(
        torch.arange(side, device=x.device), torch.arange(side, device=x.device), indexing="ij"
    )
    image_ids = torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1).to(x.dtype)
    out: Tensor = transformer(
        hidden_states=x,
        timestep=sigma,
        guidance=guidance,
        encoder_hidden_states=text_encoder_2(input_ids=ids).last_hidden_state,
        pooled_projections=text_encoder(input_ids=ids).pooler_output,
        txt_ids=torch.zeros(ids.shape[1], 3, device=x.device, dtype=x.dtype),
        img_ids=image_ids,
        return_dict=False,
    )[0]
    return out
