"""Qwen-Image's latents: their scale and the image sizes (tokens: models/transformer/latents.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from g2rpo.models.options import Size
from g2rpo.models.transformer.latents import grid_of

DEFAULT_LATENT_SIDE = 128
"""Sides of the latents of an image whose resolution is not set, as in QwenImagePipeline: 1024 px."""


def unscaled(z: Tensor, vae_config: Mapping[str, Any]) -> Tensor:
    """Returns latents [N, C, h, w] in the VAE's own scale: z std + mean, per channel."""
    mean, std = (z.new_tensor(vae_config[key])[:, None, None] for key in ("latents_mean", "latents_std"))
    return z * std + mean


def checked_size(resolution: Size | None, vae_config: Mapping[str, Any]) -> tuple[Size, Size]:
    """Returns the image's size in pixels and in latent tokens, each as (height, width).

    Args:
        resolution: (height, width) of the image in pixels; None: 1024 x 1024 for the published VAE.
        vae_config: configuration of the AutoencoderKLQwenImage.

    Raises:
        ValueError: a side is not a positive multiple of a token's side.
    """
    latent_px = 2 ** len(vae_config["temperal_downsample"])
    patch_px, side_px = 2 * latent_px, DEFAULT_LATENT_SIDE * latent_px
    size = (side_px, side_px) if resolution is None else resolution
    return size, grid_of(size, patch_px)
