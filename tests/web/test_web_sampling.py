"""Images of the page are those of `g2rpo sample`; their files carry how they were made."""

import pytest
import torch
from PIL import Image

from g2rpo.data.prompts import Prompt
from g2rpo.inference.images import from_pil, read_png_text
from g2rpo.inference.sample import SampleRequest, sample_model
from g2rpo.web.context import WebContext
from g2rpo.web.jobs import Cancelled
from g2rpo.web.sampling import ImageRequest, checked_request, sample_image, save_image

PROMPT = "two red circles above a blue star"


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    made = WebContext(["tiny", "tiny@g2rpo"], device="cpu", votes=tmp_path_factory.mktemp("votes"))
    yield made
    made.close()


def ignore(done: int, total: int, activity: str) -> None:
    pass


@pytest.mark.parametrize("guidance", [None, 1.5])
def test_images_equal_those_of_sample(context, guidance):
    request = ImageRequest(PROMPT, 11, 3, guidance)
    sampled = sample_image(context, ignore, "tiny@g2rpo", request)
    expected = sample_model(
        "tiny@g2rpo",
        SampleRequest(
            (Prompt(PROMPT, {}, 0),), (3,), seed=11, conditions={"guidance": guidance}, device="cpu"
        ),
    )
    assert torch.equal(sampled.image, expected[0])
    assert sampled.info["guidance"] == (3.5 if guidance is None else guidance)
    assert sampled.conditions["guidance"] == 3.5 and sampled.guidance == 3.5


def test_the_file_carries_prompt_and_settings(context):
    prompt = "<b>four</b> red circles"
    sampled = sample_image(context, ignore, "tiny", ImageRequest(prompt, 4, 2))
    path = save_image(context, "tiny_seed4", prompt, sampled.image, sampled.info)
    text, info = read_png_text(path)
    assert text == prompt and context.folder in path.parents
    assert (info["model"], info["seed"], info["num_steps"], info["shift"]) == ("tiny", 4, 2, 3.0)
    assert torch.equal((from_pil(Image.open(path)) * 255).round(), (sampled.image * 255).round())
    assert save_image(context, "tiny_seed4", prompt, sampled.image, {}) != path


def test_progress_counts_denoising_steps_and_can_stop_them(context):
    seen: list[tuple[int, int]] = []

    def report(done: int, total: int, activity: str) -> None:
        seen.append((done, total))
        if done == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        sample_image(context, report, "tiny", ImageRequest(PROMPT, 0, 5))
    assert seen[1:] == [(0, 5), (1, 5), (2, 5)]


def test_a_prompt_that_is_read_in_part_is_noted(context):
    sampled = sample_image(context, ignore, "tiny", ImageRequest("red circle " * 40, 0, 1))
    assert "truncates" in sampled.notes[0]


@pytest.mark.parametrize(
    "values, message",
    [
        (("", 0, 4, 3.5), "Prompt: empty"),
        (("x" * 5000, 0, 4, 3.5), "5000 characters"),
        (("a", -1, 4, 3.5), "Seed: -1 is out of range"),
        (("a", 0, 10**6, 3.5), "Denoising steps: 1000000 is out of range"),
        (("a", 0, 4, 1e9), "Guidance: 1000000000 is out of range"),
        (("a", None, 4, 3.5), "Seed: enter a number"),
    ],
)
def test_what_a_visitor_may_not_ask_for(context, values, message):
    with pytest.raises(ValueError, match=message):
        checked_request(context, *values)
