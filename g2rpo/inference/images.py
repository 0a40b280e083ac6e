"""Image files for people: PNGs that carry their prompt, and grids with captions.

Images are tensors [N, 3, H, W] in [0, 1]; 8-bit values are round(255 x), which is also what rewards receive.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin
from torch import Tensor

from g2rpo.runtime.files import atomic_path

_MIN_CELL_PX = 144
_MARGIN_PX, _FONT_PX, _LINES = 6, 13, 3


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


def grid(
    images: Tensor,
    captions: Sequence[str],
    columns: int,
    *,
    titles: Sequence[str] | None = None,
    cell_px: int | None = None,
) -> Image.Image:
    """Arranges images row by row, each with its caption below and, with `titles`, a title above each column.

    Args:
        images: [N, 3, H, W] in [0, 1]; small images are enlarged by an integer factor so that captions fit.
        captions: N texts, truncated to three lines (each image's own PNG holds the full prompt).
        columns: number of images per row.
        titles: one per column.
        cell_px: width of a cell in pixels; None: the image's width, but at least 144.

    Raises:
        ValueError: the numbers of images, captions, columns and titles do not match.
    """
    if len(images) == 0 or len(captions) != len(images) or columns < 1:
        raise ValueError(
            f"a grid needs at least one image, one caption each and columns >= 1, got {len(images)} images, "
            f"{len(captions)} captions and {columns=}"
        )
    if titles is not None and len(titles) != columns:
        raise ValueError(f"{len(titles)} titles for {columns} columns; give one title per column")
    height, width = images.shape[-2:]
    scale = max(1, -(-(cell_px or _MIN_CELL_PX) // width))
    cell = (cell_px, round(height * cell_px / width)) if cell_px else (width * scale, height * scale)
    resample = Image.Resampling.NEAREST if cell[0] % width == 0 else Image.Resampling.LANCZOS
    font = ImageFont.load_default(_FONT_PX)
    texts = [wrapped(caption, font, cell[0]) for caption in captions]
    line_px = _FONT_PX + 3
    caption_px = line_px * max(text.count("\n") + 1 for text in texts)
    head_px = line_px + _MARGIN_PX if titles else 0
    rows = -(-len(images) // columns)
    step_x, step_y = cell[0] + _MARGIN_PX, cell[1] + caption_px + 2 * _MARGIN_PX
    sheet = Image.new("RGB", (columns * step_x + _MARGIN_PX, head_px + rows * step_y + _MARGIN_PX), "white")
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(titles or ()):
        line = wrapped(title, font, cell[0]).split("\n")[0]
        draw.text((_MARGIN_PX + column * step_x, _MARGIN_PX), line, "black", font)
    for i, (image, text) in enumerate(zip(images, texts, strict=True)):
        x, y = _MARGIN_PX + i % columns * step_x, _MARGIN_PX + head_px + i // columns * step_y
        sheet.paste(to_pil(image).resize(cell, resample), (x, y))
        draw.multiline_text((x, y + cell[1] + 2), text, "black", font, spacing=3)
    return sheet


def comparison(
    before: Tensor, after: Tensor, captions: Sequence[str], titles: tuple[str, str]
) -> Image.Image:
    """Arranges pairs of images with the same prompt and seed, one pair per row.

    Args:
        before, after: [N, 3, H, W] in [0, 1].
        captions: one per pair.
        titles: of the two columns.

    Raises:
        ValueError: `before` and `after` differ in shape.
    """
    if before.shape != after.shape:
        raise ValueError(f"pairs need equal shapes, got {tuple(before.shape)} and {tuple(after.shape)}")
    pairs = torch.stack([before, after], dim=1).flatten(0, 1)
    doubled = [text for caption in captions for text in (caption, "")]
    return grid(pairs, doubled, 2, titles=titles)


def wrapped(text: str, font: Any, width_px: int, max_lines: int = _LINES) -> str:
    """Breaks text into at most `max_lines` lines of `width_px`, between words where possible.

    Truncated text ends with an ellipsis.
    """
    lines = [""]
    for word in " ".join(text.split()).split(" "):
        candidate = f"{lines[-1]} {word}".strip()
        if font.getlength(candidate) <= width_px:
            lines[-1] = candidate
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if lines[-1] and font.getlength(lines[-1] + letter) > width_px:
                lines.append("")
            lines[-1] += letter
        if len(lines) > max_lines:
            break
    if len(lines) > max_lines:
        last = lines[max_lines - 1]
        while last and font.getlength(f"{last}…") > width_px:
            last = last[:-1]
        lines = [*lines[: max_lines - 1], f"{last}…"]
    return "\n".join(lines)
