"""Latents as tokens: 2x2 patches of the decoder's pixels, and the sizes of images that they allow."""

from __future__ import annotations

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
            f"{tokens} tokens of {channels} channels are not a packed latent of {rows} x {columns} tokens; "
            "give that number of tokens and a multiple of 4 channels"
        )
    x = x.reshape(n, rows, columns, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return x.reshape(n, channels // 4, 2 * rows, 2 * columns)


def grid_of(size: Size, patch_px: int) -> Size:
    """Returns the rows and columns of tokens of an image.

    Args:
        size: (height, width) of the image, in pixels.
        patch_px: side of a token, in pixels.

    Raises:
        ValueError: a side is not a positive multiple of a token's side.
    """
    if any(side < patch_px or side % patch_px for side in size):
        height, width = (max(patch_px, side // patch_px * patch_px) for side in size)
        raise ValueError(
            f"resolution={plain_resolution(size)}: sides must be multiples of {patch_px} pixels, as "
            f"resolution={plain_resolution((height, width))} would be"
        )
    return size[0] // patch_px, size[1] // patch_px
