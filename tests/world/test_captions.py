"""Captions of the embedded world: words, token ids, and reading them back."""

import pytest
import torch
from support.seeds import seeded

from g2rpo.world.captions import (
    DEMO_PROMPTS,
    EOS,
    MAX_TOKENS,
    NUM_PROMPTS,
    PAD,
    VOCABULARY,
    caption_ids,
    captions,
    empty_caption,
    generated_prompts,
    parse,
    prompt_set,
    spell,
)
from g2rpo.world.networks import tokenizer
from g2rpo.world.scenes import (
    COLOUR_NAMES,
    RELATIONS,
    SHAPES,
    Compositions,
    is_held_out,
    other_wording,
    sample_compositions,
)

NUM = 800


@pytest.fixture(scope="module")
def scenes() -> Compositions:
    return sample_compositions(NUM, seeded(0))


@pytest.fixture(scope="module")
def ids(scenes: Compositions) -> torch.Tensor:
    return caption_ids(scenes, seeded(1))


def test_ids_are_what_the_tokenizer_makes_of_the_words(ids):
    given = tokenizer()(spell(ids), padding="max_length", truncation=True, return_tensors="pt").input_ids
    assert torch.equal(given, ids)
    empty = tokenizer()([""], padding="max_length", return_tensors="pt").input_ids[0]
    assert torch.equal(empty, empty_caption(torch.device("cpu")))


def test_the_tokenizer_ignores_case_and_punctuation_and_knows_its_limits():
    given = tokenizer()
    plain = given("two red circles above a blue star").input_ids
    assert given("  Two RED circles, above a blue star!").input_ids == plain
    assert given.convert_ids_to_tokens(given("a red dragon").input_ids) == [
        "<bos>",
        "a",
        "red",
        "<unk>",
        "<eos>",
    ]
    assert len(given("a " * 50, truncation=True).input_ids) == MAX_TOKENS


def test_reading_a_caption_back_gives_its_scene(scenes, ids):
    stated = 0
    for row, text in enumerate(spell(ids)):
        scene = parse(text)
        assert scene is not None, text
        want = scenes[row : row + 1]
        for got, field in zip(scene.fields()[:4], want.fields()[:4], strict=True):
            assert torch.equal(got, field), text
        assert int(scene.background) in (-1, int(want.background)), text
        stated += int(scene.background) >= 0
    assert 0.7 < stated / NUM < 0.8  # background_share is 0.75


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_backgrounds_are_stated_as_often_as_asked(scenes, share):
    few = scenes[:200]
    for text, background in zip(
        captions(few, seeded(2), background_share=share), few.background.tolist(), strict=True
    ):
        scene = parse(text)
        assert scene is not None and int(scene.background) == (background if share else -1), text


def test_captions_vary_and_fit(scenes, ids):
    texts = spell(ids)
    assert max(len(text.split()) for text in texts) <= MAX_TOKENS - 2 == 18
    assert int((ids == EOS).sum()) == NUM and bool((ids[:, -1] == PAD).all())  # none was cut off
    scene = scenes[:1]
    of_one = set(captions(Compositions.cat([scene] * 300), seeded(3)))
    assert len(of_one) >= 10, of_one
    used = set(" ".join(texts).split())
    assert used == set(VOCABULARY) - {"<pad>", "<bos>", "<eos>", "<unk>"}


def test_the_longest_caption_there_is():
    # there are two white triangles to the left of two yellow triangles on a black background: 16 words
    index = COLOUR_NAMES.index
    scene = Compositions(
        torch.tensor([[2, 2]]),
        torch.tensor([[index("white"), index("yellow")]]),
        torch.tensor([[SHAPES.index("triangle")] * 2]),
        torch.tensor([RELATIONS.index("left of")]),
        torch.tensor([index("black")]),
    )
    texts = captions(Compositions.cat([scene] * 1000), seeded(4), background_share=1.0)
    assert max(len(text.split()) for text in texts) == 16
    assert all(parse(text) is not None for text in texts)


def test_grammar_of_number_and_article(scenes, ids):
    for text in spell(ids):
        words = text.split()
        for word, after, third in zip(words, words[1:], words[2:], strict=False):
            if word == "an":
                assert after == "orange" and third in SHAPES, text
            if word == "a" and third in SHAPES:
                assert after != "orange", text
            if word in ("two", "three", "four", "five"):
                assert third.endswith("s") and third not in SHAPES, text


@pytest.mark.parametrize(
    ("text", "count", "background"),
    [
        ("A red circle.", [1, 0], -1),
        ("one red circle on a white background", [1, 0], COLOUR_NAMES.index("white")),
        ("an orange star to the left of three purple crosses on black", [1, 3], COLOUR_NAMES.index("black")),
        ("Teal background with two yellow diamonds", [2, 0], COLOUR_NAMES.index("teal")),
        ("there are two red circles and two blue stars", [2, 2], -1),
    ],
)
def test_captions_written_by_hand(text, count, background):
    scene = parse(text)
    assert scene is not None
    assert scene.count.tolist() == [count] and scene.background.tolist() == [background]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a photo of a dog",
        "red circles",  # no number
        "six red circles",
        "a teal circle",  # teal is no object's colour
        "a red hexagon",
        "three red circles and three blue stars",  # six objects
        "a red circle left of a blue star left of a green cross",  # three groups
        "a red circle near a blue star",  # no such relation
    ],
)
def test_outside_the_grammar(text):
    assert parse(text) is None


def test_prompt_sets_are_disjoint_repeatable_and_in_the_grammar():
    train, held_out = prompt_set("train", 400), prompt_set("heldout", 400)
    assert prompt_set("train", 400) == train and len({text for text, _ in train}) == 400
    seen = []
    for prompts, expected in ((train, False), (held_out, True)):
        scenes = [scene for text, _ in prompts if (scene := parse(text)) is not None]
        assert len(scenes) == len(prompts) == 400
        every = Compositions.cat(scenes)
        assert bool((is_held_out(every) == expected).all())
        assert bool((is_held_out(other_wording(every)) == expected).all())
        groups = (every.count > 0).sum(1).tolist()
        assert [metadata["groups"] for _, metadata in prompts] == groups
        assert 0.35 < groups.count(1) / 400 < 0.65
        columns = [every.count, every.colour, every.shape, every.relation[:, None]]
        seen.append({tuple(row) for row in torch.cat(columns, 1).tolist()})
    assert not seen[0] & seen[1]


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_the_stored_sets_are_those_that_are_generated(name):
    """If it fails after an update of torch, its random numbers changed: the files stay as they are."""
    texts = [text for text, _ in prompt_set(name)]
    assert texts == generated_prompts(name, NUM_PROMPTS) and len(texts) == NUM_PROMPTS


def test_demo_prompts_are_in_the_grammar():
    assert [text for text, _ in prompt_set("demo")] == list(DEMO_PROMPTS)
    assert all(parse(text) is not None for text in DEMO_PROMPTS)
    for text, metadata in prompt_set("demo"):
        number = sum(word.rstrip("s") in SHAPES or word == "crosses" for word in text.split())
        assert metadata == {"groups": number}, text


def test_an_unknown_prompt_set():
    with pytest.raises(ValueError, match=r"'test'.*train, heldout, demo"):
        prompt_set("test")
