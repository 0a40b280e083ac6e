"""`g2rpo gallery`: rows of prompts, columns of models, the images in their places."""

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from g2rpo.__main__ import app
from g2rpo.evaluation import lineup
from g2rpo.evaluation.gallery import sheet
from g2rpo.inference.images import from_pil, read_png_text

LEFT, GAP, EDGE = 16 + 190 + 16, 8, 16


def plain(*colours, height=44, width=44):
    return [torch.tensor(c).view(3, 1, 1).expand(3, height, width) for c in colours]


def test_each_picture_stands_in_its_row_and_column():
    red, green, blue, grey = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.5, 0.5, 0.5)
    page = sheet([plain(red, green), plain(blue, grey)], ["one", "two"], ["base", "tuned"])
    cell = 176  # 44 px, four times as large
    assert page.width == LEFT + 2 * cell + GAP + EDGE
    top = page.height - EDGE - 2 * cell - GAP
    places = {(0, 0): red, (0, 1): green, (1, 0): blue, (1, 1): grey}
    for (row, column), colour in places.items():
        x, y = LEFT + column * (cell + GAP), top + row * (cell + GAP)
        whole = from_pil(page.crop((x, y, x + cell, y + cell)))
        assert torch.equal(
            whole, from_pil(Image.new("RGB", (cell, cell), tuple(round(255 * c) for c in colour)))
        )
    assert min(page.crop((0, 0, page.width, top)).convert("L").getextrema()) < 100  # titles
    for row in range(2):  # captions stand at the left of their rows, and leave the images alone
        y = top + row * (cell + GAP)
        assert min(page.crop((0, y, LEFT, y + cell)).convert("L").getextrema()) < 100
        assert page.crop((LEFT - GAP, y, LEFT, y + cell)).convert("L").getextrema() == (255, 255)


@pytest.mark.parametrize("notes", [None, ["seed 3"]])
def test_long_captions_and_labels_stay_in_their_places(notes):
    caption, label = "a very long prompt of many words " * 60, "a-model-with-a-very-long-name" * 4
    page = sheet([plain((1.0, 0.0, 0.0))], [caption], [label], notes)
    top = page.height - EDGE - 176
    assert page.width == LEFT + 176 + EDGE and top < 100
    below = page.crop((0, page.height - EDGE, page.width, page.height))
    assert below.convert("L").getextrema() == (255, 255)
    assert page.crop((LEFT - GAP, 0, LEFT - 1, page.height)).convert("L").getextrema() == (255, 255)
    assert page.crop((LEFT + 177, 0, page.width, page.height)).convert("L").getextrema() == (255, 255)


def test_large_images_are_reduced_and_keep_their_form():
    page = sheet([plain((1.0, 0.0, 0.0), height=400, width=800)], ["wide"], ["base"])
    red = (from_pil(page)[1] < 0.1) & (from_pil(page)[0] > 0.9)
    assert red.any(0).sum() == 320 and red.any(1).sum() == 160


def test_counts_and_shapes_must_fit():
    red = (1.0, 0.0, 0.0)
    for images, captions in (([plain(red)], ["a", "b"]), ([plain(red, red)], ["a"]), ([], [])):
        with pytest.raises(ValueError, match="one caption per row, one title per column"):
            sheet(images, captions, ["base"])
    with pytest.raises(ValueError, match="images of one shape"):
        sheet([plain(red), plain(red, height=20)], ["a", "b"], ["base"])


def test_the_command_draws_a_figure_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sampled, real = [], lineup.sample_images

    def counting(policy, prompts, **given):
        sampled.append((list(prompts), given["seeds"]))
        return real(policy, prompts, **given)

    monkeypatch.setattr(lineup, "sample_images", counting)
    words = ["gallery", "tiny", "--prompt", "a red circle", "--prompt", "two blue stars", "--steps", "2"]
    words += ["--device", "cpu", "--seed", "5"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and "gallery/gallery.png: tiny" in result.output, result.output
    with Image.open("gallery/gallery.png") as page:
        narrow = page.size
    result = CliRunner().invoke(app, [words[0], "tiny", *words[1:], "--labels", "base,again"])
    assert result.exit_code == 2 and "models: tiny (tiny) is stored, but not given" in result.output
    result = CliRunner().invoke(app, [words[0], "tiny", *words[1:]])
    assert result.exit_code == 0, result.output
    # The second column alone was sampled the second time.
    assert sampled == [(["a red circle", "two blue stars"], [5, 6])] * 2
    with Image.open("gallery/gallery.png") as page:
        # The heading needs fewer lines in a wider figure.
        assert page.width == narrow[0] + 192 + GAP and narrow[1] - 60 < page.height <= narrow[1]
        pixels = from_pil(page)
    assert torch.equal(pixels[:, -400:, LEFT : LEFT + 192], pixels[:, -400:, LEFT + 200 : LEFT + 392])
    prompt, info = read_png_text(tmp_path / "gallery" / "tiny-2" / "2" / "00001.png")
    assert (prompt, info["seed"], info["num_steps"]) == ("two blue stars", 6, 2)
    result = CliRunner().invoke(app, ["gallery", "tiny"])
    assert result.exit_code == 2 and "no prompts" in result.output
    result = CliRunner().invoke(app, [*words, "--steps", "3"])
    assert result.exit_code == 2 and "steps: 2 stored, but not given" in result.output
