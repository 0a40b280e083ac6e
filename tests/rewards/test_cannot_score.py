"""Before a run begins, a reward that cannot score the run's prompts is an error, as far as it says so."""

import json
import sys

import pytest
import torch
from support.small_runs import SMALL

import g2rpo
from g2rpo.rewards.checked import CheckedReward
from g2rpo.rewards.geneval import GenEval
from g2rpo.rewards.ocr import Ocr
from g2rpo.rewards.per_frame import PerFrame
from g2rpo.rewards.verifier import Verifier
from g2rpo.run.metrics import read_metrics
from g2rpo.training import trainer

CPU = torch.device("cpu")
VERIFIER = Verifier(CPU)
CIRCLE = {"include": [{"class": "circle"}]}


@pytest.mark.parametrize(
    "reward, prompt, metadata, reason",
    [
        (VERIFIER, "a cat", {}, "not a caption of the embedded world, such as 'two red circles on gray'"),
        (VERIFIER, "two red circles on gray", {}, None),
        (PerFrame(VERIFIER), "a cat", {}, "not a caption of the embedded world"),
        (PerFrame(lambda images, prompts, metadata=None: images), "a cat", {}, None),
        (Ocr(None), "a sign", {}, "no text in double quotes in 'a sign', and none in the metadata"),
        (Ocr(None), 'a sign "open"', {}, None),
        (Ocr(None), "a sign", {"text": "open"}, None),
        (GenEval(), "a circle", {}, "the metadata has neither include nor exclude"),
        (GenEval(), "a cube", {"include": [{"class": "cube"}]}, "cube"),
        (GenEval(), "a circle", CIRCLE, None),
    ],
)
def test_what_a_reward_says_of_a_prompt(reward, prompt, metadata, reason):
    checked = CheckedReward("name", reward)
    (says,) = CheckedReward("its name", checked).unscorable([prompt], [metadata])
    assert says == checked.cannot_score(prompt, metadata)
    assert says == reason if reason is None else reason in says


def test_the_example_is_a_caption():
    assert VERIFIER.cannot_score("two red circles on gray") is None


def test_a_call_says_why_an_image_has_no_score():
    scores = VERIFIER(torch.zeros(2, 3, 64, 64), ["a blue star", "a cat"])
    assert scores.isnan().tolist() == [False, True] and VERIFIER.last_error.startswith("'a cat': it is not")
    VERIFIER(torch.zeros(1, 3, 64, 64), ["a blue star"])
    assert VERIFIER.last_error is None


def settings(folder, prompts, **more):
    (folder / "mine.json").write_text(json.dumps(prompts))
    return SMALL | {
        "prompts": str(folder / "mine.json"),
        "rewards": {"verifier": 1.0},
        "eval_rewards": [],
        "compare_images": 0,
        "out": str(folder / "run"),
        "cache": str(folder / "cache"),
        **more,
    }


@pytest.mark.parametrize("reward", ["verifier", "geneval"])
def test_it_is_found_before_the_model_is_loaded(tmp_path, monkeypatch, reward):
    monkeypatch.setattr(trainer, "load_policy", None)
    monkeypatch.setattr(trainer, "embed_missing", None)
    prompts = ["a cat", "a red circle", "a dog"]
    number = {"verifier": 2, "geneval": 3}[reward]
    message = (
        rf"reward '{reward}' cannot score {number} of the 3 prompts of .*mine.json, such as 'a cat': .*At "
        rf"most 10% of the samples may have no score \(max_invalid_fraction\).*rewards.{reward}=none removes"
    )
    with pytest.raises(ValueError, match=message):
        g2rpo.train("tiny", **settings(tmp_path, prompts, rewards={reward: 1.0}, iterations=3))
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


def test_a_few_of_them_are_said_and_left_out(tmp_path, capsys):
    prompts = ["a red circle", "a cat"]
    few = settings(
        tmp_path,
        prompts,
        iterations=1,
        prompts_per_iteration=2,
        max_invalid_fraction=0.5,
        num_sample_prompts=1,
    )
    g2rpo.train("tiny", **few)
    assert "cannot score 1 of the 2 prompts" in capsys.readouterr().out
    (line,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert line["invalid_fraction"] == 0.5


def test_prompts_of_which_the_run_uses_none_do_not_matter(tmp_path, monkeypatch):
    class Reached(Exception):
        pass

    def stop(*_, **__):
        raise Reached

    monkeypatch.setattr(trainer, "embed_missing", stop)
    outcomes = set()
    for seed in range(20):
        one = settings(tmp_path, ["a red circle", "a cat"], seed=seed, iterations=1, prompts_per_iteration=1)
        (used,) = trainer.RunPrompts.of(g2rpo.load_settings("tiny", one)).trained
        with pytest.raises(ValueError if used.text == "a cat" else Reached):
            g2rpo.train("tiny", **one)
        outcomes.add(used.text)
    assert len(outcomes) == 2


@pytest.mark.parametrize(
    "body, message",
    [("1 / 0", "its method cannot_score raised ZeroDivisionError"), ("exit(3)", "exit")],
)
def test_a_method_that_fails_is_an_error(tmp_path, monkeypatch, body, message):
    (tmp_path / "asked.py").write_text(
        "class Asked:\n    def __init__(self, device): pass\n"
        "    def __call__(self, images, prompts, metadata=None): return images.mean((1, 2, 3))\n"
        f"    def cannot_score(self, prompt, metadata=None): {body}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(trainer, "load_policy", None)
    with pytest.raises(ValueError, match=message) as caught:
        g2rpo.train("tiny", **settings(tmp_path, ["a cat"], rewards={"asked:Asked": 1.0}))
    assert "asked:Asked" in str(caught.value)
    sys.modules.pop("asked")
