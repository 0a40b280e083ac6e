"""keep_best: which evaluation is the best, that its checkpoint is kept, and that RUN/best opens it."""

import json
import shutil
import sys
import types

import pytest
import torch
from support.small_runs import SMALL
from typer.testing import CliRunner

import g2rpo
from g2rpo.__main__ import app
from g2rpo.config.load import load_settings
from g2rpo.exporters.export import export_run
from g2rpo.inference.names import check_model, labels_of, model_state
from g2rpo.inference.open import open_run
from g2rpo.run.best import best_checkpoint, is_best, kept_best, mark_best
from g2rpo.run.folder import latest_checkpoint

RUN = SMALL | {
    "prompts_per_iteration": 1,
    "granularities": [1],
    "eval_every": 1,
    "eval_prompts": "world:heldout",
    "num_eval_prompts": 2,
    "eval_rewards": ["scripted:judge"],
    "keep_best": "scripted:judge",
    "keep_last": 1,
    "checkpoint_every": 100,
}


def prescribed(next_score):
    """A reward that gives all images of a call the next score."""

    def score(images, prompts, metadata):
        if images.flatten(1).std(1).max() == 0:  # the blank images of the call before a run
            return torch.zeros(len(images))
        return torch.full((len(images),), next_score())

    return score


@pytest.fixture
def judge(monkeypatch):
    """A reward with prescribed scores, one per evaluation."""
    module = types.ModuleType("scripted")
    module.judge = prescribed(lambda: module.says.pop(0))
    monkeypatch.setitem(sys.modules, "scripted", module)
    return module


@pytest.fixture
def train(tmp_path, judge):
    def run(says, out="run", **changes):
        judge.says = list(says)
        values = RUN | {"cache": str(tmp_path / "cache"), "out": str(tmp_path / out)} | changes
        return g2rpo.train("tiny", **values)

    return run


@pytest.fixture(scope="module")
def two_iterations(tmp_path_factory):
    """A run of two iterations, of which the first is the best; `best_first` is a copy for each test."""
    folder = tmp_path_factory.mktemp("two_iterations")
    module = types.ModuleType("scripted")
    scores = [0.5, 0.8, 0.7]
    module.judge = prescribed(lambda: scores.pop(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "scripted", module)
        values = RUN | {"cache": str(folder / "cache"), "out": str(folder / "run"), "iterations": 2}
        return g2rpo.train("tiny", **values).out


@pytest.fixture
def best_first(two_iterations, tmp_path):
    return shutil.copytree(two_iterations, tmp_path / "run", symlinks=True)


def weights(path):
    policy, _, state = open_run(path, device="cpu")
    return state["iteration"], {n: p.detach().clone() for n, p in policy.module.named_parameters()}


@pytest.mark.parametrize(
    "values, expected",
    [
        ([0.5, 0.6, 0.8, 0.7], [False, True, True, False]),
        ([0.5, 0.5, 0.4], [False, False, False]),  # no better than the untrained model
        ([0.5, None, 0.6, 0.6], [False, False, True, False]),  # what was not evaluated is not the best
        ([None, 0.3, 0.2], [False, True, False]),
    ],
)
def test_which_evaluation_is_the_best(tmp_path, values, expected):
    results = []
    for i, value in enumerate(values):
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": i, "eval/verifier": value, "eval/other": -i}) + "\n")
        results.append(is_best(tmp_path, "verifier", i))
        if results[-1]:
            mark_best(tmp_path, i, "verifier")
    assert results == expected
    assert not is_best(tmp_path, "verifier", len(values))  # not evaluated


def test_the_best_stays_and_opens(train, tmp_path):
    done = train([0.5, 0.6, 0.8, 0.7, 0.1], iterations=4, ema_decay=0.9)
    names = sorted(path.name for path in (done.out / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000004"]  # 1 was the best once
    assert (done.out / "best").read_text() == "step_000002 scripted:judge\n"
    assert best_checkpoint(done.out).name == "step_000002" and latest_checkpoint(done.out).name == names[1]
    iteration, best = weights(done.out / "best")
    assert iteration == 2
    train([0.5, 0.6, 0.8], "short", iterations=2, ema_decay=0.9)
    assert all(torch.equal(one, best[name]) for name, one in weights(tmp_path / "short")[1].items())
    assert not all(torch.equal(one, best[name]) for name, one in weights(done.out)[1].items())


def test_every_command_knows_its_name(best_first):
    check_model(f"{best_first}/best")
    assert labels_of([str(best_first), f"{best_first}/best"]) == ["run", "run_best"]
    assert model_state(f"{best_first}/best") != model_state(str(best_first))
    assert model_state(f"{best_first}/best") == model_state(f"{best_first}/checkpoints/step_000001")
    folder = export_run(f"{best_first}/best")
    assert folder == best_first / "export_best" and labels_of([str(folder)]) == ["run_best"]
    assert json.loads((folder / "g2rpo.json").read_text())["iteration"] == 1


def test_a_run_that_is_called_best(train):
    done = train([0.5, 0.6], "best", iterations=1)
    assert export_run(done.out) == done.out / "export" and labels_of([str(done.out)]) == ["best"]
    assert export_run(done.out / "best") == done.out / "export_best"


def test_the_command_says_so(judge, tmp_path):
    judge.says = [0.5, 0.8, 0.7]
    values = RUN | {
        "cache": tmp_path / "cache",
        "out": tmp_path / "run",
        "iterations": 2,
    }
    words = [
        f"{key}={json.dumps(value) if isinstance(value, list) else value}" for key, value in values.items()
    ]
    words = [word for word in words if not word.startswith("rewards=")] + ["rewards={tiny_clip=1.0}"]
    result = CliRunner().invoke(app, ["train", "tiny", *words])
    assert result.exit_code == 0, result.output
    assert "the best yet by scripted:judge: checkpoint in" in result.output
    assert f"  g2rpo export {tmp_path}/run/best    # step_000001, the best by scripted:judge" in result.output


def test_a_run_that_goes_on_keeps_it(train):
    train([0.5, 0.8], iterations=4, stop_after=1)
    done = train([0.7, 0.6, 0.9], iterations=4)
    assert (done.out / "best").read_text().startswith("step_000004 ")
    assert [path.name for path in (done.out / "checkpoints").iterdir()] == ["step_000004"]


def test_an_evaluation_that_an_interrupt_cut_off_still_counts(train):
    done = train([0.5, 0.6, 0.8], iterations=2)
    metrics = done.out / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines() if '"step": 2' not in line or "nfe" in line]
    metrics.write_text("\n".join(lines) + "\n")
    (done.out / "best").unlink()
    train([0.9], iterations=2)
    assert (done.out / "best").read_text().startswith("step_000002 ")


@pytest.mark.parametrize("kept", ["", "step 2"])
def test_lost_lines_of_metrics_make_no_worse_model_the_best(train, kept, caplog):
    done = train([0.5, 0.2, 0.3], iterations=2)
    metrics = done.out / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines() if kept and '"step": 2' in line]
    metrics.write_text("".join(f"{line}\n" for line in lines))
    if not kept:  # an evaluation of which nothing is left is ignored, and named
        (done.out / "evaluations" / "step_000001.json").write_text("")
    # Above the last one, below the untrained model; iteration 2 is evaluated again where its line is lost.
    train([0.4, 0.4], iterations=3)
    assert not (done.out / "best").exists()
    ignored = [text for text in caplog.messages if "step_000001.json" in text and "is ignored" in text]
    assert len(ignored) == (0 if kept else 1)
    train([0.6], iterations=4)
    assert (done.out / "best").read_text().startswith("step_000004 ")


def test_none_is_better_than_the_base(train):
    done = train([0.5, 0.4, 0.5], iterations=2)
    assert not (done.out / "best").exists()
    for ask in (best_checkpoint, lambda out: check_model(f"{out}/best"), lambda out: open_run(out / "best")):
        with pytest.raises(ValueError, match="no evaluation with a checkpoint was above the untrained"):
            ask(done.out)


def test_a_damaged_best_is_reported(best_first):
    next(best_checkpoint(best_first).glob("*.distcp")).unlink()
    with pytest.raises(
        ValueError, match=r"does not lead to a checkpoint: step_000001: .*distcp is missing. .*newest"
    ):
        open_run(best_first / "best")
    assert weights(best_first)[0] == 2


@pytest.mark.parametrize(
    "given, expected",
    [
        (
            {"keep_best": "aesthetic"},
            r"keep_best='aesthetic' is not evaluated; use none or one of \['tiny_clip', 'ver",
        ),
        (
            {"keep_best": "verifier", "eval_every": 0},
            "keep_best='verifier' needs evaluations: set eval_every",
        ),
    ],
)
def test_settings_without_sense(given, expected):
    values = SMALL | {"eval_every": 5, "eval_prompts": "world:demo", "eval_rewards": ["verifier"]} | given
    with pytest.raises(ValueError, match=expected):
        load_settings("tiny", values)


def test_the_plan_counts_it():
    evaluation = {"eval_every": 2, "eval_prompts": "world:demo", "keep_last": 3, "checkpoint_every": 100}
    evaluation |= {"iterations": 8}
    plain, kept = (
        g2rpo.plan("tiny", **SMALL | evaluation | more) for more in ({}, {"keep_best": "tiny_clip"})
    )
    assert "checkpoints (1 kept, 1 being written)" in plain.disk
    assert kept.disk["checkpoints (4 kept, 1 being written)"] == 5 * kept.disk["one checkpoint"]


# What may change while a run stops.


@pytest.mark.long
def test_evaluations_of_another_kind_are_not_compared(train):
    done = train([0.5, 0.9, 0.8], iterations=6, stop_after=2)
    assert kept_best(done.out) == ("step_000001", "scripted:judge")
    done = train([0.2, 0.3, 0.25, 0.1], iterations=6, eval_num_steps=3)  # the worse ones are of harder images
    assert kept_best(done.out)[0] == "step_000004"
    assert [path.name for path in sorted((done.out / "checkpoints").iterdir())] == [
        "step_000004",
        "step_000006",
    ]


@pytest.mark.long
def test_another_judge_has_its_own_best(train, judge, tmp_path):
    two = {"eval_rewards": ["scripted:judge", "scripted:other"], "keep_last": 9, "checkpoint_every": 1}
    said = [0.1, 0.2, 0.3, 0.2]
    judge.other = prescribed(lambda: said.pop(0))
    done = train([0.1, 0.5, 0.4, 0.3], iterations=3, **two)
    assert kept_best(done.out) == ("step_000001", "scripted:judge")
    train([], iterations=3, **two | {"keep_best": "scripted:other"})
    assert kept_best(done.out) == ("step_000002", "scripted:other")
    train([], iterations=3, **two | {"keep_best": None})
    assert kept_best(done.out) == ("step_000002", "scripted:other")


@pytest.mark.long
def test_a_better_one_that_was_not_kept_is_reported(train, capsys):
    done = train([0.5, 0.9, 0.7, 0.6], iterations=4, stop_after=3, keep_best=None, checkpoint_every=1)
    train([0.65], iterations=4)
    output = capsys.readouterr().out
    assert "the best by scripted:judge was after iteration 1; that checkpoint no longer exists" in output
    assert kept_best(done.out)[0] == "step_000004"  # above iteration 3's, the best of what was there


def test_a_run_that_starts_anew_has_no_best(train):
    done = train([0.1, 0.9], iterations=1)
    (done.out / "latest").unlink()
    shutil.rmtree(done.out / "checkpoints")
    (done.out / "finished").unlink()
    train([0.3, 0.2], iterations=1)
    assert not (done.out / "best").exists()


@pytest.mark.long
def test_rubbish_in_the_pointer(train, judge):
    done = train([0.5, 0.6, 0.2], iterations=3, stop_after=2, keep_last=2)
    for rubbish in (b"", b"../../elsewhere", b"\xb1\x00"):
        (done.out / "best").write_bytes(rubbish)
        with pytest.raises(ValueError, match="run/best does not lead to a checkpoint: it names none"):
            open_run(done.out / "best")
    train([0.1], iterations=3)
    assert kept_best(done.out)[0] == "step_000001"


def test_a_folder_of_that_name(best_first, train):
    (best_first / "best").unlink()
    export_run(best_first, best_first / "best")
    check_model(f"{best_first}/best")  # a model like any other
    with pytest.raises(ValueError, match="best is a folder, and the run needs that name"):
        train([0.7], iterations=3)


def test_a_checkpoint_that_goes_while_it_is_read(best_first, monkeypatch):
    def gone(checkpoint, *rest, **more):
        shutil.rmtree(checkpoint)
        raise AssertionError("metadata is None")

    monkeypatch.setattr("g2rpo.run.checkpoint.load_checkpoint", gone)
    with pytest.raises(ValueError, match=r"step_000001 changed while it was read .*; try again"):
        open_run(best_first / "best")
