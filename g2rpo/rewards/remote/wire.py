"""Pictures as JSON carries them."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch
from torch import Tensor


def eight_bits(images: Tensor) -> Tensor:
    """[N, 3, H, W] in [0, 1] -> [N, H, W, 3] uint8 on the CPU, rounded."""
    return (255 * images.detach()).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu()


def encoded(pixels: Tensor, kind: str = "png") -> str:
    """Base64 of a PNG, or of a JPEG of quality 95. pixels: [H, W, 3] uint8."""
    from PIL import Image

    file = io.BytesIO()
    # Level 1 is several times as fast as the default, for files that are a little larger.
    options: dict[str, Any] = {"quality": 95} if kind == "jpeg" else {"compress_level": 1}
    Image.fromarray(pixels.contiguous().numpy()).save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()
