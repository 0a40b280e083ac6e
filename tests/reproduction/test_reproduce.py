"""`g2rpo reproduce` on the embedded model: interrupted in each stage, planted failures, damaged records."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from support.processes import command_as, run_command, run_processes
from support.small_runs import SMALL, timeless

from g2rpo.config.load import load_settings
from g2rpo.evaluation.evaluate import evaluate
from g2rpo.reproduction import reproduce as module
from g2rpo.reproduction import stages
from g2rpo.reproduction.reproduce import reproduce
from g2rpo.run.metrics import read_metrics
from g2rpo.runtime.records import read_record
from g2rpo.setup.doctor import Row
from g2rpo.training.trainer import train

OWN = """
import os, signal, torch
CALLS, STOP_AT = [0], [0]

def red(images, prompts, metadata=None):
    CALLS[0] += 1
    if CALLS[0] == STOP_AT[0]:
        os.kill(os.getpid(), signal.SIGINT)
    return images[:, 0].mean((1, 2))

def constant(images, prompts, metadata=None):
    return torch.ones(len(images))

def picky(images, prompts, metadata=None):
    return images[:, 1].mean((1, 2)).masked_fill(torch.tensor(["blue" in p for p in prompts]), torch.nan)
"""

CRITERIA = """
title = "a small run"
source = "this test"
licence = "none."
open_questions = ["What | is open?"]

[evaluation]
prompts = "world:heldout"
num_prompts = 6
steps = [2, 1]
rewards = ["own_rep:red", "verifier", "hps"]
batch = 3

[start]
iterations = 1
max_ratio_deviation = 1e-6
ratio_source = "float32"

[curve]
iterations = 2
prompts = "training"
num_prompts = 2
num_images = 4
steps = 2
rises = []
source = "rule"

[[row]]
table = "Table A"
method = "untrained"
model = "base"
steps = 2
values = { "own_rep:red" = 0.2, hps = 0.305 }
errors = { "own_rep:red" = 1 }

[[row]]
table = "Table A"
method = "another method"
steps = 2
values = { "own_rep:red" = 0.25 }

[[row]]
table = "Table B"
method = "trained"
model = "trained"
steps = 1
values = { "own_rep:red" = 0.2, hps = 0.31 }
errors = { "own_rep:red" = 1 }

[[gain]]
source = "Table B"
steps = 1
values = { verifier = 0.01 }
errors = { verifier = 1 }
"""

CHANGES = {**SMALL, "rewards": {"own_rep:red": 1.0}, "iterations": 3, "lr": 1e-4}
ALL = ("machine", "base", "start", "curve", "evaluation")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The module of the rewards."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_rep.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        import own_rep

        yield own_rep
        sys.modules.pop("own_rep")


@pytest.fixture(scope="module")
def whole(own, tmp_path_factory):
    """A complete reproduction, in WHOLE/out; tests copy it."""
    folder = tmp_path_factory.mktemp("whole")
    done = begin(folder)
    assert done.complete and done.passed, [str(check) for stage in done.stages for check in stage.failed]
    return folder


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of a complete reproduction, in TMP/finished/out."""
    shutil.copytree(whole, tmp_path / "finished")
    return tmp_path / "finished"


def begin(folder: Path, criteria: str = CRITERIA, *, limit=None, go_on=False, benchmark=None, **changes):
    """Calls `reproduce` in FOLDER/out with a criteria file."""
    file = folder / "criteria_in.toml"
    file.write_text(criteria)
    settings = load_settings("tiny", {**CHANGES, "out": str(folder / "out"), **changes})
    return reproduce(
        "tiny", settings, criteria=file, limit=limit, benchmark=benchmark, continue_after_failure=go_on
    )


def statuses(stage) -> dict[str, str]:
    return {check.name: check.status for check in stage.checks}


def comparable(out: Path) -> dict:
    """The report without times, paths and the stages' state."""
    record = read_record(out / "reproduction.json")
    stages = [{"name": s["name"], "checks": s["checks"], "facts": s["facts"]} for s in record["stages"]]
    for line in stages[2]["facts"]["iterations"]:
        line.pop("seconds")
    for name in ("memory_gb", "warnings"):  # of what is free on this machine
        stages[2]["facts"]["preflight"].pop(name)
    return {"rows": record["rows"], "stages": stages[1:]}


class Watch:
    """Notes which stages begin, and lets the reward send SIGINT at a given call within one of them."""

    def __init__(self, own, monkeypatch) -> None:
        self.own, self.entered, self.stop, self.after_training = own, [], ("", 0), False
        for name, (title, work) in stages.STAGES.items():
            monkeypatch.setitem(stages.STAGES, name, (title, self.watched(name, work)))
        train_to = stages._train_to

        def trained(plan, last):
            train_to(plan, last)
            self.arm(self.after_training)

        monkeypatch.setattr(stages, "_train_to", trained)

    def arm(self, now: bool) -> None:
        name, call = self.stop
        self.own.CALLS[0], self.own.STOP_AT[0] = 0, call if now and name == self.entered[-1] else 0

    def watched(self, name, work):
        def stage(plan):
            self.entered.append(name)
            self.arm(not self.after_training)
            return work(plan)

        return stage

    def stopped(self, folder: Path, name: str, call: int, *, after_training: bool = False) -> list[str]:
        """The stages that began until a stop signal at that call of the reward in the stage `name`.

        Args:
            after_training: count the calls of that stage after its training.
        """
        self.stop, self.after_training = (name, call), after_training
        self.entered.clear()
        with pytest.raises(KeyboardInterrupt):
            begin(folder)
        state = f"In progress: stage {ALL.index(name) + 1} of 5"
        assert state in (folder / "out" / "reproduction.md").read_text()
        return list(self.entered)


def test_interrupted_in_each_stage_it_ends_as_an_uninterrupted_one(own, whole, tmp_path, monkeypatch):
    """Of the stages that train and evaluate, the last two are stopped in both."""
    parts, out = tmp_path, tmp_path / "out"
    watch = Watch(own, monkeypatch)
    with monkeypatch.context() as patch:  # the first stage calls no reward

        def interrupted(*arguments, **options):
            raise KeyboardInterrupt

        patch.setattr(stages, "plan_here", interrupted)
        assert watch.stopped(parts, "machine", 1) == ["machine"]
    assert watch.stopped(parts, "base", 2) == ["machine", "base"]
    assert watch.stopped(parts, "start", 2) == ["base", "start"], "what is done is read from its record"
    assert watch.stopped(parts, "curve", 2) == ["start", "curve"]
    assert not (out / "curve").exists(), "it was stopped in the training"
    assert watch.stopped(parts, "curve", 2, after_training=True) == ["curve"]
    assert (out / "curve" / "scores.csv").exists() and not (out / "stages" / "curve.json").exists()
    assert watch.stopped(parts, "evaluation", 2) == ["curve", "evaluation"]
    assert not (out / "run" / "finished").exists(), "it was stopped in the training"
    assert watch.stopped(parts, "evaluation", 2, after_training=True) == ["evaluation"]
    assert (out / "run" / "finished").exists()
    watch.stop = ("", 0)
    watch.entered.clear()
    assert begin(parts).complete and watch.entered == ["evaluation"]
    assert comparable(out) == comparable(whole / "out")
    assert "Complete." in (out / "reproduction.md").read_text()

    # The run is the one of `g2rpo train`, bit for bit.
    train(load_settings("tiny", {**CHANGES, "out": str(tmp_path / "plain")}))
    plain, reproduced = (
        timeless(read_metrics(run / "metrics.jsonl")) for run in (tmp_path / "plain", whole / "out" / "run")
    )
    assert plain == reproduced


def test_the_report_can_be_published(finished, monkeypatch):
    out = finished / "out"
    text = (out / "reproduction.md").read_text()
    for part in (
        "# Reproduction: a small run",
        "Licence: none.",
        "## Table A, 2 steps",
        "| untrained | 0.2 | 0.305 |",
        "| **ours** (base model) | 0.",
        "| another method | 0.25 | – |",
        "## Gains over the base model",
        "- What | is open?",
        "iterations = 3 (recipe: 66)",
        "reward hps was not evaluated: xswu/HPSv2",
        "g2rpo 0.1.0, commit ",
        "g2rpo evaluate tiny",
        "torch ",
    ):
        assert part in text, part
    for file in ("run/report.html", "evaluation/grid_2.png", "run/curve.png", "evaluation/scores.csv"):
        assert f"({file})" in text and (out / file).is_file(), file
    record = read_record(out / "reproduction.json")
    names = [stage["name"] for stage in record["stages"]]
    assert names == list(ALL) and record["state"] == "Complete."
    unavailable = {
        c["name"]: c for s in record["stages"] for c in s["checks"] if c["status"] == "NOT APPLICABLE"
    }
    assert {"memory", "time", "reward hps", "hps of the base model in 2 steps"} <= set(unavailable)
    assert "g2rpo fetch" in unavailable["reward hps"]["expected"]
    # Nothing is done a second time: a stage that is done is read.
    for name in ALL:
        monkeypatch.setitem(stages.STAGES, name, ("title", None))
    monkeypatch.setattr(module, "STAGES", stages.STAGES)
    assert begin(finished).complete


@pytest.mark.parametrize("name", ALL[1:])
def test_a_damaged_record_is_named_and_measured_again_without_a_model(name, finished, monkeypatch, capsys):
    """Also long after its stage, when the model that it was measured on has been trained on."""
    before = comparable(finished / "out")
    file = finished / "out" / "stages" / f"{name}.json"
    file.write_text(file.read_text().replace('"status": "PASS"', '"status": "FAIL"', 1))
    monkeypatch.setattr(evaluate, "__code__", (lambda *a, **k: 1 / 0).__code__)
    assert begin(finished).complete
    assert f"{file} is damaged" in capsys.readouterr().out
    assert comparable(finished / "out") == before
    file.write_text("{}")
    assert begin(finished).complete
    assert "is not a record of a stage" in capsys.readouterr().out
    assert comparable(finished / "out") == before


def test_other_settings_and_criteria_are_refused(finished):
    with pytest.raises(ValueError, match=r"settings\.lr: 0\.0001 stored, 0\.0002 given"):
        begin(finished, lr=2e-4)
    with pytest.raises(ValueError, match=r"settings\.iterations: 3 stored, 4 given"):
        begin(finished, iterations=4)
    with pytest.raises(ValueError, match="limit: 6 stored, 5 given"):
        begin(finished, limit=5)
    with pytest.raises(ValueError, match="num_images: 4 stored, 2 given"):
        begin(finished, CRITERIA.replace("num_images = 4", "num_images = 2"))
    with pytest.raises(ValueError, match="stop_after=2: reproduce itself stops the training"):
        begin(finished, stop_after=2)
    begun = finished / "out" / "begun.json"
    begun.write_text(begun.read_text().replace("0.0001", "0.0002"))
    with pytest.raises(ValueError, match=r"begun\.json is damaged.*restore it from a copy"):
        begin(finished)
    begun.unlink()
    with pytest.raises(ValueError, match=r"contains something else \(no begun\.json\)"):
        begin(finished)


WRONG = (
    CRITERIA.replace("1e-6", "1e-30")
    .replace(
        'rewards = ["own_rep:red", "verifier", "hps"]', 'rewards = ["own_rep:picky", "own_rep:constant"]'
    )
    .replace('"own_rep:red" = 0.2, hps = 0.305', '"own_rep:constant" = 1.5')
    .replace('"own_rep:red" = 0.25', '"own_rep:constant" = 0.25')
    .replace('"own_rep:red" = 0.2, hps = 0.31', '"own_rep:constant" = 1.5')
    .replace('"own_rep:red" = 1 ', '"own_rep:constant" = 0.1 ')
    .replace("{ verifier = 0.01 }", '{ "own_rep:picky" = 9.0 }')
    .replace("{ verifier = 1 }", '{ "own_rep:picky" = 0.1 }')
    .replace("rises = []", 'rises = ["own_rep:constant"]')
    .replace("batch = 3", 'batch = 3\nrises = ["own_rep:constant"]')
)
"""Criteria of which nothing holds, for a reward that is constant."""


def test_each_check_can_fail(own, tmp_path, monkeypatch, capsys):
    flat = {"rewards": {"own_rep:constant": 1.0}}
    with monkeypatch.context() as patch:
        real = stages.plan_here

        def too_large(*arguments, **options):
            from dataclasses import replace

            costs = real(*arguments, **options)
            changes = {"fit": ("does not fit: 3 of 2 GB",), "device_bytes": 1, "run_seconds": 7200.0}
            return replace(costs, **changes, released_gpu_hours=1.0)

        patch.setattr(stages, "plan_here", too_large)
        patch.setattr(stages, "disk_problem", lambda settings: "1 GB needed, 0 free")
        patch.setattr(stages, "free_bytes", lambda path: 0)
        patch.setattr(
            stages, "doctor_rows", lambda out: [Row("torch", "missing", "absent", "pip install it")]
        )
        patch.setattr(stages, "absent_model", lambda model, family: f"{model} is absent")
        patch.setattr(stages, "absent_reward", lambda name, options: "absent" if "constant" in name else "")
        patch.setattr(stages, "is_absent", lambda source: True)
        done = begin(tmp_path, WRONG, **flat)
        assert not done.complete and set(statuses(done.stages[0]).values()) == {"FAIL", "NOT APPLICABLE"}
        failed = [name for name, status in statuses(done.stages[0]).items() if status == "FAIL"]
        assert failed == [
            "installation",
            "model files",
            "files of the trained rewards",
            "training prompts",
            "benchmark prompts",
            "memory",
            "time",
            "disk",
            "disk for the evaluations",
        ]
    assert not (tmp_path / "out" / "run").exists() and not (tmp_path / "out" / "evaluation").exists()
    report = (tmp_path / "out" / "reproduction.md").read_text()
    assert "Stopped after stage 1 of 5" in report and "## Failed checks" in report

    done = begin(tmp_path, WRONG, **flat)  # the machine is corrected, and checked again
    assert not done.complete and [stage.name for stage in done.stages] == ["machine", "base"]
    assert not done.stages[0].failed
    assert statuses(done.stages[1]) == {
        "every image has its scores": "FAIL",
        "own_rep:constant of the base model in 2 steps": "FAIL",
    }
    assert not (tmp_path / "out" / "run").exists(), "the training does not begin"
    assert "--continue-after-failure" in capsys.readouterr().out

    done = begin(tmp_path, WRONG, go_on=True, **flat)
    assert done.complete and not done.passed
    assert statuses(done.stages[2]) == {
        "the first 1 iterations": "PASS",
        "first ratio is 1": "FAIL",
        "spread of own_rep:constant": "FAIL",
        "finite gradients": "PASS",
    }
    assert statuses(done.stages[3]) == {"own_rep:constant after 2 iterations": "FAIL"}
    assert statuses(done.stages[4]) == {
        "every image has its scores": "FAIL",
        "own_rep:constant of the trained model in 1 steps": "FAIL",
        "paired gain of own_rep:picky in 1 steps": "FAIL",
        "own_rep:constant after 3 iterations, benchmark prompts": "FAIL",
    }
    assert (tmp_path / "out" / "run" / "finished").read_text().strip() == "3", "the run is kept"

    # A gradient that is not finite, and iterations that are missing.
    metrics = tmp_path / "out" / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    first = next(line for line in lines if line["step"] == 1)
    first["grad_norm"] = None
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = begin(tmp_path, WRONG, **flat, go_on=True)  # a failed stage before the training is measured again
    assert statuses(done.stages[2])["finite gradients"] == "FAIL"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not first))
    found = statuses(begin(tmp_path, WRONG, **flat, go_on=True).stages[2])
    assert found["the first 1 iterations"] == found["finite gradients"] == "FAIL"


def test_a_run_that_stops_in_its_first_iterations_is_a_failed_check(own, tmp_path):
    changes = {"rewards": {"own_rep:picky": 1.0}, "max_invalid_fraction": 0.0}
    (tmp_path / "prompts.txt").write_text("a blue star\na red circle\n")
    done = begin(tmp_path, go_on=False, prompts=str(tmp_path / "prompts.txt"), **changes)
    assert not done.complete and done.stages[-1].name == "start"
    stopped = next(check for check in done.stages[-1].checks if check.name == "the first 1 iterations")
    assert stopped.status == "FAIL" and "50% of the samples have no reward" in stopped.measured, stopped


def command_words(folder: Path, criteria: str) -> list[str]:
    """The command with a criteria file, and CHANGES as overrides for a reward that the package has."""
    (folder / "mine.toml").write_text(criteria.replace('"own_rep:red"', '"tiny_clip"'))
    words = ["reproduce", "tiny", "--criteria", str(folder / "mine.toml"), "--limit", "5"]
    words += ["rewards.verifier=none", "rewards.tiny_clip=1"]
    changes = {key: value for key, value in CHANGES.items() if key != "rewards"}
    changes["lr"] = 1e-6  # at 1e-4 this reward falls, and the check of the curve fails
    return [*words, *(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in changes.items())]


def test_a_failed_check_before_the_training_gives_exit_code_1(tmp_path):
    wrong = CRITERIA.replace('"own_rep:red" = 0.2, hps = 0.305', '"own_rep:red" = 9.2, hps = 0.305')
    done = run_command(*command_words(tmp_path, wrong), f"out={tmp_path / 'out'}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL: tiny_clip of the base model in 2 steps" in done.stdout
    assert "--continue-after-failure" in done.stdout
    assert f"report: {tmp_path / 'out' / 'reproduction.md'}" in done.stdout
    assert not (tmp_path / "out" / "run").exists()


@pytest.mark.long
def test_two_processes_find_what_one_finds(tmp_path):
    words = command_words(tmp_path, CRITERIA)
    one = run_command(*words, f"out={tmp_path / 'one'}")
    assert one.returncode == 0, one.stdout + one.stderr
    for code, output in run_processes(2, command_as, *words, f"out={tmp_path / 'two'}", log=tmp_path / "log"):
        assert code == 0, output
    means = [
        {(m["model"], m["steps"], m["reward"]): m["mean"] for m in stage["facts"]["means"]}
        for folder in ("one", "two")
        for stage in read_record(tmp_path / folder / "reproduction.json")["stages"]
        if stage["name"] == "evaluation"
    ]
    assert means[0] == pytest.approx(means[1], abs=1e-4) and len(means[0]) == 8
