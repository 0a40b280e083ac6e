"""Pictures a person looks at: PNGs that know their prompt, grids with captions, curves.

Images are tensors [N, 3, H, W] in [0, 1]; 8-bit values are round(255 x), which is also what rewards see.
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

_MIN_CELL_PX = 144
_MARGIN_PX, _FONT_PX, _LINES = 6, 13, 3


def to_pil(image: Tensor) -> Image.Image:
    """One image [3, H, W] in [0, 1] as 8-bit RGB.

    Raises:
        ValueError: another shape.
    """
    if image.ndim != 3 or image.shape[0] != 3:
        raise ValueError(f"an image is [3, H, W], got {tuple(image.shape)}")
    pixels = (image.detach().float().clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())


def from_pil(image: Image.Image) -> Tensor:
    """The inverse of `to_pil`: [3, H, W], float32 in [0, 1]; transparency lies on white."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float() / 255


def save_png(image: Tensor, path: Path, prompt: str, info: Mapping[str, Any] | None = None) -> None:
    """Writes one image with its prompt, and `info` as JSON, into the file's text fields."""
    fields = PngImagePlugin.PngInfo()
    fields.add_itxt("prompt", prompt)
    fields.add_itxt("g2rpo", json.dumps(dict(info or {}), ensure_ascii=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    to_pil(image).save(path, pnginfo=fields)


def read_png_text(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Prompt and info that `save_png` left in a file; (None, {}) for other files."""
    with Image.open(path) as image:
        # Text fields stand in .text of a PNG; other formats have none.
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
    """Images row by row, each with its caption below and, with `titles`, a heading over each column.

    Args:
        images: [N, 3, H, W] in [0, 1]; small ones are enlarged by whole pixels so that captions fit.
        captions: N; cut to three lines (the whole prompt is in the PNG of each image).
        columns: images in a row.
        titles: one a column.
        cell_px: width of a cell; None: the image's, at least 144.

    Raises:
        ValueError: counts that do not fit.
    """
    if len(images) == 0 or len(captions) != len(images) or columns < 1:
        raise ValueError(f"a grid needs images with one caption each, got {len(images)} and {len(captions)}")
    if titles is not None and len(titles) != columns:
        raise ValueError(f"{len(titles)} titles for {columns} columns; give one a column")
    height, width = images.shape[-2:]
    scale = max(1, -(-(cell_px or _MIN_CELL_PX) // width))
    cell = (cell_px, round(height * cell_px / width)) if cell_px else (width * scale, height * scale)
    resample = Image.Resampling.NEAREST if cell[0] % width == 0 else Image.Resampling.LANCZOS
    font = ImageFont.load_default(_FONT_PX)
    texts = [_wrapped(caption, font, cell[0]) for caption in captions]
    line_px = _FONT_PX + 3
    caption_px = line_px * max(text.count("\n") + 1 for text in texts)
    head_px = line_px + _MARGIN_PX if titles else 0
    rows = -(-len(images) // columns)
    step_x, step_y = cell[0] + _MARGIN_PX, cell[1] + caption_px + 2 * _MARGIN_PX
    sheet = Image.new("RGB", (columns * step_x + _MARGIN_PX, head_px + rows * step_y + _MARGIN_PX), "white")
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(titles or ()):
        line = _wrapped(title, font, cell[0]).split("\n")[0]
        draw.text((_MARGIN_PX + column * step_x, _MARGIN_PX), line, "black", font)
    for i, (image, text) in enumerate(zip(images, texts, strict=True)):
        x, y = _MARGIN_PX + i % columns * step_x, _MARGIN_PX + head_px + i // columns * step_y
        sheet.paste(to_pil(image).resize(cell, resample), (x, y))
        draw.multiline_text((x, y + cell[1] + 2), text, "black", font, spacing=3)
    return sheet


def comparison(
    before: Tensor, after: Tensor, captions: Sequence[str], titles: tuple[str, str]
) -> Image.Image:
    """Pairs side by side, a row each: the same prompt and seed before and after."""
    if before.shape != after.shape:
        raise ValueError(f"pairs need equal shapes, got {tuple(before.shape)} and {tuple(after.shape)}")
    pairs = torch.stack([before, after], dim=1).flatten(0, 1)
    doubled = [text for caption in captions for text in (caption, "")]
    return grid(pairs, doubled, 2, titles=titles)


def save_curves(
    curves: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    path: Path,
    *,
    x_label: str = "iteration",
) -> None:
    """One panel a key, in it one line a name: {panel: {line: (x, y)}}, as PNG or SVG by the path's ending.

    Points whose y is not finite are left out of the line.
    """
    # Not pyplot: it keeps global state and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not curves:
        raise ValueError("no curves to draw; give at least one panel")
    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for i, (panel, lines) in enumerate(curves.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        for name, (x, y) in lines.items():
            values = np.asarray(y, dtype=float)
            kept = np.isfinite(values)
            axes.plot(np.asarray(x, dtype=float)[kept], values[kept], marker=".", markersize=3, label=name)
        axes.set_title(panel, fontsize=10)
        axes.set_xlabel(x_label, fontsize=8)
        axes.grid(alpha=0.3)
        if len(lines) > 1:
            axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _wrapped(text: str, font: Any, width_px: int, most: int = _LINES) -> str:
    """Broken between words where it can be, within a word where it must, to at most `most` lines."""
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
        if len(lines) > most:
            break
    if len(lines) > most:
        last = lines[most - 1]
        while last and font.getlength(f"{last}…") > width_px:
            last = last[:-1]
        lines = [*lines[: most - 1], f"{last}…"]
    return "\n".join(lines)
