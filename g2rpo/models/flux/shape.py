"""Sizes of a FLUX model, computed from its configuration files; no weights are read or downloaded.

Networks are built on torch's meta device, without storage. Their parameters are counted, and torch's counter
gives the floating-point operations of a forward (a multiplication and an addition count as two).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from g2rpo.models.family import ModelFiles, ModelShape
from g2rpo.models.flux.check import token_limit
from g2rpo.models.flux.known import FLUX_1_DEV
from g2rpo.models.flux.latents import checked_size
from g2rpo.models.flux.network import FLUX
from g2rpo.models.flux.text import checked_length
from g2rpo.models.options import PolicyOptions, Size, as_resolution
from g2rpo.models.registry import find_model
from g2rpo.models.transformer.weights import lora_layers


@dataclass(frozen=True)
class FluxShape:
    """Sizes of a model at one resolution.

    Attributes:
        size_px: (height, width) of the image, in pixels.
        latent_shape: (L, C), the numbers of tokens and channels of a packed latent.
        text_tokens, text_dim, pooled_dim: sizes of a prompt's embeddings: T5 tokens, their channels, and
            channels of the pooled embedding.
        width, num_blocks: channels and number of blocks of the transformer, for activation estimates.
        transformer_params, vae_params, text_params: numbers of parameters.
        norm_params: parameters of the transformer's norms and modulations, which an 8-bit base stores in the
            compute dtype.
        lora_params_per_rank: parameters of the adapters per unit of rank.
        forward_flops, decode_flops: floating-point operations of a forward and of decoding, per image.
        decoder_width: channels of the VAE decoder at full resolution.
    """

    size_px: Size
    latent_shape: tuple[int, int]
    text_tokens: int
    text_dim: int
    pooled_dim: int
    width: int
    num_blocks: int
    transformer_params: int
    norm_params: int
    vae_params: int
    text_params: int
    lora_params_per_rank: int
    forward_flops: int
    decode_flops: int
    decoder_width: int

    @property
    def tokens(self) -> int:
        """Number of image and text tokens, the sequence length of attention."""
        return self.latent_shape[0] + self.text_tokens


def flux_shape(
    name: str | Path,
    *,
    resolution: Any = None,
    max_sequence_length: int | None = None,
    lora_targets: Sequence[str] | None = None,
) -> FluxShape:
    """Returns the sizes of a model; only the configuration files of a hub model are downloaded.

    Arguments are those of `PolicyOptions`.

    Raises:
        ValueError: there is no such model, or it does not support the resolution or max_sequence_length.
    """
    options = PolicyOptions(
        resolution=as_resolution(resolution),
        max_sequence_length=max_sequence_length,
        lora_targets=None if lora_targets is None else tuple(lora_targets),
    )
    return _shape(find_model(name)[1], options)


def shape_of(files: ModelFiles, options: PolicyOptions) -> ModelShape:
    """Returns the sizes of a model that was found."""
    own = _shape(files, options)
    return ModelShape(
        height_px=own.size_px[0],
        width_px=own.size_px[1],
        latent_shape=own.latent_shape,
        text_tokens=own.text_tokens,
        embedding_numbers=own.text_tokens * own.text_dim + own.pooled_dim,
        width=own.width,
        num_blocks=own.num_blocks,
        transformer_params=own.transformer_params,
        norm_params=own.norm_params,
        vae_params=own.vae_params,
        text_params=own.text_params,
        lora_params_per_rank=own.lora_params_per_rank,
        forward_flops=own.forward_flops,
        decode_flops=own.decode_flops,
        decoder_width=own.decoder_width,
    )


def _shape(files: ModelFiles, options: PolicyOptions) -> FluxShape:
    configs = {part: dict(files.config(part)) for part in FLUX_1_DEV}
    text_tokens = checked_length(options.max_sequence_length, token_limit(files), files.name)
    size, grid = checked_size(options.resolution, configs["vae"])
    return _shape_of(_ConfigsKey(configs), size, grid, text_tokens, options.lora_targets)


class _ConfigsKey:
    """Hashable configurations, for the cache: counting a 12 B model takes seconds, and searches repeat it."""

    def __init__(self, configs: dict[str, dict[str, Any]]) -> None:
        self.configs, self.text = configs, repr(configs)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ConfigsKey) and self.text == other.text


@lru_cache(maxsize=32)
def _shape_of(
    key: _ConfigsKey,
    size: Size,
    grid: tuple[int, int],
    text_tokens: int,
    lora_targets: tuple[str, ...] | None,
) -> FluxShape:
    from diffusers import AutoencoderKL, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    configs = key.configs
    with torch.device("meta"):
        transformer = FluxTransformer2DModel.from_config(configs["transformer"])
        vae = AutoencoderKL.from_config(configs["vae"])
        clip = CLIPTextModel(CLIPTextConfig(**configs["text_encoder"]))
        t5 = T5EncoderModel(T5Config(**configs["text_encoder_2"]))
    config = transformer.config
    return FluxShape(
        size_px=size,
        latent_shape=(grid[0] * grid[1], int(config.in_channels)),
        text_tokens=text_tokens,
        text_dim=int(config.joint_attention_dim),
        pooled_dim=int(config.pooled_projection_dim),
        width=int(config.num_attention_heads * config.attention_head_dim),
        num_blocks=int(config.num_layers + config.num_single_layers),
        transformer_params=_parameters(transformer),
        norm_params=sum(p.numel() for name, p in transformer.named_parameters() if "norm" in name),
        vae_params=_parameters(vae),
        text_params=_parameters(clip) + _parameters(t5),
        lora_params_per_rank=sum(
            layer.in_features + layer.out_features for layer in lora_layers(FLUX, transformer, lora_targets)
        ),
        forward_flops=_forward_flops(transformer, grid[0] * grid[1], text_tokens),
        decode_flops=_decode_flops(vae, 2 * grid[0], 2 * grid[1]),
        decoder_width=int(vae.config.block_out_channels[0]),
    )


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@torch.no_grad()
def _forward_flops(transformer: Any, image_tokens: int, text_tokens: int) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    config = transformer.config
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        transformer(
            hidden_states=torch.empty(1, image_tokens, config.in_channels),
            encoder_hidden_states=torch.empty(1, text_tokens, config.joint_attention_dim),
            pooled_projections=torch.empty(1, config.pooled_projection_dim),
            timestep=torch.empty(1),
            img_ids=torch.empty(image_tokens, 3),
            txt_ids=torch.empty(text_tokens, 3),
            guidance=torch.empty(1) if config.guidance_embeds else None,
        )
    return counter.get_total_flops()


@torch.no_grad()
def _decode_flops(vae: Any, height: int, width: int) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        vae.decode(torch.empty(1, vae.config.latent_channels, height, width))
    return counter.get_total_flops()
