"""FLUX's latents: 2x2-packed tokens of the VAE's channels, their position ids, and the sizes that work."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def pack(z: Tensor) -> Tensor:
    """VAE latents [N, C, h, w] -> tokens [N, h/2 * w/2, 4C], each a 2x2 patch, channels outermost."""
    n, channels, h, w = z.shape
    z = z.reshape(n, channels, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return z.reshape(n, h // 2 * (w // 2), channels * 4)


def unpack(x: Tensor) -> Tensor:
    """The inverse of `pack` for square images: [N, L, 4C] -> [N, C, 2 sqrt(L), 2 sqrt(L)]."""
    n, tokens, channels = x.shape
    side = round(tokens**0.5)
    if side * side != tokens or channels % 4:
        raise ValueError(f"{tokens} tokens of {channels} channels are no packed square latent")
    x = x.reshape(n, side, side, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return x.reshape(n, channels // 4, 2 * side, 2 * side)


def image_ids(side: int) -> Tensor:
    """Position ids [side * side, 3]: (0, row, column) of each token."""
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return torch.stack([torch.zeros(side, side), rows.float(), columns.float()], -1).reshape(-1, 3)


def checked_resolution(resolution: int | None, vae_config: Any) -> tuple[int, int]:
    """The image's side and that of one latent token, both in pixels."""
    patch_px = 2 * 2 ** (len(vae_config["block_out_channels"]) - 1)
    side_px = int(vae_config["sample_size"]) if resolution is None else resolution
    if side_px < patch_px or side_px % patch_px:
        near = max(patch_px, side_px // patch_px * patch_px)
        raise ValueError(f"resolution={side_px} is no multiple of {patch_px} pixels; {near} would be")
    return side_px, patch_px
