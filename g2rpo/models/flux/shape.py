"""Sizes of a FLUX.1 model as closed formulas of its configuration files, see models/shapes.py.

A block of width d has attention of four d x d matrices and an MLP d -> 4 d -> d; double blocks have one of
each per stream (image and text), single blocks one for both streams together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from g2rpo.models.family import ModelFiles, ModelShape
from g2rpo.models.flux.check import check_configs, token_limit
from g2rpo.models.flux.known import FLUX_1_DEV
from g2rpo.models.flux.latents import checked_size
from g2rpo.models.flux.layout import MLP_RATIO
from g2rpo.models.flux.network import LORA_TARGETS
from g2rpo.models.flux.text import checked_length
from g2rpo.models.options import PolicyOptions
from g2rpo.models.shapes import (
    Linear,
    Size,
    attention,
    autoencoder_kl,
    clip_text_params,
    lora_params_per_rank,
    t5_encoder_params,
    targeted,
    total,
)

TIME_CHANNELS = 256
"""Channels of the sinusoidal embedding of sigma and of the guidance scale."""


def linears(config: Mapping[str, Any], image_tokens: int, text_tokens: int) -> dict[str, Linear]:
    """Returns name -> linear layer of a FluxTransformer2DModel; missing entries are FLUX.1's.

    Args:
        config: configuration of the transformer.
        image_tokens, text_tokens: lengths of the two streams.
    """
    width, channels = width_of(config), int(config.get("in_channels", 64))
    context, pooled = config.get("joint_attention_dim", 4096), config.get("pooled_projection_dim", 768)
    layers = {
        "x_embedder": Linear(channels, width, image_tokens),
        "context_embedder": Linear(context, width, text_tokens),
        "norm_out.linear": Linear(width, 2 * width, 1),
        "proj_out": Linear(
            width,
            config.get("patch_size", 1) ** 2 * (config.get("out_channels") or channels),
            image_tokens,
        ),
    }
    inputs = {"timestep_embedder": TIME_CHANNELS, "text_embedder": pooled}
    if config.get("guidance_embeds", False):
        inputs["guidance_embedder"] = TIME_CHANNELS
    for name, count in inputs.items():
        layers[f"time_text_embed.{name}.linear_1"] = Linear(count, width, 1)
        layers[f"time_text_embed.{name}.linear_2"] = Linear(width, width, 1)
    for number in range(config.get("num_layers", 19)):
        for name, layer in _double_block(width, image_tokens, text_tokens).items():
            layers[f"transformer_blocks.{number}.{name}"] = layer
    for number in range(config.get("num_single_layers", 38)):
        for name, layer in _single_block(width, image_tokens + text_tokens).items():
            layers[f"single_transformer_blocks.{number}.{name}"] = layer
    return layers


def _double_block(width: int, image_tokens: int, text_tokens: int) -> dict[str, Linear]:
    streams = {
        ("norm1", "ff", "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"): image_tokens,
        (
            "norm1_context",
            "ff_context",
            "attn.add_q_proj",
            "attn.add_k_proj",
            "attn.add_v_proj",
            "attn.to_add_out",
        ): text_tokens,
    }
    layers = {}
    for (norm, mlp, *projections), rows in streams.items():
        layers[f"{norm}.linear"] = Linear(width, 6 * width, 1)
        layers |= dict.fromkeys(projections, Linear(width, width, rows))
        layers[f"{mlp}.net.0.proj"] = Linear(width, MLP_RATIO * width, rows)
        layers[f"{mlp}.net.2"] = Linear(MLP_RATIO * width, width, rows)
    return layers


def _single_block(width: int, tokens: int) -> dict[str, Linear]:
    return {
        "norm.linear": Linear(width, 3 * width, 1),
        **dict.fromkeys(("attn.to_q", "attn.to_k", "attn.to_v"), Linear(width, width, tokens)),
        "proj_mlp": Linear(width, MLP_RATIO * width, tokens),
        "proj_out": Linear((1 + MLP_RATIO) * width, width, tokens),
    }


def width_of(config: Mapping[str, Any]) -> int:
    """Returns the number of channels of the transformer."""
    return int(config.get("num_attention_heads", 24)) * int(config.get("attention_head_dim", 128))


def shape_of(
    configs: Mapping[str, Mapping[str, Any]],
    *,
    height_px: int,
    width_px: int,
    text_tokens: int,
    lora_targets: Sequence[str] | None = None,
) -> ModelShape:
    """Returns the sizes of a model.

    Args:
        configs: configuration of each network: transformer, vae, text_encoder, text_encoder_2.
        height_px, width_px: size of the image, multiples of a token's side.
        text_tokens: number of T5 tokens.
        lora_targets: as in PolicyOptions.

    Raises:
        ValueError: lora_targets match nothing, or the VAE is of an unknown kind.
    """
    config = configs["transformer"]
    patch_px = patch_side_px(configs["vae"])
    rows, columns = height_px // patch_px, width_px // patch_px
    image_tokens, tokens = rows * columns, rows * columns + text_tokens
    width, head = width_of(config), int(config.get("attention_head_dim", 128))
    double, single = int(config.get("num_layers", 19)), int(config.get("num_single_layers", 38))
    layers = linears(config, image_tokens, text_tokens)
    transformer = total(layer.size for layer in layers.values())
    transformer += attention(tokens, tokens, width) * (double + single)
    head_norms = Size((4 * double + 2 * single) * head)
    modulations = total(layer.size for name, layer in layers.items() if "norm" in name)
    encoder, decoder = autoencoder_kl(configs["vae"], 2 * rows, 2 * columns)
    text = clip_text_params(configs["text_encoder"]) + t5_encoder_params(configs["text_encoder_2"])
    context, pooled = config.get("joint_attention_dim", 4096), config.get("pooled_projection_dim", 768)
    return ModelShape(
        height_px=height_px,
        width_px=width_px,
        latent_shape=(image_tokens, int(config.get("in_channels", 64))),
        text_tokens=text_tokens,
        embedding_numbers=text_tokens * int(context) + int(pooled),
        width=width,
        num_blocks=double + single,
        transformer_params=(transformer + head_norms).params,
        norm_params=(modulations + head_norms).params,
        vae_params=(encoder + decoder).params,
        text_params=text,
        lora_params_per_rank=lora_params_per_rank(layers, lora_targets, LORA_TARGETS),
        lora_layers=len(targeted(layers, lora_targets, LORA_TARGETS)),
        forward_flops=transformer.flops,
        decode_flops=decoder.flops,
        decoder_width=int(configs["vae"].get("block_out_channels", (64,))[0]),
    )


def patch_side_px(vae: Mapping[str, Any]) -> int:
    """Returns the side of the square of pixels that a latent token stands for."""
    return 2 * 2 ** (len(vae.get("block_out_channels", (64,))) - 1)


def shape_of_files(files: ModelFiles, options: PolicyOptions) -> ModelShape:
    """Returns the sizes of a model that was found.

    Raises:
        ValueError: the model does not support an option.
    """
    check_configs(files, options)
    configs = {part: files.config(part) for part in FLUX_1_DEV}
    (height_px, width_px), _ = checked_size(options.resolution, configs["vae"])
    return shape_of(
        configs,
        height_px=height_px,
        width_px=width_px,
        text_tokens=checked_length(options.max_sequence_length, token_limit(files), files.name),
        lora_targets=options.lora_targets,
    )
