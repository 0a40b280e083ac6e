"""Runs of DiffusionNFT on the embedded model: the behaviour weights, resuming, adapters, processes."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from support.processes import run_processes, train_as
from support.small_runs import SMALL, timeless

import g2rpo
from g2rpo.config.load import load_settings
from g2rpo.costs.costs import plan_costs
from g2rpo.evaluation.monitor import Evaluator
from g2rpo.run.checkpoint_index import read_tensors
from g2rpo.training import trainer

NFT = {
    **{name: value for name, value in SMALL.items() if name not in ("train_steps", "granularities")},
    "algorithm": "nft",
    "num_steps": 3,
    "train_levels": 1,
    "train_steps": None,
    "granularities": None,
    "eta": None,
    "nft_beta": 1.0,
    "advantage_std": "batch",
    "kl_beta": 1e-4,
    "lr": 1e-3,
    "rewards": {"colourfulness": 1.0},
}
LAGGING = {"lag": "constant", "lag_max": 0.75}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("embeddings"))


@pytest.fixture
def run(tmp_path, cache):
    def train(out="run", **changes):
        return g2rpo.train("tiny", **{**NFT, "cache": cache, **changes, "out": str(tmp_path / out)})

    return train


def stored(run_folder: Path, step: int) -> dict[str, torch.Tensor]:
    return read_tensors(run_folder / "checkpoints" / f"step_{step:06d}")


def test_the_behaviour_weights_lag_and_make_the_rollouts(run, tmp_path):
    done = run(iterations=3, checkpoint_every=1, keep_last=3, **LAGGING)
    first, second, third = (stored(done.out, step) for step in (1, 2, 3))
    current = {name: name.replace("behaviour.", "module.") for name in first if name.startswith("behaviour")}
    assert len(current) > 50 and all(name in first for name in current.values())
    lines = done.metrics
    assert lines[0]["behaviour_dev"] == 0
    assert lines[1]["loss"] == pytest.approx(lines[1]["policy_loss"] + 1e-4 * lines[1]["kl"], rel=1e-6)
    assert lines[1]["behaviour_dev"] > 0 and lines[2]["kl"] > 0
    assert lines[0]["optimality"] == pytest.approx(0.5, abs=0.1)
    for behaviour, name in current.items():
        expected = torch.lerp(first[behaviour], second[name], 0.25)
        torch.testing.assert_close(second[behaviour], expected, rtol=1e-6, atol=1e-9)
    moved = sum(float((third[name] - third[b]).abs().max() > 0) for b, name in current.items())
    assert moved > 50


def test_without_lag_the_behaviour_is_the_current_policy(run):
    done = run(iterations=2, lag="off", kl_beta=0.0)
    saved = stored(done.out, 2)
    names = [name for name in saved if name.startswith("behaviour.")]
    assert names and all(torch.equal(saved[n], saved[n.replace("behaviour.", "module.")]) for n in names)
    assert [line["behaviour_dev"] for line in done.metrics] == [0.0, 0.0] and "kl" not in done.metrics[0]


def test_rollouts_use_the_behaviour_weights_and_evaluations_the_current_ones(run, monkeypatch):
    """Weights while images are made, against those that the trainer holds as current and as behaviour."""
    seen = []
    explore, evaluate = trainer.explore, Evaluator.evaluate
    trainers = []
    init = trainer.Trainer.__init__

    def weight(policy):
        return next(p for p in policy.module.parameters() if p.requires_grad).detach().clone()

    def new(self, *given, **named):
        init(self, *given, **named)
        trainers.append(self)

    def exploring(policy, *given, **named):
        behaviour = next(iter(trainers[0].behaviour.values()))
        seen.append(("rollout", torch.equal(weight(policy), behaviour)))
        return explore(policy, *given, **named)

    def evaluating(self, *given):
        name, behaviour = next(iter(trainers[0].behaviour.items()))
        current = trainers[0].parameters[name]
        same = torch.equal(current, behaviour)
        seen.append(("evaluation", torch.equal(weight(self.policy), current), same))
        return evaluate(self, *given)

    monkeypatch.setattr(trainer.Trainer, "__init__", new)
    monkeypatch.setattr(trainer, "explore", exploring)
    monkeypatch.setattr(Evaluator, "evaluate", evaluating)
    run(iterations=2, eval_every=1, eval_prompts="world:heldout", num_eval_prompts=2, **LAGGING)
    assert [entry[0] for entry in seen] == ["evaluation", "rollout", "evaluation", "rollout", "evaluation"]
    assert all(entry[1] for entry in seen)
    assert [entry[2] for entry in seen if entry[0] == "evaluation"] == [True, False, False]


CHANGES = [
    pytest.param({"lora_rank": 2, "kl_beta": 0.01, "ema_decay": 0.9}, id="lora"),
    pytest.param(
        {"kl_beta": 0.01, "update": 2, "solver": "euler"}, marks=pytest.mark.long, id="all weights, two steps"
    ),
    pytest.param(
        {"update": "per_step", "kl_beta": 0.0, "update_batch": 3, "lora_rank": 2},
        marks=pytest.mark.long,
        id="a step per level",
    ),
]


@pytest.mark.parametrize("changes", CHANGES)
def test_resume_goes_on_bit_for_bit(run, changes):
    uninterrupted = run("whole", iterations=3, **LAGGING, **changes)
    assert run("parts", iterations=3, stop_after=2, **LAGGING, **changes).step == 2
    resumed = run("parts", iterations=3, **LAGGING, **changes)
    assert resumed.finished and timeless(resumed.metrics) == timeless(uninterrupted.metrics)
    whole, parts = stored(uninterrupted.out, 3), stored(resumed.out, 3)
    assert whole.keys() == parts.keys() and any(name.startswith("behaviour.") for name in whole)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    if changes.get("kl_beta"):
        kls = [line["kl"] for line in resumed.metrics]
        assert kls[0] == 0 or changes.get("update") == 2
        assert kls[-1] > 0  # of the base model, also after resuming


def train_and_die(iteration: int, recipe: str, *settings: str) -> None:
    """Trains, and is killed in the update of an iteration."""
    update, calls = trainer.update, []

    def dying(*given, **named):
        calls.append(0)
        metrics = update(*given, **named)
        if len(calls) == iteration:
            os.kill(os.getpid(), signal.SIGKILL)
        return metrics

    trainer.update = dying
    train_as(recipe, *settings)


def words(changes) -> list[str]:
    values = {**NFT, **changes}
    return [f"{k}={'none' if v is None else v if isinstance(v, str) else toml(v)}" for k, v in values.items()]


def toml(value) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {entry}" for key, entry in value.items()) + "}"
    return json.dumps(value)


@pytest.mark.long
def test_a_killed_run_goes_on_bit_for_bit(run, tmp_path, cache):
    changes = {**LAGGING, "iterations": 3, "checkpoint_every": 1, "cache": cache, "lora_rank": 2}
    uninterrupted = run("whole", **changes)
    settings = words({**changes, "out": str(tmp_path / "killed")})
    ((code, output),) = run_processes(1, train_and_die, 2, "tiny", *settings, log=tmp_path / "log")
    assert code == -signal.SIGKILL, output
    resumed = run("killed", **changes)
    assert resumed.finished and timeless(resumed.metrics) == timeless(uninterrupted.metrics)
    whole, parts = stored(uninterrupted.out, 3), stored(resumed.out, 3)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.long
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_two_processes_train_what_one_trains(run, tmp_path, cache, lora_rank):
    changes = {"iterations": 2, "precision": "float64", "kl_beta": 0.01, "lora_rank": lora_rank}
    changes |= {"update": 2, "update_batch": 1, "cache": cache, **LAGGING}
    one = run("one", **changes)
    settings = words({**changes, "out": str(tmp_path / "two")})
    ended = run_processes(2, train_as, "tiny", *settings, log=tmp_path / "log")
    assert [code for code, _ in ended] == [0, 0], "\n".join(text for _, text in ended)
    first, second = stored(one.out, 2), stored(tmp_path / "two", 2)
    assert first.keys() == second.keys()
    for name in first:
        if name.startswith(("module.", "behaviour.")):
            torch.testing.assert_close(first[name], second[name], rtol=1e-7, atol=1e-9)
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    for a, b in zip(one.metrics, lines, strict=True):
        assert a["nfe"] == b["nfe"] and a["nfe_update"] == b["nfe_update"]
        for name in ("loss", "kl", "optimality", "behaviour_dev", "grad_norm", "reward/colourfulness"):
            assert a[name] == pytest.approx(b[name], rel=1e-6, abs=1e-12), name


def test_counted_forwards_are_those_of_the_plan(run, cache):
    changes = {"iterations": 1, "kl_beta": 0.01, "train_levels": 2}
    line = run(**changes).metrics[-1]
    settings = load_settings("tiny", {**NFT, "cache": cache, **changes})
    costs = plan_costs(settings)
    assert costs.forwards == {"anchor": 0, "sde": 0, "tails": 18, "total": 18, "update": 12}  # 2 x 3 images
    assert costs.update_forwards == {"policy": 12, "snapshot": 0, "reference": 12, "behaviour": 12}
    assert line["nfe"] == 18 and line["nfe_update"] == 12 * (3 + 1 + 1)
    weights = costs.memory.always["trained weights"]
    assert costs.memory.always["behaviour weights"] == costs.memory.always["reference weights"] == weights
    plain = plan_costs(load_settings("tiny", {**SMALL, "cache": cache}))
    assert "behaviour weights" not in plain.memory.always
    assert costs.disk["one checkpoint"] == plain.disk["one checkpoint"] + weights


def test_eight_bit_tails_are_refused():
    eight_bits = {"tails_precision": "float8", "precision": "bfloat16"}
    with pytest.raises(ValueError, match="tails_precision=float8 has no effect with algorithm=nft"):
        plan_costs(load_settings("tiny", NFT).model_copy(update=eight_bits))
