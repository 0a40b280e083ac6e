"""The work of `g2rpo gallery`: a figure as in papers, a row a prompt, a column a model, the same seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from g2rpo.evaluation.lineup import Drawing, Lineup
from g2rpo.evaluation.matching import read_pixels
from g2rpo.inference.images import _wrapped, to_pil
from g2rpo.runtime.interrupt import interruptible
from g2rpo.runtime.processes import barrier, end_processes, rank, resolve_device, start_processes

CELL_PX, LARGEST_CELL_PX = 176, 320
"""Smaller pictures are enlarged by whole pixels to the first, larger ones reduced to the second."""
_CAPTION_PX, _GAP_PX, _EDGE_PX = 190, 8, 16
_FONT_PX, _TITLE_PX = 15, 17
_INK, _PALE = "#1a1a1a", "#808080"


@dataclass(frozen=True)
class Shown:
    """What `gallery` did: the figure, the labels of its columns; interrupted: there is no figure yet."""

    file: Path
    labels: list[str]
    interrupted: bool


def gallery(
    models: Sequence[str],
    drawing: Drawing,
    *,
    labels: Sequence[str] | None = None,
    out: str | Path = "gallery",
    say: Callable[[str], None] = print,
) -> Shown:
    """Draws what is missing and writes OUT/gallery.png; the single pictures stay in OUT/<label>/<steps>/.

    Args:
        drawing: of one number of steps.

    Raises:
        ValueError: as `evaluate`.
    """
    if len(drawing.steps) != 1:
        raise ValueError(f"a gallery is drawn in one number of steps, got {len(drawing.steps)}")
    where = Path(out).expanduser()
    start_processes(resolve_device(drawing.device))
    try:
        speak: Callable[[str], Any] = say if rank() == 0 else len
        lineup = Lineup("gallery", models, drawing, where, labels=labels, say=speak)
        shown = Shown(where / "gallery.png", lineup.labels, False)
        with interruptible() as interrupt:
            try:
                for label in lineup.labels:
                    lineup.draw(label, interrupt)
            except KeyboardInterrupt:
                speak(f"interrupted; what is drawn is kept in {where}, the same command goes on")
                return Shown(shown.file, lineup.labels, True)
        barrier()
        if rank() == 0:
            write_sheet(lineup, drawing.steps[0], shown.file)
        barrier()
        return shown
    finally:
        end_processes()


def write_sheet(lineup: Lineup, steps: int, path: Path, rows: int | None = None) -> None:
    """The first `rows` prompts (None: all of them), the first picture of each, by every model."""
    drawing = lineup.drawing
    places = range(0, len(drawing.every), drawing.num_images)[:rows]
    pictures = [
        [read_pixels(lineup.file(label, steps, place)) for label in lineup.labels] for place in places
    ]
    captions = [drawing.every[place].text for place in places]
    notes = [f"seed {drawing.seeds[place]}" for place in places]
    sheet(pictures, captions, lineup.labels, notes).save(path)


def sheet(
    pictures: Sequence[Sequence[Tensor]],
    captions: Sequence[str],
    titles: Sequence[str],
    notes: Sequence[str] | None = None,
) -> Image.Image:
    """Rows of pictures with their caption to the left, and a title above each column.

    Args:
        pictures: rows of [3, H, W] in [0, 1], all of one shape.
        captions: one a row, cut where they are longer than the row is high.
        notes: one a row, in grey below the caption.

    Raises:
        ValueError: counts or shapes that do not fit.
    """
    shapes = {tuple(one.shape) for row in pictures for one in row}
    if len(shapes) != 1 or len(captions) != len(pictures) or any(len(r) != len(titles) for r in pictures):
        raise ValueError(
            f"a sheet needs a caption a row and a title a column, and pictures of one shape; got "
            f"{len(pictures)} rows, {len(captions)} captions, {len(titles)} titles, shapes {sorted(shapes)}"
        )
    _, height, width = shapes.pop()
    cell_width = min(width * max(1, -(-CELL_PX // width)), LARGEST_CELL_PX)
    cell_height = round(height * cell_width / width)
    exact = Image.Resampling.NEAREST if cell_width % width == 0 else Image.Resampling.LANCZOS
    small, large = ImageFont.load_default(_FONT_PX), ImageFont.load_default(_TITLE_PX)
    heads = [_wrapped(title, large, cell_width, 2) for title in titles]
    head_px = (_TITLE_PX + 4) * max(head.count("\n") + 1 for head in heads) + _GAP_PX
    left = _EDGE_PX + _CAPTION_PX + 2 * _GAP_PX
    size = (
        left + len(titles) * (cell_width + _GAP_PX) - _GAP_PX + _EDGE_PX,
        _EDGE_PX + head_px + len(pictures) * (cell_height + _GAP_PX) - _GAP_PX + _EDGE_PX,
    )
    page = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(page)
    line_px = _FONT_PX + 5
    lines = max(1, cell_height // line_px - (2 if notes else 0))
    for column, head in enumerate(heads):
        middle = left + column * (cell_width + _GAP_PX) + cell_width // 2
        draw.multiline_text(
            (middle, _EDGE_PX + head_px - _GAP_PX), head, _INK, large, anchor="md", align="center", spacing=4
        )
    for row, (images, caption) in enumerate(zip(pictures, captions, strict=True)):
        y = _EDGE_PX + head_px + row * (cell_height + _GAP_PX)
        text = _wrapped(caption, small, _CAPTION_PX, lines)
        block_px = line_px * (text.count("\n") + 1 + (1 if notes else 0))
        top = y + max(0, cell_height - block_px) // 2
        for n, line in enumerate(text.split("\n")):
            draw.text((_EDGE_PX, top + n * line_px), line, _INK, small)
        if notes:
            draw.text((_EDGE_PX, top + block_px - line_px), notes[row], _PALE, small)
        for column, image in enumerate(images):
            shown = to_pil(torch.as_tensor(image)).resize((cell_width, cell_height), exact)
            page.paste(shown, (left + column * (cell_width + _GAP_PX), y))
    return page
