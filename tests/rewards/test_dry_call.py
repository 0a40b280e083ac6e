"""Before a run begins, a reward's signature is checked, and it is called with two blank images."""

import sys

import pytest
import torch
from support.processes import run_processes
from support.small_runs import SMALL
from typer.testing import CliRunner

import g2rpo
from g2rpo.cli.app import app
from g2rpo.config.load import load_settings
from g2rpo.inference.images import save_png
from g2rpo.rewards.checked import CheckedReward
from g2rpo.rewards.dry_call import check_signature, dry_call
from g2rpo.rewards.exits import WrongResult
from g2rpo.run.folder import latest_checkpoint
from g2rpo.runtime.random import random_state
from g2rpo.training import trainer

CPU = torch.device("cpu")
MODULE = """
import asyncio, os
import torch
from torch import nn

def score(images, prompts, metadata=None):
    return images.mean((1, 2, 3))

async def awaited(images, prompts, metadata=None):
    return score(images, prompts)

async def awaited_one_by_one(images, prompts, metadata=None):
    yield score(images, prompts)

def yielding(images, prompts, metadata=None):
    yield score(images, prompts)

def two(images, prompts):
    return score(images, prompts)

def four(images, prompts, metadata, scale):
    return score(images, prompts)

def named_only(*, images, prompts, metadata=None):
    return score(images, prompts)

class NotCallable:
    def __init__(self, device):
        pass

class Awaited:
    def __init__(self, device):
        pass

    async def __call__(self, images, prompts, metadata=None):
        return score(images, prompts)

class Network(nn.Module):
    def __init__(self, device):
        super().__init__()

    def forward(self, images):
        return score(images, [])

class GroupOfOne:
    groupwise = True

    def __init__(self, device):
        pass

    def __call__(self, images):
        return torch.zeros(len(images))

class WrongGroup(GroupOfOne):
    def __call__(self, images, prompt, metadata=None):
        return torch.zeros(len(images) + 1)

def returns_a_coroutine(images, prompts, metadata=None):
    return awaited(images, prompts)

def numbers(images, prompts, metadata=None):
    return [0.5] * len(images)

def one_number(images, prompts, metadata=None):
    return images.mean()

def column(images, prompts, metadata=None):
    return score(images, prompts)[:, None]

def double(images, prompts, metadata=None):
    return score(images, prompts).double()

def without_data(images, prompts, metadata=None):
    return score(images, prompts).to("meta")

def misspelt(images, prompts, metadata=None):
    return images.mean(axes)

def needs_a_field(images, prompts, metadata=None):
    return torch.tensor([float(entry["target"]) for entry in metadata])

def not_blank(images, prompts, metadata=None):
    if images.flatten(1).std(1).min() == 0:
        raise RuntimeError("nothing to see")
    return score(images, prompts)

def unlucky(images, prompts, metadata=None):
    torch.rand(3)
    return torch.full((len(images),), torch.nan)

calls = 0

def wrong_on_one(images, prompts, metadata=None):
    global calls
    calls += 1
    # The calls before: the dry one, an iteration, and the second scoring of the pre-flight.
    late = os.environ.get("RANK") == "1" and calls == 4
    return torch.zeros(len(images) + late) if late else score(images, prompts)

def wrong_at_once_on_one(images, prompts, metadata=None):
    return torch.zeros(len(images) + (os.environ.get("RANK") == "1"))

def raises_at_once_on_one(images, prompts, metadata=None):
    return score(images, prompts) / (os.environ.get("RANK") != "1")

if os.environ.get("RANK") == "1":
    raises_at_once_on_one = two
"""
SIGNATURES = {
    "awaited": r"\(dry.awaited, line \d+\) is an async function; .* write a plain function",
    "awaited_one_by_one": "is an async generator",
    "yielding": "is a generator function",
    "two": r"\(dry.two, line \d+\) cannot be called: too many positional arguments. It takes "
    r"\(images, prompts\)",
    "four": "missing a required argument: 'scale'.*is called as .images, prompts, metadata.",
    "named_only": "too many positional arguments",
    "NotCallable": r"objects of class NotCallable cannot be called; give it a method __call__",
    "Awaited": r"\(dry.Awaited.__call__, line \d+\) is an async function",
    "Network": r"\(dry.Network.forward, line \d+\) cannot be called",
    "GroupOfOne": r"GroupOfOne.__call__.*as \(images, prompt, metadata\), where images is \[n, 3, H, W\] of",
}
RESULTS = {
    "returns_a_coroutine": "returned a coroutine: an async function cannot be a reward",
    "numbers": r"returned list, not a torch.Tensor; it must return float32 \(2,\) for 2 images",
    "one_number": r"returned torch.float32 \(\) for 2 images; it must return float32 \(2,\)",
    "column": r"returned torch.float32 \(2, 1\) for 2 images",
    "double": r"returned torch.float64 \(2,\) for 2 images",
    "without_data": r"returned torch.float32 \(2,\), without data \(device meta\)",
    "WrongGroup": r"returned torch.float32 \(3,\) for 2 images",
    "misspelt": r"\(dry.misspelt, line \d+\) raised NameError: name 'axes' is not defined, in a dry call on "
    r"two blank images of 64 x 64 pixels, and also on 2 of noise",
    "needs_a_field": r"\(dry.needs_a_field.*, line \d+\) raised KeyError: 'target'",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "dry.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("dry", None)


@pytest.mark.parametrize("name", SIGNATURES | RESULTS)
def test_it_is_found_before_the_model_is_loaded(folder, monkeypatch, name):
    monkeypatch.setattr(trainer, "load_policy", None)
    monkeypatch.setattr(trainer, "embed_missing", None)
    settings = SMALL | {"rewards": {f"dry:{name}": 1.0}, "out": str(folder / "run")}
    with pytest.raises(ValueError, match=f"reward 'dry:{name}'.*{(SIGNATURES | RESULTS)[name]}"):
        g2rpo.train("tiny", **settings, cache=str(folder / "cache"))
    assert not (folder / "run").exists() and not (folder / "cache").exists()


@pytest.mark.parametrize("command", ["train", "score"])
def test_a_command_says_it_in_one_message(folder, command):
    words = {
        "train": ["train", "tiny", 'rewards={"dry:two"=1.0}', "out=run", "cache=cache", "device=cpu"],
        "score": ["score", "--images", "images", "--rewards", "dry:two", "--prompts", "one.txt"],
    }[command]
    (folder / "images").mkdir()
    (folder / "one.txt").write_text("a red cube\n")
    save_png(torch.zeros(3, 8, 8), folder / "images" / "00000.png", "a red cube")
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 2 and ended.stderr.count("error: ") == 1, ended.stderr
    assert "error: reward 'dry:two' (dry.two" in ended.stderr and "Traceback" not in ended.stderr


def test_objects_that_are_given_in_python_are_checked(folder, monkeypatch):
    import dry

    monkeypatch.setattr(trainer, "load_policy", None)
    for reward, message in ((dry.two, "cannot be called"), (dry.column, r"\(2, 1\) for 2 images")):
        with pytest.raises(ValueError, match=rf"'injected:mine'.*{message}"):
            trainer.Trainer(
                load_settings("tiny", SMALL | {"cache": str(folder), "out": str(folder / "run")}),
                rewards={"mine": reward},
            )


def call(name, metadata=None, **options):
    import dry

    reward = CheckedReward(f"dry:{name}", getattr(dry, name))
    return reward, dry_call(reward, ["a", "b"], metadata, (8, 8), device=CPU, **options)


def test_a_reward_that_scores_no_blank_image_is_used(folder):
    reward, reason = call("not_blank")
    assert reason is None and reward.last_error is None


def test_an_exception_is_only_said_where_samples_without_a_score_are_allowed(folder):
    assert "raised NameError" in call("misspelt", raises=False)[1]


def test_the_prompts_fields_are_given(folder):
    assert call("needs_a_field", [{"target": 1}, {"target": 2}])[1] is None


def test_a_dry_call_changes_no_random_number(folder):
    before = random_state()
    reward, _ = call("unlucky")
    assert random_state() == before and reward.last_error is None


def test_what_takes_three_arguments_is_callable_however_it_is_made():
    class Static:
        @staticmethod
        def __call__(images, prompts, metadata=None):
            return images

    class Any:
        def __call__(self, *args, **kwargs):
            return args

    for reward in (Static, Any, Any(), Any().__call__, print, torch.nn.Identity, torch.nn.Sequential):
        if reward in (torch.nn.Identity, torch.nn.Sequential):  # these take one tensor
            with pytest.raises(ValueError, match="cannot be called"):
                check_signature("own", reward)
        else:
            check_signature("own", reward)


def test_a_wrong_result_is_an_error_that_stops_all_processes():
    reward = CheckedReward("own", lambda images, prompts, metadata=None: images)
    with pytest.raises(WrongResult, match="reward 'own' returned"):
        reward(torch.zeros(2, 3, 4, 4), ["a", "b"])


def train_in(folder, *overrides):
    sys.path.insert(0, str(folder))
    try:
        g2rpo.training.trainer.train(load_settings("tiny", list(overrides)))
    except ValueError as error:
        print(f"error: {error}")
        sys.exit(2)


@pytest.mark.parametrize(
    ("name", "message", "iteration"),
    [
        ("wrong_on_one", r"after iteration 1: reward 'dry:wrong_on_one' returned torch.float32", 1),
        pytest.param("wrong_at_once_on_one", "in a dry call on two blank", None, marks=pytest.mark.long),
        pytest.param("raises_at_once_on_one", "cannot be called", None, marks=pytest.mark.long),
    ],
)
def test_no_peer_hangs_where_one_process_finds_it(tmp_path, name, message, iteration):
    (tmp_path / "dry.py").write_text(MODULE)
    settings = SMALL | {"num_steps": 3, "granularities": [1], "checkpoint_every": 100, "iterations": 3}
    settings |= {"out": tmp_path / "run", "cache": tmp_path / "cache"}
    words = [f"{key}={value}" for key, value in settings.items() if key != "rewards"]
    words.append(f'rewards={{"dry:{name}"=1.0}}')
    ended = run_processes(2, train_in, tmp_path, *words, log=tmp_path / "log")
    assert [code for code, _ in ended] == [2, 2], ended
    assert all(message in text and "Traceback" not in text for _, text in ended), ended
    saved = latest_checkpoint(tmp_path / "run") if (tmp_path / "run").exists() else None
    assert (saved.name if saved else None) == (iteration and f"step_{iteration:06d}")
