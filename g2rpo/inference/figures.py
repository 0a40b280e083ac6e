"""Figures made of images: grids and pairs, with a heading, and prompt and seed under each image.

All are white, so that they can be read on light and dark pages, and laid out for a page that shows them about
880 pixels wide, as a README does: three pairs or four images are twice as wide, with letters of that size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from g2rpo.inference.images import to_pil
from g2rpo.runtime.fonts import Lettering
from g2rpo.runtime.style import LIGHT

IMAGE_PX, PAIRED_PX = 400, 272
"""Largest width of an image that stands alone, and of one of a pair."""
FONT_PX, NOTE_PX, HEADING_PX = 23, 20, 26
CAPTION_LINES, HEADING_LINES = 3, 5
_EDGE_PX, _COLUMN_GAP_PX, _ROW_GAP_PX, _IMAGE_GAP_PX, _TEXT_GAP_PX = 20, 28, 20, 6, 6


@dataclass(frozen=True)
class Tile:
    """One image, or several side by side, with what is written about them.

    Attributes:
        images: each [3, H, W] in [0, 1]; all images of a figure have one shape.
        caption: below, truncated to `CAPTION_LINES` lines (each image's own PNG holds the full prompt).
        note: in grey below the caption, one line.
        labels: one above each image, one line; empty: none.
    """

    images: tuple[Tensor, ...]
    caption: str
    note: str = ""
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """Tiles under a common title, which may be empty."""

    title: str
    tiles: Sequence[Tile]


def grid(
    images: Tensor,
    captions: Sequence[str],
    columns: int,
    *,
    heading: str = "",
    notes: Sequence[str] | None = None,
) -> Image.Image:
    """Arranges images row by row, each with its caption and note below.

    Args:
        images: [N, 3, H, W] in [0, 1]; small images are enlarged by an integer factor, large ones reduced.
        captions: N texts.
        columns: number of images per row.
        heading: what all images have in common: model, iteration, denoising steps.
        notes: N texts, such as seeds; None: none.

    Raises:
        ValueError: the numbers of images, captions, notes and columns do not match.
    """
    if len(images) == 0 or len(captions) != len(images) or columns < 1:
        raise ValueError(
            f"a grid needs at least one image, one caption each and columns >= 1, got {len(images)} images, "
            f"{len(captions)} captions and {columns=}"
        )
    if notes is not None and len(notes) != len(images):
        raise ValueError(f"{len(notes)} notes for {len(images)} images; give one per image")
    tiles = [
        Tile((image,), caption, note)
        for image, caption, note in zip(images, captions, notes or [""] * len(images), strict=True)
    ]
    return tiled([Section("", tiles)], columns, heading)


def pair_columns(height: int, width: int) -> int:
    """Number of pairs per row that makes a wide figure of images of this shape: 4 tall, 3 square, 2 wide."""
    return 4 if width < 0.7 * height else 3 if width < 1.4 * height else 2


def pairs(
    before: Tensor,
    after: Tensor,
    captions: Sequence[str],
    labels: tuple[str, str],
    *,
    notes: Sequence[str] | None = None,
) -> list[Tile]:
    """Makes tiles of two images with the same prompt and seed.

    Args:
        before, after: [N, 3, H, W] in [0, 1].
        captions: one per pair.
        labels: above the two images.
        notes: one per pair; None: none.

    Raises:
        ValueError: `before` and `after` differ in shape, or the numbers of captions and notes do not match.
    """
    if before.shape != after.shape:
        raise ValueError(f"pairs need equal shapes, got {tuple(before.shape)} and {tuple(after.shape)}")
    texts = notes or [""] * len(before)
    if len(captions) != len(before) or len(texts) != len(before):
        raise ValueError(f"{len(captions)} captions and {len(texts)} notes for {len(before)} pairs")
    return [
        Tile((old, new), caption, note, labels)
        for old, new, caption, note in zip(before, after, captions, texts, strict=True)
    ]


def tiled(sections: Sequence[Section], columns: int, heading: str = "") -> Image.Image:
    """Arranges tiles row by row, section by section, below a heading.

    Args:
        columns: tiles per row, or fewer if no section has so many.
        heading: truncated to `HEADING_LINES` lines.

    Raises:
        ValueError: no tile, or images of several shapes.
    """
    tiles = [tile for section in sections for tile in section.tiles]
    shapes = {tuple(image.shape) for tile in tiles for image in tile.images}
    if len(shapes) != 1:
        raise ValueError(f"a figure needs images, and all of one shape; got {sorted(shapes)}")
    columns = min(columns, max(len(section.tiles) for section in sections))
    layout = _Layout.of(tiles[0], shapes.pop())
    width = 2 * _EDGE_PX + columns * layout.width + (columns - 1) * _COLUMN_GAP_PX
    page = _Page(width, layout)
    page.write(heading, Lettering(HEADING_PX, bold=True), LIGHT.text, HEADING_LINES)
    for section in sections:
        page.write(section.title, Lettering(FONT_PX, bold=True), LIGHT.text, 2)
        for low in range(0, len(section.tiles), columns):
            page.row(section.tiles[low : low + columns])
    return page.finished()


@dataclass(frozen=True)
class _Layout:
    """Size of a tile: `width` of the tile, `cell` (width, height) of each of its images."""

    width: int
    cell: tuple[int, int]
    resample: Image.Resampling

    @staticmethod
    def of(tile: Tile, shape: tuple[int, ...]) -> _Layout:
        _, height, width = shape
        largest = IMAGE_PX if len(tile.images) == 1 else PAIRED_PX
        cell_width = width * (largest // width) if width <= largest else largest
        resample = Image.Resampling.NEAREST if cell_width % width == 0 else Image.Resampling.LANCZOS
        cell = (cell_width, max(1, round(height * cell_width / width)))
        return _Layout(len(tile.images) * (cell_width + _IMAGE_GAP_PX) - _IMAGE_GAP_PX, cell, resample)


class _Page:
    """A figure that grows downwards: what is drawn is kept until its height is known."""

    def __init__(self, width: int, layout: _Layout) -> None:
        self.width, self.layout, self.y = width, layout, _EDGE_PX
        self.caption, self.note = Lettering(FONT_PX), Lettering(NOTE_PX)
        self.texts: list[tuple[tuple[int, int], str, Lettering, str]] = []
        self.images: list[tuple[tuple[int, int], Tensor]] = []

    def write(self, text: str, lettering: Lettering, colour: str, max_lines: int) -> None:
        """A paragraph over the whole width; nothing if it is empty."""
        if text:
            lines = lettering.wrapped(text, self.width - 2 * _EDGE_PX, max_lines)
            self.texts.append(((_EDGE_PX, self.y), lines, lettering, colour))
            self.y += lettering.line_px * (lines.count("\n") + 1) + 2 * _TEXT_GAP_PX

    def row(self, tiles: Sequence[Tile]) -> None:
        """Tiles side by side, whose images begin at one height."""
        labels = any(tile.labels for tile in tiles)
        top = self.y + (self.note.line_px + _TEXT_GAP_PX if labels else 0)
        bottom = top
        for column, tile in enumerate(tiles):
            x = _EDGE_PX + column * (self.layout.width + _COLUMN_GAP_PX)
            for number, image in enumerate(tile.images):
                left = x + number * (self.layout.cell[0] + _IMAGE_GAP_PX)
                self.images.append(((left, top), image))
                if tile.labels:
                    label = self.note.wrapped(tile.labels[number], self.layout.cell[0], 1)
                    self.texts.append(((left, self.y), label, self.note, LIGHT.quiet))
            bottom = max(bottom, self._below(x, top + self.layout.cell[1] + _TEXT_GAP_PX, tile))
        self.y = bottom + _ROW_GAP_PX

    def _below(self, x: int, y: int, tile: Tile) -> int:
        """Caption and note of a tile; returns where they end."""
        for text, lettering, colour, max_lines in (
            (tile.caption, self.caption, LIGHT.text, CAPTION_LINES),
            (tile.note, self.note, LIGHT.quiet, 1),
        ):
            if text:
                lines = lettering.wrapped(text, self.layout.width, max_lines)
                self.texts.append(((x, y), lines, lettering, colour))
                y += lettering.line_px * (lines.count("\n") + 1)
        return y

    def finished(self) -> Image.Image:
        page = Image.new("RGB", (self.width, self.y - _ROW_GAP_PX + _EDGE_PX), LIGHT.background)
        draw = ImageDraw.Draw(page)
        for place, image in self.images:
            resized = to_pil(torch.as_tensor(image)).resize(self.layout.cell, self.layout.resample)
            page.paste(resized, place)
        for place, text, lettering, colour in self.texts:
            lettering.draw(draw, place, text, colour)
        return page
