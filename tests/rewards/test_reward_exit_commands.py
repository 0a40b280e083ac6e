"""Commands whose reward ends the program: no exit code 0 without a result, and what is complete is kept."""

import json
import re
import sys

import pytest
import torch
from support.processes import run_command, run_processes

from g2rpo.config.load import load_settings
from g2rpo.inference.images import save_png
from g2rpo.run.folder import latest_checkpoint
from g2rpo.run.metrics import read_metrics
from g2rpo.training.trainer import train

SCORE = "def score(images, prompts, metadata=None):\n    return images.mean((1, 2, 3))\n"
PARSING = "import argparse\nparser = argparse.ArgumentParser()\nparser.parse_args()\n" + SCORE

# The reward ends the program after as many calls as its file `after` says, while that is there.
LEAVING = """
import pathlib
import sys

after = pathlib.Path(__file__).with_name("after")
calls = 0

def score(images, prompts, metadata=None):
    global calls
    calls += 1
    if after.exists() and calls > int(after.read_text()):
        sys.exit(0)
    return images.mean((1, 2, 3))
"""
SETTINGS = {
    "prompts": "world:demo",
    "prompts_per_iteration": "1",
    "num_steps": "3",
    "train_steps": "2",
    "granularities": "[1]",
    "group_size": "3",
    "eval_every": "0",
    "sample_every": "0",
    "compare_images": "0",
    "num_sample_prompts": "1",
    "eval_num_steps": "1",
    "tensorboard": "false",
    "warmup_iterations": "0",
    "ema_decay": "0",
    "device": "cpu",
    "iterations": "3",
    "rewards": "{'leaving:score'=1.0}",
    "checkpoint_every": "100",
}


def words(**changes):
    return [f"{key}={value}" for key, value in (SETTINGS | changes).items()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With the module `leaving`, forgotten after the test."""
    (tmp_path / "leaving.py").write_text(LEAVING)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("leaving", None)


def training(folder, **changes):
    return run_command("train", "tiny", *words(cache=folder / "cache", **changes), cwd=folder)


def test_train_keeps_what_is_complete_and_goes_on(folder):
    (folder / "after").write_text("4")  # a dry call, the pre-flight's, and a rollout's images are one batch
    ended = training(folder, out="run")
    assert ended.returncode == 2, ended.stderr
    told = " ".join(ended.stderr.split())
    assert re.search(
        r"error: after iteration 2: reward 'leaving:score' \(leaving.score, line 12\) called sys.exit\(0\) "
        r"while scoring; .* A checkpoint of iteration 2 is in .*run; correct the reward, and the same ",
        told,
    ), told
    assert "Traceback" not in ended.stderr and latest_checkpoint(folder / "run").name == "step_000002"
    (folder / "after").unlink()
    assert training(folder, out="run").returncode == 0 and training(folder, out="whole").returncode == 0

    def numbers(run):
        return [
            {name: value for name, value in line.items() if "seconds" not in name and "memory" not in name}
            for line in read_metrics(folder / run / "metrics.jsonl")
        ]

    assert numbers("run") == numbers("whole") and len(numbers("run")) == 3


@pytest.mark.parametrize(
    "changes",
    [{"compare_images": "1"}, {"eval_every": "1", "eval_prompts": "world:heldout", "num_eval_prompts": "1"}],
    ids=["before training", "evaluation"],
)
def test_train_stops_where_the_first_images_are_scored(folder, changes, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "after").write_text("1")  # the dry call
    with pytest.raises(ValueError, match="after iteration 0: reward 'leaving:score'"):
        train(load_settings("tiny", words(cache=folder / "cache", out="run", **changes)))
    (folder / "after").unlink()
    settings = words(cache=folder / "cache", out="run", **changes, stop_after="1")
    assert train(load_settings("tiny", settings)).step == 1


@pytest.mark.parametrize("command", ["train", "plan", "score", "evaluate", "compare"])
def test_no_command_ends_well_where_a_module_exits(folder, command):
    (folder / "leaving.py").write_text(PARSING if command == "train" else "raise SystemExit(0)\n")
    draw = ["--prompts", "world:demo", "--limit", "1", "--steps", "1", "--rewards", "leaving:score"]
    out = ["--out", "out"]
    save_png(torch.zeros(3, 8, 8), folder / "images" / "0.png", "a red cube", {"seed": 0})
    ended = run_command(
        *{
            "train": ["train", "tiny", *words(out="out")],
            "plan": ["plan", "tiny", *words(out="out"), "--measure"],
            "score": ["score", "--images", "images", "--rewards", "leaving:score", *out],
            "evaluate": ["evaluate", "tiny", *draw, *out],
            "compare": ["compare", "tiny", *words(), "--seeds", "0", *out],
        }[command],
        cwd=folder,
    )
    assert ended.returncode == (1 if command == "compare" else 2), ended.stderr
    said = " ".join((ended.stdout + ended.stderr).split())
    assert re.search(r"'leaving:score' \(leaving, line \d\) called sys.exit\(\d\) while its", said), said
    assert "Traceback" not in said


@pytest.mark.long
def test_plan_measures_no_reward_that_exits(folder):
    (folder / "after").write_text("0")
    ended = run_command("plan", "tiny", *words(out="out"), "--measure", cwd=folder)
    assert ended.returncode == 2 and "leaving.score, line 12" in " ".join(ended.stderr.split())


def test_score_keeps_the_rows_it_has(folder):
    (folder / "after").write_text("1")
    for i in range(3):
        save_png(torch.full((3, 8, 8), i / 4), folder / "images" / f"{i}.png", "a red cube", {"seed": i})
    command = ["score", "--images", "images", "--rewards", "leaving:score", "--batch", "1", "--out", "out"]
    ended = run_command(*command, cwd=folder)
    said = " ".join(ended.stderr.split())
    assert ended.returncode == 2 and "(leaving.score, line 12) called sys.exit(0) while scoring" in said
    assert "1 rows are kept in out/scores.csv" in said
    assert len((folder / "out" / "scores.csv").read_text().splitlines()) == 2
    assert json.loads((folder / "out" / "scores.json").read_text())["complete"] is False
    (folder / "after").unlink()
    ended = run_command(*command, cwd=folder)
    assert ended.returncode == 0 and "1 were scored before and are kept" in ended.stdout


def test_evaluate_keeps_what_it_has(folder):
    (folder / "after").write_text("1")
    command = [
        "evaluate",
        "tiny",
        "--prompts",
        "world:demo",
        "--limit",
        "2",
        "--steps",
        "1",
        "--batch",
        "1",
        "--rewards",
        "leaving:score",
        "--out",
        "out",
    ]
    ended = run_command(*command, cwd=folder)
    said = " ".join(ended.stderr.split())
    assert ended.returncode == 2 and "Finished images and scores are kept in out" in said, said
    assert len((folder / "out" / "scores.csv").read_text().splitlines()) == 2
    (folder / "after").unlink()
    ended = run_command(*command, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert len((folder / "out" / "scores.csv").read_text().splitlines()) == 3


def train_in(folder, *overrides):
    sys.path.insert(0, str(folder))
    try:
        train(load_settings("tiny", list(overrides)))
    except ValueError as error:
        print(f"error: {error}")
        sys.exit(2)


ONE_OF_TWO = {
    "a call": "import os\ncalls = 0\ndef score(images, prompts, metadata=None):\n    global calls\n"
    "    calls += 1\n    if os.environ['RANK'] == '1' and calls == 4:\n        exit(0)\n"
    "    return images.mean((1, 2, 3))\n",
    "an import": "import os\nif os.environ['RANK'] == '1':\n    exit(0)\n" + SCORE,
    "describe": "import os\nclass score:\n    def __init__(self, device):\n        pass\n"
    "    def __call__(self, images, prompts, metadata=None):\n        return images.mean((1, 2, 3))\n"
    "    def describe(self):\n        exit(0) if os.environ['RANK'] == '1' else None\n",
}


@pytest.mark.parametrize(
    "where",
    [pytest.param(where, marks=() if where == "a call" else pytest.mark.long) for where in ONE_OF_TWO],
)
def test_all_processes_stop_where_one_reward_exits(tmp_path, where):
    (tmp_path / "leaving.py").write_text(ONE_OF_TWO[where])
    out = tmp_path / "run"
    settings = words(out=out, cache=tmp_path / "cache", prompts_per_iteration="2", decode_batch="24")
    ended = run_processes(2, train_in, tmp_path, *settings, log=tmp_path / "log")
    assert [code for code, _ in ended] == [2, 2], ended
    assert all("called sys.exit(0)" in text and "Traceback" not in text for _, text in ended)
    steps = {"a call": "step_000001", "describe": "step_000000"}
    assert (latest_checkpoint(out).name if where in steps else None) == steps.get(where)


def test_an_evaluation_on_one_of_two_processes_stops_both(tmp_path):
    text = ONE_OF_TWO["a call"].replace("calls == 4", "calls == 2")
    (tmp_path / "leaving.py").write_text(text)
    settings = words(
        out=tmp_path / "run",
        cache=tmp_path / "cache",
        prompts_per_iteration="2",
        eval_every="1",
        eval_prompts="world:heldout",
        num_eval_prompts="2",
    )
    ended = run_processes(2, train_in, tmp_path, *settings, log=tmp_path / "log")
    assert [code for code, _ in ended] == [2, 2], ended
    assert all("after iteration 0: reward 'leaving:score'" in text for _, text in ended)
