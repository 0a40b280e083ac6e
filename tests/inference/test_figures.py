"""Figures of images: exact pixels in their places, wide pairs, captions that stay inside."""

import numpy as np
import pytest
import torch
from PIL import Image

from g2rpo.evaluation.before_after import OWN, UNSEEN, write_before_after
from g2rpo.evaluation.monitor import ImageSet
from g2rpo.inference.figures import (
    FONT_PX,
    IMAGE_PX,
    PAIRED_PX,
    Section,
    Tile,
    grid,
    pair_columns,
    pairs,
    tiled,
)
from g2rpo.inference.images import from_pil, to_pil
from g2rpo.runtime.fonts import Lettering

LONG = "a very long prompt about two red circles above a blue star on a yellow background, " * 20
EDGE, README_PX = 20, 880


def rows_with_ink(page):
    """Row -> whether something other than white is in it."""
    return (np.array(page.convert("L")) < 250).any(1)


def test_a_grid_shows_each_image_unchanged():
    images = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    sheet = np.array(grid(images, ["one", LONG, ""], 2))
    # 64 px images are enlarged by 6, the most that fits in 400 px: every sixth pixel is the image's.
    for i, x in enumerate((EDGE, EDGE + 384 + 28)):
        cell = sheet[EDGE : EDGE + 384 : 6, x : x + 384 : 6]
        assert np.array_equal(cell, np.array(to_pil(images[i])))
    below = sheet[EDGE + 384 : EDGE + 384 + 40, : EDGE + 384]
    assert (below < 128).any(), "the caption is drawn"
    for edge in (sheet[:EDGE], sheet[-EDGE:], sheet[:, :EDGE], sheet[:, -EDGE:]):
        assert (edge == 255).all(), "nothing is drawn at the edges"


def test_large_images_are_reduced():
    page = grid(torch.zeros(1, 3, 512, 1024), [""], 1)
    dark = from_pil(page)[0] < 0.5
    assert dark.any(0).sum() == IMAGE_PX and dark.any(1).sum() == IMAGE_PX // 2


def test_a_heading_and_notes_add_their_lines():
    images = torch.zeros(2, 3, 40, 40)
    bare = grid(images, ["a", "b"], 2)
    named = grid(images, ["a", "b"], 2, heading="tiny · iteration 5", notes=["seed 1", "seed 2"])
    assert named.width == bare.width and named.height > bare.height + 40
    assert rows_with_ink(named)[EDGE : EDGE + 30].any() and not rows_with_ink(named)[:EDGE].any()
    with pytest.raises(ValueError, match="1 notes for 2 images"):
        grid(images, ["a", "b"], 2, notes=["seed 1"])


def test_pairs_stand_beside_each_other_with_the_caption_below_each():
    tiles = pairs(
        torch.zeros(2, 3, 272, 272), torch.full((2, 3, 272, 272), 0.5), ["A", ""], ("base", "tuned")
    )
    page = from_pil(tiled([Section("", tiles)], 2))[0]
    image_row = next(y for y in range(page.shape[0]) if (page[y, EDGE : EDGE + 272] == 0).all())
    width = 2 * PAIRED_PX + 6
    for left in (EDGE, EDGE + width + 28):
        assert (page[image_row : image_row + 272, left : left + 272] == 0).all()
        right = page[image_row : image_row + 272, left + 278 : left + 550]
        assert (right == 128 / 255).all()
    caption = page[image_row + 272 : image_row + 272 + 40]
    assert (caption[:, EDGE : EDGE + width] < 0.5).any() and (caption[:, EDGE + width :] == 1).all()
    label = page[:image_row]
    assert (label[:, EDGE : EDGE + 272] < 0.9).any() and (label[:, EDGE + 278 : EDGE + 550] < 0.9).any()
    with pytest.raises(ValueError, match="equal shapes"):
        pairs(torch.zeros(2, 3, 4, 4), torch.zeros(1, 3, 4, 4), ["a", "b"], ("base", "tuned"))
    with pytest.raises(ValueError, match="1 captions and 2 notes for 2 pairs"):
        pairs(torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4), ["a"], ("base", "tuned"))


@pytest.mark.parametrize(
    ("height", "width"), [(64, 64), (96, 64), (64, 32), (72, 128), (16, 64), (1024, 1024)]
)
@pytest.mark.parametrize("titles", [[OWN], [OWN, UNSEEN]])
def test_the_before_after_figure_is_wide_and_readable_in_a_readme(tmp_path, height, width, titles):
    sets = [ImageSet(title, (LONG,) * 9, tuple(range(9)), ({},) * 9) for title in titles]
    images = [torch.rand(9, 3, height, width)] * len(sets)
    write_before_after(tmp_path / "pairs.png", sets, images, images, "tiny trained by g2rpo · 10 steps")
    with Image.open(tmp_path / "pairs.png") as page:
        assert page.width > 1.2 * page.height
        shown_px = FONT_PX * min(1, README_PX / page.width)
        assert shown_px >= 9, "letters of captions, where the figure is shown as wide as a README"


def test_shapes_decide_how_many_pairs_a_row_has():
    assert [pair_columns(*shape) for shape in ((96, 64), (64, 64), (64, 96), (100, 80))] == [4, 3, 2, 3]


@pytest.mark.parametrize("text", [LONG, "x" * 500, "", "short", "日本語" * 60])
def test_captions_fit(text):
    lettering = Lettering(13)
    lines = lettering.wrapped(text, 192, 3).split("\n")
    assert len(lines) <= 3 and all(lettering.getlength(line) <= 192 for line in lines)
    shown, whole = "".join(lines).replace(" ", ""), text.replace(" ", "")
    assert (shown.endswith("…") and whole.startswith(shown[:-1])) or shown == whole


def test_what_is_no_figure():
    with pytest.raises(ValueError, match="one caption each"):
        grid(torch.zeros(2, 3, 8, 8), ["one"], 1)
    with pytest.raises(ValueError, match="needs images, and all of one shape"):
        tiled([Section("empty", [])], 2)
    tiles = [Tile((torch.zeros(3, 8, 8),), "a"), Tile((torch.zeros(3, 8, 9),), "b")]
    with pytest.raises(ValueError, match="all of one shape"):
        tiled([Section("", tiles)], 2)
