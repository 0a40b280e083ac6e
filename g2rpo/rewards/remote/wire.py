"""Encoding of images for JSON."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch
from torch import Tensor


def eight_bits(images: Tensor) -> Tensor:
    """Rounds images [N, 3, H, W] in [0, 1] to [N, H, W, 3], uint8, on the CPU."""
    return (255 * images.detach()).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu()


def base64_image(pixels: Tensor, kind: str = "png") -> str:
    """Encodes one image [H, W, 3], uint8, as the base64 of a PNG, or of a JPEG of quality 95."""
    from PIL import Image

    file = io.BytesIO()
    # Level 1 is several times as fast as the default, and the files are only slightly larger.
    options: dict[str, Any] = {"quality": 95} if kind == "jpeg" else {"compress_level": 1}
    Image.fromarray(pixels.contiguous().numpy()).save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()
