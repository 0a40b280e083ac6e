"""Image files for people: PNGs that carry their prompt.

Images are tensors [N, 3, H, W] in [0, 1]; 8-bit values are round(255 x), which is also what rewards receive.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, PngImagePlugin
from torch import Tensor

from g2rpo.runtime.files import atomic_path


def to_pil(image: Tensor) -> Image.Image:
    """Converts an image [3, H, W] in [0, 1] to 8-bit RGB.

    Raises:
        ValueError: the shape is not [3, H, W].
    """
    if image.ndim != 3 or image.shape[0] != 3:
        raise ValueError(f"an image must have shape [3, H, W], got {tuple(image.shape)}")
    pixels = (image.detach().float().clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())


def from_pil(image: Image.Image) -> Tensor:
    """Converts an image to [3, H, W], float32 in [0, 1]: the inverse of `to_pil`.

    Transparent images are composited on white.
    """
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float() / 255


def save_png(image: Tensor, path: Path, prompt: str, info: Mapping[str, Any] | None = None) -> None:
    """Writes an image [3, H, W] as PNG, with its prompt and `info` (as JSON) in the file's text fields."""
    fields = PngImagePlugin.PngInfo()
    fields.add_itxt("prompt", prompt)
    fields.add_itxt("g2rpo", json.dumps(dict(info or {}), ensure_ascii=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        to_pil(image).save(temporary, pnginfo=fields)


def read_png_text(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Reads the prompt and info that `save_png` stored in a file; (None, {}) for other files."""
    with Image.open(path) as image:
        # Only PNGs have the attribute .text, which holds the text fields.
        fields: dict[str, str] = getattr(image, "text", {})
        return fields.get("prompt"), json.loads(fields.get("g2rpo", "{}"))
