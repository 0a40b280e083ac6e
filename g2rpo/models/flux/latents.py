"""FLUX's latents: 2x2-packed tokens of the VAE's channels, their position ids and the image sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from g2rpo.models.options import Size, plain_resolution


def pack(z: Tensor) -> Tensor:
    """Packs VAE latents [N, C, h, w] into tokens [N, h/2 * w/2, 4C], each a 2x2 patch, channels outermost."""
    n, channels, h, w = z.shape
    z = z.reshape(n, channels, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return z.reshape(n, h // 2 * (w // 2), channels * 4)


def unpack(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Inverts `pack`: [N, rows * columns, 4C] -> [N, C, 2 rows, 2 columns].

    Args:
        x: packed latents [N, L, 4C].
        grid: (rows, columns) of tokens.

    Raises:
        ValueError: L is not rows * columns, or the number of channels is not a multiple of 4.
    """
    n, tokens, channels = x.shape
    rows, columns = grid
    if rows * columns != tokens or channels % 4:
        raise ValueError(
            f"{tokens} tokens of {channels} channels are no packed latent of {rows} x {columns} tokens; give "
            "that number of tokens and a multiple of 4 channels"
        )
    x = x.reshape(n, rows, columns, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return x.reshape(n, channels // 4, 2 * rows, 2 * columns)


def image_ids(grid: tuple[int, int]) -> Tensor:
    """Returns the position ids of an image's tokens, (0, row, column): [rows * columns, 3], float32."""
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    return torch.stack([torch.zeros(grid), rows.float(), columns.float()], -1).reshape(-1, 3)


def checked_size(resolution: Size | None, vae_config: Any) -> tuple[Size, Size]:
    """Returns the image's size in pixels and in latent tokens, each as (height, width).

    Args:
        resolution: (height, width) of the image in pixels; None: the size that the VAE was trained for.
        vae_config: configuration of the AutoencoderKL.

    Raises:
        ValueError: a side is not a positive multiple of a token's side.
    """
    patch_px = 2 * 2 ** (len(vae_config["block_out_channels"]) - 1)
    side_px = int(vae_config["sample_size"])
    size = (side_px, side_px) if resolution is None else resolution
    if any(side < patch_px or side % patch_px for side in size):
        height, width = (max(patch_px, side // patch_px * patch_px) for side in size)
        raise ValueError(
            f"resolution={plain_resolution(size)}: sides must be multiples of {patch_px} pixels, as "
            f"resolution={plain_resolution((height, width))} would be"
        )
    return size, (size[0] // patch_px, size[1] // patch_px)
