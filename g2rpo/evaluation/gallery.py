"""The work of `g2rpo gallery`: a figure as in papers, one row per prompt and one column per model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from g2rpo.evaluation.image_files import read_pixels
from g2rpo.evaluation.lineup import Lineup
from g2rpo.inference.images import to_pil
from g2rpo.inference.sample import SampleRequest
from g2rpo.runtime.files import atomic_path
from g2rpo.runtime.fonts import Lettering
from g2rpo.runtime.interrupt import interruptible
from g2rpo.runtime.processes import barrier, end_processes, rank, resolve_device, start_processes
from g2rpo.runtime.style import LIGHT

CELL_PX, LARGEST_CELL_PX = 176, 320
"""Cell widths in pixels: small images are enlarged to the first by an integer factor, large ones reduced to
the second."""
_CAPTION_PX, _GAP_PX, _EDGE_PX = 190, 8, 16
_FONT_PX, _PAGE_PX = 15, 880
"""Smallest size of the letters, which have about 13 pixels where a figure is shown `_PAGE_PX` wide."""


@dataclass(frozen=True)
class GalleryResult:
    """Result of `gallery`.

    Attributes:
        file: the figure; where `interrupted`, it is not written yet.
        labels: titles of the columns.
        interrupted: a signal ended the call.
    """

    file: Path
    labels: list[str]
    interrupted: bool


def gallery(
    models: Sequence[str],
    request: SampleRequest,
    *,
    labels: Sequence[str] | None = None,
    out: str | Path = "gallery",
    say: Callable[[str], None] = print,
) -> GalleryResult:
    """Samples the missing images and writes OUT/gallery.png; the images stay in OUT/<label>/<steps>/.

    Args:
        models: whatever `open_policy` opens, one column each.
        request: with one number of steps.
        labels: titles of the columns; None: from `models`.

    Raises:
        ValueError: as `evaluate`.
    """
    num_steps = request.num_steps
    folder = Path(out).expanduser()
    start_processes(resolve_device(request.device))
    try:
        speak: Callable[[str], Any] = say if rank() == 0 else len
        lineup = Lineup("gallery", models, request, folder, labels=labels, say=speak)
        result = GalleryResult(folder / "gallery.png", lineup.labels, False)
        with interruptible() as interrupt:
            try:
                for label in lineup.labels:
                    lineup.sample(label, interrupt)
            except KeyboardInterrupt:
                speak(f"interrupted; finished images are kept in {folder}; run the same command to continue")
                return GalleryResult(result.file, lineup.labels, True)
        barrier()
        if rank() == 0:
            write_sheet(lineup, num_steps, result.file)
        barrier()
        return result
    finally:
        end_processes()


def write_sheet(lineup: Lineup, steps: int, path: Path, rows: int | None = None) -> None:
    """Writes the first image of each prompt by every model, for the first `rows` prompts (None: all)."""
    texts, seeds = lineup.request.texts, lineup.request.seeds
    indices = range(0, len(texts), lineup.request.num_images)[:rows]
    images = [[read_pixels(lineup.file(label, steps, i)) for label in lineup.labels] for i in indices]
    captions = [texts[i] for i in indices]
    notes = [f"seed {seeds[i]}" for i in indices]
    heading = f"{steps} denoising steps; images of a row have the same prompt and seed"
    with atomic_path(path) as temporary:
        sheet(images, captions, lineup.labels, notes, heading).save(temporary)


def sheet(
    images: Sequence[Sequence[Tensor]],
    captions: Sequence[str],
    titles: Sequence[str],
    notes: Sequence[str] | None = None,
    heading: str = "",
) -> Image.Image:
    """Arranges rows of images, each with its caption to the left, under a title for each column.

    Args:
        images: rows of images [3, H, W] in [0, 1], all of one shape.
        captions: one per row, truncated to the height of the row.
        titles: one per column, such as the names of models.
        notes: one per row, in grey below the caption.
        heading: what all images have in common.

    Raises:
        ValueError: the numbers of images, captions and titles do not match, or the images' shapes differ.
    """
    shapes = {tuple(image.shape) for row in images for image in row}
    if len(shapes) != 1 or len(captions) != len(images) or any(len(row) != len(titles) for row in images):
        raise ValueError(
            f"a sheet needs one caption per row, one title per column, and images of one shape; got "
            f"{len(images)} rows, {len(captions)} captions, {len(titles)} titles, shapes {sorted(shapes)}"
        )
    _, height, width = shapes.pop()
    cell_width = min(width * max(1, -(-CELL_PX // width)), LARGEST_CELL_PX)
    cell_height = round(height * cell_width / width)
    resample = Image.Resampling.NEAREST if cell_width % width == 0 else Image.Resampling.LANCZOS
    caption_px = max(_CAPTION_PX, cell_width if len(titles) > 2 else 0)
    left = _EDGE_PX + caption_px + 2 * _GAP_PX
    page_width = left + len(titles) * (cell_width + _GAP_PX) - _GAP_PX + _EDGE_PX
    font_px = max(_FONT_PX, round(13 * page_width / _PAGE_PX))
    small, large = Lettering(font_px), Lettering(font_px + 1, bold=True)
    summary = small.wrapped(heading, page_width - 2 * _EDGE_PX, 3) if heading else ""
    heads = [large.wrapped(title, cell_width, 2) for title in titles]
    summary_px = small.line_px * (summary.count("\n") + 1) + _GAP_PX if summary else 0
    head_px = large.line_px * max(head.count("\n") + 1 for head in heads) + _GAP_PX
    top = _EDGE_PX + summary_px + head_px
    page_height = top + len(images) * (cell_height + _GAP_PX) - _GAP_PX + _EDGE_PX
    page = Image.new("RGB", (page_width, page_height), LIGHT.background)
    draw = ImageDraw.Draw(page)
    small.draw(draw, (_EDGE_PX, _EDGE_PX), summary, LIGHT.quiet)
    for column, head in enumerate(heads):
        for n, line in enumerate(reversed(head.split("\n"))):  # the last line stands right above the images
            x = left + column * (cell_width + _GAP_PX) + (cell_width - large.getlength(line)) / 2
            large.draw(draw, (x, top - _GAP_PX - (n + 1) * large.line_px), line, LIGHT.text)
    lines = max(1, cell_height // small.line_px - (1 if notes else 0))
    for row, (row_images, caption) in enumerate(zip(images, captions, strict=True)):
        y = top + row * (cell_height + _GAP_PX)
        text = small.wrapped(caption, caption_px, lines)
        block_px = small.line_px * (text.count("\n") + 1 + (1 if notes else 0))
        text_top = y + max(0, cell_height - block_px) // 2
        small.draw(draw, (_EDGE_PX, text_top), text, LIGHT.text)
        if notes:
            small.draw(draw, (_EDGE_PX, text_top + block_px - small.line_px), notes[row], LIGHT.quiet)
        for column, image in enumerate(row_images):
            resized = to_pil(torch.as_tensor(image)).resize((cell_width, cell_height), resample)
            page.paste(resized, (left + column * (cell_width + _GAP_PX), y))
    return page
