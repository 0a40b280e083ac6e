"""Hybrid inference in a lineup: a base takes the last steps of the other models' images."""

import pytest
import torch

from g2rpo.data.prompts import as_prompts
from g2rpo.evaluation import lineup
from g2rpo.evaluation.evaluate import evaluate
from g2rpo.evaluation.image_files import read_pixels
from g2rpo.inference import sample as sampling
from g2rpo.inference.images import read_png_text
from g2rpo.inference.open import open_policy
from g2rpo.inference.sample import SampleRequest, Segment, sample_images, sample_segments

TEXTS = ["a red circle", "two blue stars", "three green squares"]


def request(**changes):
    given = {"prompts": tuple(as_prompts(TEXTS)), "steps": (3,), "seed": 7, "batch": 2, "device": "cpu"}
    return SampleRequest(**(given | {"then": "tiny"} | changes))


def images_of(out, label):
    return torch.stack([read_pixels(out / label / "3" / f"{i:05d}.png") for i in range(3)])


def test_a_base_takes_the_last_steps(tmp_path, monkeypatch):
    def silent(line):
        pass

    models, out = ["tiny", "tiny@g2rpo"], tmp_path / "out"
    evaluate(models, request(), ["colourfulness"], labels=["base", "tuned"], out=out, say=silent)
    base = open_policy("tiny", device="cpu")
    tuned = open_policy("tiny@g2rpo", device="cpu", **base.conditions)
    how = {"shift": 3.0, "seeds": [7, 8, 9], "batch": 2}
    alone = sample_images(base, TEXTS, num_steps=3, **how)
    both = sample_segments([Segment(lambda: tuned, 2), Segment(lambda: base, 1)], TEXTS, **how)
    for label, images in (("base", alone), ("tuned", both)):
        assert torch.equal((images_of(out, label) * 255).round(), (images * 255).round())
    assert not torch.equal(both, sample_images(tuned, TEXTS, num_steps=3, **how))
    info = [read_png_text(out / label / "3" / "00000.png")[1] for label in ("base", "tuned")]
    assert "then" not in info[0] and (info[1]["first_steps"], info[1]["then"]) == (2, "tiny")

    def never(*_, **__):
        raise AssertionError("nothing is left to draw")

    monkeypatch.setattr(sampling, "open_policy", never)
    evaluate(models, request(), ["colourfulness"], labels=["base", "tuned"], out=out, say=silent)
    with pytest.raises(ValueError, match=r"first_share: 0\.6 stored, 0\.3 given"):
        evaluate(models, request(first_share=0.3), ["colourfulness"], labels=["base", "tuned"], out=out)
    monkeypatch.undo()
    monkeypatch.setattr(
        lineup, "IMAGES_PER_LOAD", 2
    )  # in lots of a batch: the models are opened anew for each
    evaluate(
        models, request(), ["colourfulness"], labels=["base", "tuned"], out=tmp_path / "lots", say=silent
    )
    assert torch.equal(images_of(tmp_path / "lots", "tuned"), images_of(out, "tuned"))


def test_shares_of_the_steps():
    assert [request(first_share=0.6).first_steps(n) for n in (2, 3, 10, 50)] == [1, 2, 6, 30]
    assert [request(first_share=0.01).first_steps(n) for n in (2, 50)] == [1, 1]
    assert request(first_share=0.99).first_steps(4) == 3
    assert "first_share" not in request(then=None).identity()
    with pytest.raises(ValueError, match="first_share=1: give a share of the steps, between 0 and 1"):
        request(first_share=1)
    with pytest.raises(ValueError, match="one step cannot be shared with tiny"):
        request(steps=(1, 4))
