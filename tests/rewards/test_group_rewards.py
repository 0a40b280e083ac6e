"""Groupwise rewards: what they get, what their answers must be, and where they are refused."""

import json
import sys

import pytest
import torch
from support.processes import run_command

from g2rpo.data.prompts import Prompt
from g2rpo.evaluation.evaluate import evaluate
from g2rpo.evaluation.score_folder import score
from g2rpo.inference.images import save_png
from g2rpo.inference.sample import SampleRequest
from g2rpo.rewards.base import is_groupwise
from g2rpo.rewards.checked import CheckedReward
from g2rpo.rewards.exits import RewardExited
from g2rpo.rewards.registry import groupwise_names, load_reward, load_rewards

CPU = torch.device("cpu")
IMAGES = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))

MODULE = """
import sys
import torch

made = []

class Best:
    groupwise = True

    def __init__(self, device, *, scale=1.0):
        made.append(self)
        self.scale = scale

    def __call__(self, images, prompt, metadata=None):
        value = images.mean((1, 2, 3))
        return self.scale * (value >= value.max()).float()

class Pointwise:
    def __init__(self, device):
        pass

    def __call__(self, images, prompts, metadata=None):
        return images.mean((1, 2, 3))

class Late(Pointwise):
    def __init__(self, device):
        self.groupwise = True

def judge(images, prompt, metadata=None):
    return images.mean((1, 2, 3))

judge.groupwise = True

def leaves(images, prompt, metadata=None):
    sys.exit(3)

leaves.groupwise = True
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "group.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("group", None)


def groupwise(function, name="own"):
    function.groupwise = True
    return CheckedReward(name, function)


def ranks(images, prompt, metadata=None):
    return images.mean((1, 2, 3)).argsort().argsort().float()


def test_the_valid_images_of_a_cell_are_judged_together():
    seen = []

    def spy(images, prompt, metadata=None):
        seen.append((images.clone(), prompt, metadata))
        return ranks(images, prompt)

    reward, valid = groupwise(spy), torch.tensor([True, False, True, True])
    scores = reward.judge(IMAGES, "a star", {"n": 1}, valid)
    (images, prompt, metadata), *others = seen
    assert not others and torch.equal(images, IMAGES[valid]) and (prompt, metadata) == ("a star", {"n": 1})
    assert scores.dtype == torch.float32 and scores[1].isnan()
    assert torch.equal(scores[valid], ranks(IMAGES[valid], ""))
    broken = IMAGES.clone()
    broken[2, 0, 0, 0] = torch.nan
    assert reward.judge(broken, "a star", None, valid).isnan().tolist() == [False, True, True, False]
    assert len(seen[1][0]) == 2 and seen[1][2] is None and reward.last_error is None


@pytest.mark.parametrize("num_valid", [0, 1])
def test_fewer_than_two_images_are_not_compared(num_valid):
    reward = groupwise(lambda *a: pytest.fail("it was called"))
    scores = reward.judge(IMAGES, "a star", None, torch.arange(4) < num_valid)
    assert scores.isnan().all() and scores.shape == (4,)
    assert reward.last_error == f"{num_valid} of the 4 images of a group can be compared; that needs 2"


def test_a_groupwise_reward_gets_copies_and_leaves_the_process_as_it_was():
    def meddling(images, prompt, metadata=None):
        images.zero_()
        metadata["inner"].append(2)
        torch.set_default_dtype(torch.float64)
        return torch.zeros(len(images), dtype=torch.float32)

    images, metadata = IMAGES.clone(), {"inner": [1]}
    assert groupwise(meddling).judge(images, "a star", metadata).tolist() == [0.0] * 4
    assert torch.equal(images, IMAGES) and metadata == {"inner": [1]}
    assert torch.get_default_dtype() == torch.float32


def test_what_it_raises_is_no_score_and_told(caplog):
    def down(images, prompt, metadata=None):
        raise RuntimeError("the judge is down")

    reward = groupwise(down)
    assert (
        reward.judge(IMAGES, "a star").isnan().all()
        and reward.last_error == "RuntimeError: the judge is down"
    )
    assert "the judge is down" in caplog.text and "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda images, prompt, metadata: [0.0] * len(images), "returned list"),
        (lambda images, prompt, metadata: torch.zeros(1), r"\(1,\) for 4 images"),
        (lambda images, prompt, metadata: torch.zeros(4, dtype=torch.float64), "torch.float64"),
    ],
)
def test_a_wrong_answer_is_an_error(answer, message):
    with pytest.raises(ValueError, match=f"reward 'own' {message}" if "list" in message else message):
        groupwise(answer).judge(IMAGES, "a star")


def test_a_member_without_a_score_is_the_rewards_choice():
    def undecided(images, prompt, metadata=None):
        return ranks(images, prompt).masked_fill(torch.arange(len(images)) == 1, torch.nan)

    assert groupwise(undecided).judge(IMAGES, "").isnan().tolist() == [False, True, False, False]


def test_each_kind_has_its_own_call():
    with pytest.raises(ValueError, match="'own' is groupwise: its `judge` scores"):
        groupwise(ranks)(IMAGES, ["a"] * 4)
    with pytest.raises(ValueError, match="'plain' is not groupwise"):
        CheckedReward("plain", lambda images, prompts, metadata=None: torch.zeros(4)).judge(IMAGES, "a")


def test_by_name(folder):
    names = ["group:Best", "colourfulness", "group:judge", "group:Pointwise"]
    assert groupwise_names(names) == ["group:Best", "group:judge"] and not sys.modules["group"].made
    rewards = load_rewards(names, CPU, {"group:Best": {"scale": 2.0}})
    assert [is_groupwise(reward) for reward in rewards.values()] == [True, False, True, False]
    assert rewards["group:Best"].judge(IMAGES, "a").max() == 2.0
    with pytest.raises(RewardExited, match=r"'group:leaves' \(group.leaves, line \d+\) called sys.exit\(3\)"):
        load_reward("group:leaves", CPU).judge(IMAGES, "a")


def test_the_kind_must_be_known_before_the_reward_is_made(folder):
    with pytest.raises(ValueError, match="'group:Late': `groupwise` must be an attribute of Late"):
        load_reward("group:Late", CPU)


REFUSED = (
    "reward 'group:Best' is groupwise: it compares the images of one group of a run's rollout, and here "
    "each image is scored by itself. Use it in `rewards` of `g2rpo train`; to score images, choose a "
    "pointwise reward"
)


def test_score_refuses_it_before_anything_is_loaded_or_written(folder):
    save_png(IMAGES[0], folder / "images" / "0.png", "a red cube", {"seed": 0})
    with pytest.raises(ValueError) as refused:
        score(folder / "images", ["tiny_clip", "group:Best"], out=folder / "out", device="cpu")
    assert str(refused.value) == REFUSED
    assert not (folder / "out").exists() and not sys.modules["group"].made


def test_evaluate_refuses_it_before_anything_is_loaded_or_written(folder):
    request = SampleRequest(prompts=(Prompt("a red circle", {}, 0),), steps=(1,), device="cpu")
    with pytest.raises(ValueError) as refused:
        evaluate(["tiny"], request, ["group:Best"], out=folder / "out")
    assert str(refused.value) == REFUSED
    assert not (folder / "out").exists() and not sys.modules["group"].made


def test_the_command_score_says_why(folder):
    save_png(IMAGES[0], folder / "images" / "0.png", "a red cube", {"seed": 0})
    ended = run_command("score", "--images", "images", "--rewards", "group:Best", "--out", "out", cwd=folder)
    assert ended.returncode == 2 and " ".join(ended.stderr.split()) == f"error: {REFUSED}"


def test_rows_of_an_earlier_call_need_no_reward(folder):
    """A finished table is shown again without importing a reward, as before."""
    save_png(IMAGES[0], folder / "images" / "0.png", "a red cube", {"seed": 0})
    arguments = {"out": folder / "out", "device": "cpu"}
    score(folder / "images", ["group:Pointwise"], **arguments)
    sys.modules.pop("group")
    score(folder / "images", ["group:Pointwise"], **arguments)
    assert "group" not in sys.modules
    assert json.loads((folder / "out" / "scores.json").read_text())["complete"]
