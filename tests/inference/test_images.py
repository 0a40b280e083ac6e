"""Images: exact pixels, files that know their prompt."""

import numpy as np
import pytest
import torch
from PIL import Image

from g2rpo.inference.images import from_pil, read_png_text, save_png, to_pil


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
