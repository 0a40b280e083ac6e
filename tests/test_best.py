"""keep_best: which evaluation is the best, that its checkpoint stays, and that RUN/best opens it."""

import json
import sys
import types

import pytest
import torch
from test_trainer import SMALL
from typer.testing import CliRunner

import g2rpo
from g2rpo.__main__ import app
from g2rpo.best import best_checkpoint, is_best
from g2rpo.checkpoint import latest_checkpoint
from g2rpo.config import load_settings
from g2rpo.export import export_run
from g2rpo.named import check_model, labels_of, model_state
from g2rpo.saved import open_run

RUN = SMALL | {
    "prompts_per_iteration": 1, "granularities": [1], "eval_every": 1, "eval_prompts": "world:heldout",
    "num_eval_prompts": 2, "eval_rewards": ["scripted:judge"], "keep_best": "scripted:judge", "keep_last": 1,
    "checkpoint_every": 100,
}  # fmt: skip


@pytest.fixture
def judge(monkeypatch):
    """A reward that says one number after another, one each evaluation."""
    module = types.ModuleType("scripted")

    def score(images, prompts, metadata):
        return torch.full((len(images),), module.says.pop(0))

    module.judge = score
    monkeypatch.setitem(sys.modules, "scripted", module)
    return module


@pytest.fixture
def train(tmp_path, judge):
    def run(says, out="run", **changes):
        judge.says = list(says)
        values = RUN | {"cache": str(tmp_path / "cache"), "out": str(tmp_path / out)} | changes
        return g2rpo.train("tiny", **values)

    return run


def weights(path):
    policy, _, state = open_run(path, device="cpu")
    return state["iteration"], {n: p.detach().clone() for n, p in policy.module.named_parameters()}


@pytest.mark.parametrize(
    "values, expected",
    [
        ([0.5, 0.6, 0.8, 0.7], [False, True, True, False]),
        ([0.5, 0.5, 0.4], [False, False, False]),  # no better than the untrained model
        ([0.5, None, 0.6, 0.6], [False, False, True, False]),  # what was not judged is not the best
        ([None, 0.3, 0.2], [False, True, False]),
    ],
)
def test_which_evaluation_is_the_best(tmp_path, values, expected):
    lines = [{"step": i, "eval/verifier": v, "eval/other": -i} for i, v in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [is_best(tmp_path, "verifier", i) for i in range(len(values))] == expected
    assert not is_best(tmp_path, "verifier", len(values))  # not evaluated


def test_the_best_stays_and_opens(train, tmp_path):
    done = train([0.5, 0.6, 0.8, 0.7, 0.1], iterations=4, ema_decay=0.9)
    names = sorted(path.name for path in (done.out / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000004"]  # 1 was the best once
    assert (done.out / "best").read_text() == "step_000002\n"
    assert best_checkpoint(done.out).name == "step_000002" and latest_checkpoint(done.out).name == names[1]
    iteration, best = weights(done.out / "best")
    assert iteration == 2
    train([0.5, 0.6, 0.8], "short", iterations=2, ema_decay=0.9)
    assert all(torch.equal(one, best[name]) for name, one in weights(tmp_path / "short")[1].items())
    assert not all(torch.equal(one, best[name]) for name, one in weights(done.out)[1].items())


def test_every_command_knows_its_name(train):
    done = train([0.5, 0.8, 0.7], iterations=2)
    check_model(f"{done.out}/best")
    assert labels_of([str(done.out), f"{done.out}/best"]) == ["run", "run_best"]
    assert model_state(f"{done.out}/best") != model_state(str(done.out))
    assert model_state(f"{done.out}/best") == model_state(f"{done.out}/checkpoints/step_000001")
    folder = export_run(f"{done.out}/best", done.out.parent / "tuned")
    assert json.loads((folder / "g2rpo.json").read_text())["iteration"] == 1


def test_the_command_says_so(judge, tmp_path):
    judge.says = [0.5, 0.8, 0.7]
    values = RUN | {
        "cache": tmp_path / "cache",
        "out": tmp_path / "run",
        "iterations": 2,
        "tensorboard": "false",
    }
    words = [
        f"{key}={json.dumps(value) if isinstance(value, list) else value}" for key, value in values.items()
    ]
    words = [word for word in words if not word.startswith("rewards=")] + ["rewards={tiny_clip=1.0}"]
    told = CliRunner().invoke(app, ["train", "tiny", *words])
    assert told.exit_code == 0, told.output
    assert "the best yet by scripted:judge: checkpoint in" in told.output
    assert (
        f"  g2rpo export {tmp_path}/run/best --out FOLDER    # step_000001, the best by scri" in told.output
    )


def test_a_run_that_goes_on_keeps_it(train):
    train([0.5, 0.8], iterations=4, stop_after=1)
    done = train([0.7, 0.6, 0.9], iterations=4)
    assert (done.out / "best").read_text() == "step_000004\n"
    assert [path.name for path in (done.out / "checkpoints").iterdir()] == ["step_000004"]


def test_an_evaluation_that_an_interrupt_cut_off_still_counts(train):
    done = train([0.5, 0.6, 0.8], iterations=2)
    metrics = done.out / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines() if '"step": 2' not in line or "nfe" in line]
    metrics.write_text("\n".join(lines) + "\n")
    (done.out / "best").unlink()
    train([0.9], iterations=2)
    assert (done.out / "best").read_text() == "step_000002\n"


def test_none_is_better_than_the_base(train):
    done = train([0.5, 0.4, 0.5], iterations=2)
    assert not (done.out / "best").exists()
    for ask in (best_checkpoint, lambda out: check_model(f"{out}/best"), lambda out: open_run(out / "best")):
        with pytest.raises(ValueError, match="no evaluation was above the untrained model's yet"):
            ask(done.out)


def test_a_damaged_one_is_said(train):
    done = train([0.5, 0.6, 0.2], iterations=2)
    next(best_checkpoint(done.out).glob("*.distcp")).unlink()
    with pytest.raises(ValueError, match=r"best names step_000001: .*distcp is missing; .* opens its newest"):
        open_run(done.out / "best")
    assert weights(done.out)[0] == 2


@pytest.mark.parametrize(
    "given, said",
    [
        (
            {"keep_best": "aesthetic"},
            r"keep_best='aesthetic' is not evaluated; take one of \['tiny_clip', 'ver",
        ),
        (
            {"keep_best": "verifier", "eval_every": 0},
            "keep_best='verifier' needs evaluations: set eval_every",
        ),
    ],
)
def test_settings_without_sense(given, said):
    values = SMALL | {"eval_every": 5, "eval_prompts": "world:demo", "eval_rewards": ["verifier"]} | given
    with pytest.raises(ValueError, match=said):
        load_settings("tiny", values)


def test_the_plan_counts_it():
    watched = {"eval_every": 5, "eval_prompts": "world:demo", "keep_last": 2, "checkpoint_every": 1}
    plain, kept = (g2rpo.plan("tiny", **SMALL | watched | more) for more in ({}, {"keep_best": "tiny_clip"}))
    assert "checkpoints (2 kept, 1 in writing)" in plain.disk
    assert kept.disk["checkpoints (3 kept, 1 in writing)"] == 4 * kept.disk["a checkpoint"]
