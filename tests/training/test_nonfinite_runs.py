"""Runs in which a loss, a gradient or rewards are not finite, on one process and on one of several."""

import json
import math
import os

import pytest
import torch
from support.processes import run_processes, train_as
from support.small_runs import SMALL, timeless

import g2rpo
from g2rpo.objectives.grpo import GrpoObjective
from g2rpo.run.checkpoint_index import read_tensors
from g2rpo.run.folder import latest_checkpoint
from g2rpo.run.metrics import read_metrics
from g2rpo.run.run import RunStopped
from g2rpo.run.warnings_file import read_warnings
from g2rpo.training.step_checks import GRADIENT, LOSS, REWARD

REWARDS = """
import pathlib, torch

down = pathlib.Path(__file__).with_name("down")

def brightness(images, prompts, metadata=None):
    blank = images.flatten(1).std(1).max() == 0  # those of the call before a run
    if down.exists() and not blank:
        raise ConnectionError("the scorer is down")
    return images.mean((1, 2, 3))
"""


def broken_loss(monkeypatch, what, updates):
    """Breaks the loss of the given updates, counted from 1, each of one batch."""
    loss, count = GrpoObjective.loss, [0]

    def breaks(self, rows, velocity, **others):
        count[0] += 1
        if count[0] in updates and what == GRADIENT:
            velocity.register_hook(lambda gradient: gradient * math.nan)
        result = loss(self, rows, velocity, **others)
        if count[0] in updates and what == LOSS:  # its gradient stays finite
            result = type(result)(result.value + math.nan, result.mean, result.max, result.by_step)
        return result

    monkeypatch.setattr(GrpoObjective, "loss", breaks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nonfinite")
    (folder / "nonfinite_rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture
def run(folder, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))

    def train(out="run", **changes):
        values = {
            **SMALL,
            "num_steps": 3,
            "granularities": [1],
            "update_batch": 64,
            "checkpoint_every": 1,
            "lora_rank": 2,
        }
        values |= {"rewards": {"nonfinite_rewards:brightness": 1.0}, "cache": str(folder / "cache")}
        return g2rpo.train("tiny", **{**values, "out": str(tmp_path / out), **changes})

    return train


def module_of(out, step):
    """The trained weights in a checkpoint."""
    tensors = read_tensors(out / "checkpoints" / f"step_{step:06d}")
    return {name: tensor for name, tensor in tensors.items() if name.startswith("module")}


@pytest.mark.parametrize("what", [LOSS, pytest.param(GRADIENT, marks=pytest.mark.long)])
def test_a_run_stops_or_skips_as_configured_and_says_where(run, tmp_path, monkeypatch, what):
    with monkeypatch.context() as patch:
        broken_loss(patch, what, {2})
        with pytest.raises(
            RunStopped, match=r"iteration 2: the (loss|gradient's norm) is nan.*on_nonfinite=skip"
        ):
            run(iterations=3)
    out = tmp_path / "run"
    assert latest_checkpoint(out).name == "step_000001"
    assert read_warnings(out)[-1]["message"].endswith("; the run stops")
    broken_loss(monkeypatch, what, {1})  # that of the resumed run's first update, iteration 2
    done = run(iterations=3, on_nonfinite="skip", keep_last=9)
    lines = done.metrics
    assert [line["step"] for line in lines] == [1, 2, 3] and done.finished
    assert lines[1][what] == 1 and lines[1]["loss"] is None and lines[1]["grad_norm"] is None
    assert not any(name.startswith("nonfinite") for line in (lines[0], lines[2]) for name in line)
    assert all(isinstance(lines[2][name], float) for name in ("loss", "grad_norm", "ratio_max_dev"))
    warning = read_warnings(out)[-1]
    assert warning["kind"] == what and warning["step"] == 2 and len(warning["prompts"]) == 2
    assert warning["message"].endswith("is nan at optimizer step 1 of 1; skipped")
    one, two, three = (module_of(out, step) for step in (1, 2, 3))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(two[name], three[name]) for name in two)


def test_missing_rewards_skip_the_update_until_the_limit_and_the_run_resumes(run, folder, tmp_path):
    changes = {"iterations": 4, "on_nonfinite": "skip", "max_skips": 2}
    down = folder / "down"
    run(stop_after=1, **changes)
    down.touch()
    try:
        with pytest.raises(
            RunStopped, match=r"iteration 4: 100% of the samples have no reward.*scorer is down"
        ):
            run(**changes)
    finally:
        down.unlink()
    out = tmp_path / "run"
    lines = read_metrics(out / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line[REWARD] == 2 * 2 * 3 for line in lines[1:])  # groups x noise steps x members
    assert all(line["loss"] is None and line["invalid_fraction"] == 1 for line in lines[1:])
    assert REWARD not in lines[0]
    assert json.loads((latest_checkpoint(out) / "state.json").read_text())["step_checks"]["skipped"] == 2
    done = run(**changes)
    assert done.finished and isinstance(done.metrics[-1]["loss"], float)


@pytest.mark.long
def test_a_skip_that_is_resumed_gives_the_numbers_of_the_undisturbed_run(run, monkeypatch):
    """The third update is broken; a stop just before it, and one just after it."""
    changes = {"iterations": 4, "on_nonfinite": "skip"}
    runs = []
    for stops in ((), (2,), (3,)):
        for first, last in zip((0, *stops), (*stops, 4), strict=True):
            with monkeypatch.context() as patch:
                broken_loss(patch, GRADIENT, {3 - first})
                runs.append(run(f"stops_{stops}", **changes, stop_after=last))
    whole, _, before, _, after = runs
    assert timeless(before.metrics) == timeless(after.metrics) == timeless(whole.metrics)
    assert read_warnings(before.out) == read_warnings(after.out) == read_warnings(whole.out)


def train_broken(what, *settings):
    """A process of a run, in the second of which the second update is broken."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            broken_loss(patch, what, {2})
        train_as("tiny", *settings)


@pytest.mark.parametrize(
    ("what", "on_nonfinite"),
    [(LOSS, "skip"), (LOSS, "stop"), pytest.param(GRADIENT, "skip", marks=pytest.mark.long)],
)
def test_processes_agree_on_what_only_one_of_them_sees(tmp_path, folder, what, on_nonfinite):
    """Without an agreement one would take the step or end, and the other would wait for it for ever."""
    values = {
        **SMALL,
        "num_steps": 3,
        "granularities": [1],
        "update_batch": 64,
        "iterations": 3,
        "lora_rank": 2,
    }
    del values["rewards"]
    settings = [f"{name}={value}".lower() for name, value in values.items()]
    settings += ["rewards.tiny_preference=1.0", f"cache={folder / 'cache'}", f"out={tmp_path / 'run'}"]
    settings += [f"on_nonfinite={on_nonfinite}", "checkpoint_every=1", "keep_last=9"]
    ended = run_processes(2, train_broken, what, *settings, log=tmp_path / "log")
    texts = [text for _, text in ended]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    (warning,) = (w for w in read_warnings(tmp_path / "run") if w["kind"] != "preflight")
    assert warning["step"] == 2 and len(warning["prompts"]) == 2, "the prompts of both processes"
    assert texts[0].count("pre-flight: reward tiny_preference") == 1 and "pre-flight" not in texts[1]
    if on_nonfinite == "stop":
        assert [code for code, _ in ended] == [1, 1], texts
        assert all("iteration 2: the loss is nan at optimizer step 1 of 1" in text for text in texts)
        assert [line["step"] for line in lines] == [1]
        assert latest_checkpoint(tmp_path / "run").name == "step_000001"
        return
    assert [code for code, _ in ended] == [0, 0], texts
    assert [what in line for line in lines] == [False, True, False] and lines[1][what] == 1
    one, two, three = (module_of(tmp_path / "run", step) for step in (1, 2, 3))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(two[name], three[name]) for name in two)
