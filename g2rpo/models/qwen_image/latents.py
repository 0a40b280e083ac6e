"""Qwen-Image's latents: 2x2-packed tokens of the VAE's channels, their scale and the image sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from g2rpo.models.options import Size, plain_resolution

DEFAULT_LATENT_SIDE = 128
"""Sides of the latents of an image whose resolution is not set, as in QwenImagePipeline: 1024 px."""


def pack(z: Tensor) -> Tensor:
    """Packs VAE latents [N, C, h, w] into tokens [N, h/2 * w/2, 4C], each a 2x2 patch, channels outermost."""
    n, channels, h, w = z.shape
    z = z.reshape(n, channels, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return z.reshape(n, h // 2 * (w // 2), channels * 4)


def unpack(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Inverts `pack` for a grid of (rows, columns): [N, rows * columns, 4C] -> [N, C, 2 rows, 2 columns]."""
    (n, _, channels), (rows, columns) = x.shape, grid
    x = x.reshape(n, rows, columns, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return x.reshape(n, channels // 4, 2 * rows, 2 * columns)


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
    if any(side < patch_px or side % patch_px for side in size):
        height, width = (max(patch_px, side // patch_px * patch_px) for side in size)
        raise ValueError(
            f"resolution={plain_resolution(size)}: sides must be multiples of {patch_px} pixels, as "
            f"resolution={plain_resolution((height, width))} would be"
        )
    return size, (size[0] // patch_px, size[1] // patch_px)
