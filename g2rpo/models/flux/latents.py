"""FLUX's latents: position ids of their tokens (models/transformer/latents.py) and the image sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from g2rpo.models.options import Size
from g2rpo.models.transformer.latents import grid_of


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
    return size, grid_of(size, patch_px)
