"""Images: exact pixels, captions that stay inside, files that know their prompt."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont

from g2rpo.inference.images import (
    comparison,
    from_pil,
    grid,
    read_png_text,
    save_png,
    to_pil,
    wrapped,
)

LONG = "a very long prompt about two red circles above a blue star on a yellow background, " * 20


def test_eight_bits_are_rounded_and_come_back():
    # 0.5 * 255 = 127.5 rounds to the even 128; 0.301 * 255 = 76.755 to 77
    image = torch.tensor([0.0, 0.5, 0.301, 1.2]).reshape(1, 2, 2).expand(3, 2, 2)
    pixels = np.array(to_pil(image))[..., 0]
    assert pixels.tolist() == [[0, 128], [77, 255]]
    assert torch.equal(from_pil(to_pil(image)) * 255, torch.tensor(pixels).float().expand(3, 2, 2))
    with pytest.raises(ValueError, match=r"\[3, H, W\]"):
        to_pil(torch.zeros(2, 3, 4, 4))


def test_transparency_lies_on_white():
    assert from_pil(Image.new("RGBA", (1, 1), (0, 0, 0, 0))).flatten().tolist() == [1, 1, 1]


def test_png_knows_its_prompt(tmp_path):
    prompt = "zwei rote Kreise, 日本語\n“x”"
    save_png(torch.rand(3, 8, 8), tmp_path / "sub" / "a.png", prompt, {"seed": 3, "model": "tiny"})
    assert read_png_text(tmp_path / "sub" / "a.png") == (prompt, {"seed": 3, "model": "tiny"})
    Image.new("RGB", (2, 2)).save(tmp_path / "other.png")
    assert read_png_text(tmp_path / "other.png") == (None, {})


def test_grid_shows_each_image_unchanged():
    images = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    sheet = np.array(grid(images, ["one", LONG, ""], 2))
    # 64 px images are enlarged by whole pixels to 192: every third pixel is the image's.
    for i, (x, y) in enumerate([(6, 6), (6 + 198, 6)]):
        cell = sheet[y : y + 192 : 3, x : x + 192 : 3]
        assert np.array_equal(cell, np.array(to_pil(images[i])))
    assert (sheet[6 + 192 : 6 + 192 + 18, :190] < 128).any(), "the caption is drawn"
    assert (sheet[-6:] == 255).all() and (sheet[:, -6:] == 255).all(), "nothing runs out at the edge"


@pytest.mark.parametrize("text", [LONG, "x" * 500, "", "short", "日本語" * 60])
def test_captions_fit(text):
    font = ImageFont.load_default(13)
    lines = wrapped(text, font, 192).split("\n")
    assert len(lines) <= 3 and all(font.getlength(line) <= 192 for line in lines)
    shown = "".join(lines).replace(" ", "")
    assert (shown.endswith("…") and text.replace(" ", "").startswith(shown[:-1])) or shown == text.replace(
        " ", ""
    )


def test_comparison_puts_pairs_in_rows():
    before, after = torch.zeros(2, 3, 144, 144), torch.ones(2, 3, 144, 144)
    sheet = np.array(comparison(before, after, ["a", "b"], ("base", "tuned")))
    row = sheet[60]
    assert (row[6:150] == 0).all() and (row[156:300] == 255).all()
    with pytest.raises(ValueError, match="equal shapes"):
        comparison(before, after[:1], ["a", "b"], ("base", "tuned"))


def test_grid_errors():
    with pytest.raises(ValueError, match="one caption each"):
        grid(torch.zeros(2, 3, 8, 8), ["one"], 1)
    with pytest.raises(ValueError, match="1 titles for 2 columns"):
        grid(torch.zeros(2, 3, 8, 8), ["a", "b"], 2, titles=["x"])
