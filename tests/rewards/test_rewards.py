"""Rewards by name, and what their answers must be."""

import sys

import pytest
import torch

from g2rpo.rewards.registry import REWARDS, CheckedReward, load_reward, load_rewards, reward_spec

IMAGES = torch.linspace(0, 1, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4)
PROMPTS = ["dark", "bright"]


@pytest.fixture
def own_rewards(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        """
import torch

def brightness(images, prompts, metadata=None):
    return images.mean(dim=(1, 2, 3))

def as_list(images, prompts, metadata=None):
    return [0.0] * len(images)

def as_double(images, prompts, metadata=None):
    return images.double().mean(dim=(1, 2, 3))

def one_number(images, prompts, metadata=None):
    return images.mean()

def breaks(images, prompts, metadata=None):
    raise RuntimeError("the scorer is down")

class Offset:
    def __init__(self, device):
        self.offset = torch.tensor(float(len(str(device))), device=device)

    def __call__(self, images, prompts, metadata=None):
        return self.offset.expand(len(images))

class Path:
    def __init__(self, folder):
        pass

    def __call__(self, images, prompts, metadata=None):
        return images.mean(dim=(1, 2, 3))

class Two(Path):
    def __init__(self, device, needed):
        pass

number = 3
"""
    )
    (tmp_path / "needs_more.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_rewards", None)
    sys.modules.pop("needs_more", None)


def test_a_function_and_a_class_of_ones_own(own_rewards):
    rewards = load_rewards({"my_rewards:brightness": 1.0, "my_rewards:Offset": 0.5}, "cpu")
    assert list(rewards) == ["my_rewards:brightness", "my_rewards:Offset"]
    # 0..95 over 95: the halves' means are 23.5/95 and 71.5/95.
    assert rewards["my_rewards:brightness"](IMAGES, PROMPTS).tolist() == pytest.approx([23.5 / 95, 71.5 / 95])
    assert rewards["my_rewards:Offset"](IMAGES, PROMPTS, [{}, {}]).tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [("as_list", "returned list"), ("as_double", "torch.float64"), ("one_number", r"\(\) for 2 images")],
)
def test_a_wrong_answer_is_an_error_that_names_the_reward(own_rewards, name, message):
    with pytest.raises(ValueError, match=f"my_rewards:{name}.*{message}"):
        load_reward(f"my_rewards:{name}", torch.device("cpu"))(IMAGES, PROMPTS)


def test_a_reward_that_fails_gives_no_number_and_is_told(own_rewards, caplog):
    reward = load_reward("my_rewards:breaks", torch.device("cpu"))
    assert reward(IMAGES, PROMPTS).isnan().all() and reward.last_error == "RuntimeError: the scorer is down"
    assert "my_rewards:breaks" in caplog.text and "the scorer is down" in caplog.text


def test_nan_passes_through():
    reward = CheckedReward("half", lambda images, prompts, metadata=None: torch.tensor([1.0, float("nan")]))
    assert reward(IMAGES, PROMPTS).isnan().tolist() == [False, True]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["verifier", "geneval", "colourfulness"])
def test_a_picture_that_is_no_number_has_no_score(name, value):
    """Also by rewards that look at 8 bits, or at a few pixels: they would see something in it."""
    images = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    images[1, 0, 5, 5] = value
    asked = [{"include": [{"class": "circle"}]}] * 3
    reward = load_reward(name, torch.device("cpu"))
    assert reward(images, ["a red circle"] * 3, asked).isnan().tolist() == [False, True, False]
    assert reward.last_error == "1 of 3 images hold NaN or infinity"


def test_inputs_must_belong_together():
    reward = CheckedReward("any", lambda images, prompts, metadata=None: torch.zeros(len(images)))
    with pytest.raises(ValueError, match="2 images but 1 prompts"):
        reward(IMAGES, PROMPTS[:1])
    with pytest.raises(ValueError, match="2 images but 2 prompts, 3 metadata"):
        reward(IMAGES, PROMPTS, [{}, {}, {}])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny_clp", "unknown reward 'tiny_clp'; did you mean 'tiny_clip'"),
        ("beauty", "known: verifier, verifier_strict, tiny_clip, tiny_preference"),
        ("no_such_module:score", "no module 'no_such_module'.*PYTHONPATH"),
        ("my_rewards:brightnes", "has no 'brightnes'; did you mean 'brightness'"),
        ("my_rewards:number", "is a int; a reward must be callable"),
        ("my_rewards:", "must be module:attribute"),
        (
            "collections:deque",
            "'collections:deque' cannot be created: no signature .*; give a function",
        ),
    ],
)
def test_names_that_lead_nowhere(own_rewards, name, message):
    with pytest.raises(ValueError, match=message):
        load_reward(name, torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Path", {"folder": "x"}, "'my_rewards:Path' has no option 'folder'; it has no options"),
        ("Two", {}, "'my_rewards:Two' cannot be created: missing a required argument: 'needed'"),
        ("brightness", {"scale": 2}, "is a function, which takes no options"),
    ],
)
def test_options_that_a_class_of_ones_own_cannot_take(own_rewards, name, options, message):
    with pytest.raises(ValueError, match=message):
        load_reward(f"my_rewards:{name}", torch.device("cpu"), options)


def test_a_missing_package_of_a_reward_is_told_as_it_is(own_rewards):
    with pytest.raises(ValueError, match="a_package_that_nobody_has"):
        load_reward("needs_more:score", torch.device("cpu"))


def test_no_rewards_at_all():
    with pytest.raises(ValueError, match="no rewards given"):
        load_rewards({}, "cpu")


def test_every_name_has_a_complete_spec_in_the_rewards_own_file():
    for name, target in REWARDS.items():
        module, _, attribute = target.partition(":")
        spec = reward_spec(name)
        assert spec is getattr(sys.modules[module], attribute) and module.startswith("g2rpo.rewards.")
        assert spec.factory.__module__ == module and spec.num_params is not None
        assert spec.sources or spec.origin


@pytest.mark.parametrize("name", ["tiny_clip", "tiny_preference"])
def test_a_score_does_not_depend_on_what_was_scored_before(name):
    """A resumed run has cached other prompts than the run that went through."""
    images = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    prompts = ["a red circle", "two blue stars on pink", "three green crosses left of a star"]
    at_once = load_reward(name, torch.device("cpu"))(images, prompts)
    other = load_reward(name, torch.device("cpu"))
    for pair in (prompts[1:], ["a cat", prompts[0]]):
        other(images[:2], pair)
    assert torch.equal(other(images, prompts), at_once)
