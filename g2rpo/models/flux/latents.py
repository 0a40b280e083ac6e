"""FLUX's latents: 2x2-packed tokens of the VAE's channels, their position ids and the image sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def pack(z: Tensor) -> Tensor:
    """Packs VAE latents [N, C, h, w] into tokens [N, h/2 * w/2, 4C], each a 2x2 patch, channels outermost."""
    n, channels, h, w = z.shape
    z = z.reshape(n, channels, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return z.reshape(n, h // 2 * (w // 2), channels * 4)


def unpack(x: Tensor) -> Tensor:
    """Inverts `pack` for square images: [N, L, 4C] -> [N, C, 2 sqrt(L), 2 sqrt(L)].

    Raises:
        ValueError: L is not a square number, or the number of channels is not a multiple of 4.
    """
    n, tokens, channels = x.shape
    side = round(tokens**0.5)
    if side * side != tokens or channels % 4:
        raise ValueError(
            f"{tokens} tokens of {channels} channels are no packed square latent; give a square number of "
            "tokens and a multiple of 4 channels"
        )
    x = x.reshape(n, side, side, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return x.reshape(n, channels // 4, 2 * side, 2 * side)


def image_ids(side: int) -> Tensor:
    """Returns the position ids of an image's tokens, (0, row, column): [side * side, 3], float32."""
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return torch.stack([torch.zeros(side, side), rows.float(), columns.float()], -1).reshape(-1, 3)


def checked_resolution(resolution: int | None, vae_config: Any) -> tuple[int, int]:
    """Returns the sides of the image and of one latent token, both in pixels.

    Args:
        resolution: side of the square image in pixels; None: the size that the VAE was trained for.
        vae_config: configuration of the AutoencoderKL.

    Raises:
        ValueError: the resolution is not a positive multiple of a token's side.
    """
    patch_px = 2 * 2 ** (len(vae_config["block_out_channels"]) - 1)
    side_px = int(vae_config["sample_size"]) if resolution is None else resolution
    if side_px < patch_px or side_px % patch_px:
        nearest = max(patch_px, side_px // patch_px * patch_px)
        raise ValueError(f"resolution={side_px} is no multiple of {patch_px} pixels; {nearest} would be")
    return side_px, patch_px
