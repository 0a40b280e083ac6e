"""The OCR reward: what a prompt asks for, the edit distance, and words that are really read."""

import importlib.util

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from support.seeds import seeded

from g2rpo.rewards.ocr import normalised, requested_text, similarity
from g2rpo.rewards.registry import load_reward

CPU = torch.device("cpu")


def written(*lines, size=(112, 112), font=24, ink="black", ground="white"):
    picture = Image.new("RGB", size, ground)
    draw = ImageDraw.Draw(picture)
    for number, line in enumerate(lines):
        draw.text((8, 20 + number * 36), line, fill=ink, font=ImageFont.load_default(font))
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255


@pytest.fixture(scope="module")
def ocr():
    return load_reward("ocr", CPU)


@pytest.mark.parametrize(
    ("prompt", "metadata", "text"),
    [
        ('a sign that says "Hello"', None, "Hello"),
        ('a sign that says "Hello"', {"text": "Bye"}, "Bye"),
        ('a sign that says "Hello"', {"tag": "sign"}, "Hello"),
        ("the cat's sign, it's 'red'", {}, ""),
        ('a poster: "SUMMER" above "SALE"', {}, "SUMMER SALE"),
        ("“curly” and „deutsch“ and «guillemets» and 「日本」", {}, "curly deutsch guillemets 日本"),
        ('a lone " mark', {}, ""),
        ("no text", {"text": 7}, ""),
        ('a "quoted" one', {"text": ""}, ""),  # what is given, wins
    ],
)
def test_the_text_asked_for(prompt, metadata, text):
    assert requested_text(prompt, metadata) == text


def test_case_white_space_and_typography_make_no_difference():
    assert normalised("  New\n YORK ") == "newyork" == normalised("Ｎｅｗ York")
    assert normalised("Straße") == normalised("STRASSE")
    assert normalised("it's") != normalised("its")


@pytest.mark.parametrize(
    ("read", "asked", "score", "exact"),
    [
        ("hello", "hello", 1, 1),
        ("", "hello", 0, 0),
        ("hallo", "hello", 4 / 5, 4 / 5),
        ("helo", "hello", 4 / 5, 4 / 5),
        ("sitting", "kitten", 1 / 2, 1 / 2),  # three edits, of six characters
        ("thecafehello", "hello", 1, 0),  # among other words: 7 more characters than 5
        ("hellox", "hello", 1, 4 / 5),
        ("something else entirely", "no", 0, 0),  # never below 0
    ],
)
def test_the_edit_distance(read, asked, score, exact):
    assert similarity(read, asked) == pytest.approx(score)
    assert similarity(read, asked, exact=True) == pytest.approx(exact)


def test_right_words_beat_wrong_ones_and_a_batch_equals_one_by_one(ocr):
    words = ["coffee", "Garden", "Zürich"]
    pictures = torch.stack([written(word) for word in words])
    prompts = [f'a shop window with "{word}" on it' for word in words]
    right, wrong = ocr(pictures, prompts), ocr(pictures, prompts[1:] + prompts[:1])
    assert right.dtype == torch.float32 and right[:2].tolist() == [1, 1] and right[2] > 0.8
    assert wrong.max() < 0.5 and (right - wrong).min() > 0.5
    assert torch.equal(torch.cat([ocr(pictures[i : i + 1], prompts[i : i + 1]) for i in range(3)]), right)


def test_a_picture_without_words_scores_low_and_a_prompt_without_a_text_not_at_all(ocr):
    blank = torch.stack(
        [torch.ones(3, 64, 64), torch.zeros(3, 64, 64), torch.rand(3, 64, 64, generator=seeded(0))]
    )
    scores = ocr(blank, ['"Hello"', "a cat", '"Hello"'], [{}, {}, {"text": "Bye"}])
    assert scores[0] == 0 and scores[1].isnan() and scores[2] < 0.5
    assert ocr.last_error == "no text in double quotes in 'a cat', and none in the metadata"
    assert ocr(blank[:1], ["a cat"], [{"text": "  "}]).isnan().all()


def test_two_lines_are_one_text_and_other_words_count_only_if_asked(ocr):
    picture = written("SUMMER", "SALE", ink=(255, 255, 0), ground=(0, 0, 160))
    assert ocr(picture[None], ['"Summer Sale"']).tolist() == [1]
    exact = load_reward("ocr", CPU, {"exact": True})
    assert ocr(picture[None], ['"Summer"']).tolist() == [1]
    assert exact(picture[None], ['"Summer"']).tolist() == pytest.approx([1 - 4 / 6])


def test_pixels_reach_the_reader_as_8_bit_bgr():
    from g2rpo.rewards.ocr import Ocr

    class Found:
        txts = ("a", "b")

    seen = []
    reader = Ocr(lambda pixels: seen.append(pixels) or Found())
    image = torch.tensor([0.1, 0.5, 0.9])[:, None, None].expand(3, 4, 6)
    assert reader.read(image) == "a b"
    assert seen[0].shape == (4, 6, 3) and seen[0].dtype == np.uint8
    assert seen[0][0, 0].tolist() == [230, 128, 26]  # 229.5 and 127.5 round to the even


def test_what_is_missing_is_named(monkeypatch):
    find = importlib.util.find_spec
    absent = ("rapidocr", "onnxruntime")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find(name))
    with pytest.raises(
        ValueError, match="reward 'ocr' needs rapidocr and onnxruntime, which is not installed: pip"
    ):
        load_reward("ocr", CPU)
    with pytest.raises(ValueError, match="'ocr' has no option 'exakt'; did you mean 'exact'"):
        load_reward("ocr", CPU, {"exakt": True})
