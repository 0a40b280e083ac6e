"""What the parts of the page that we draw ourselves share: their style sheet, and images as data URIs."""

from __future__ import annotations

import base64
import io
from importlib.resources import files

from PIL import Image
from torch import Tensor

from g2rpo.runtime.style import DARK, LIGHT, SYSTEM_FONTS

LOSSLESS_PX = 128
"""Images up to this size are shown pixel by pixel; larger ones are compressed."""


def style_sheet() -> str:
    """Returns a <style> element for `.g2rpo-view`, in light and in the page's dark mode."""
    colours = "".join(
        f".g2rpo-view .line.c{i} {{ stroke: var(--s{i}); }}\n"
        f".g2rpo-view :is(.band, circle).c{i} {{ fill: var(--s{i}); }}\n"
        f".g2rpo-view i.c{i} {{ background: var(--s{i}); }}\n"
        for i in range(len(LIGHT.series))
    )
    rules = (files("g2rpo.web") / "view.css").read_text(encoding="utf-8")
    return (
        f"<style>.g2rpo-view {{ {LIGHT.css()} font-family: {SYSTEM_FONTS}; }}\n"
        f".dark .g2rpo-view {{ {DARK.css()} }}\n{colours}{rules}</style>"
    )


def image_uri(pixels: Tensor, edge: int = 256) -> str:
    """Returns an image as a data URI.

    Args:
        pixels: [3, H, W], uint8.
        edge: longest side in pixels.
    """
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    small = max(image.size) <= LOSSLESS_PX
    image.thumbnail((edge, edge), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", lossless=small, quality=82, method=4)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
