"""A run of each family: killed and resumed, on two processes, exported to the stock pipeline."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.contract import (
    PROMPTS,
    Contract,
    noise,
    own_images,
    stock_images,
    stock_pipeline,
)
from support.processes import run_processes, train_as
from support.small_runs import timeless

from g2rpo.config.load import load_settings
from g2rpo.exporters.export import export_run
from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.inference.open import open_policy
from g2rpo.models.transformer.weights import LORA_FILE
from g2rpo.run.checkpoint_index import read_tensors
from g2rpo.run.folder import latest_checkpoint
from g2rpo.run.metrics import read_metrics
from g2rpo.setup.verify import verify
from g2rpo.training.trainer import train

ITERATIONS, STEPS = 2, 4
RANKS = {"all weights": 0, "adapters": 4}
SETTINGS = [
    f"iterations={ITERATIONS}",
    f"num_steps={STEPS}",
    "train_steps=2",
    "granularities=[1, 2]",
    "group_size=3",
    "prompts_per_iteration=2",
    "rewards={colourfulness=1.0}",
    "num_sample_prompts=1",
    "compare_images=0",
    "eval_num_steps=2",
    "lr=3e-2",  # too much for a real run; a visible change after two iterations
    "checkpoint_every=1",
    "tensorboard=false",
    "device=cpu",
]
# Each image is decoded alone: in float32 the rounding of a convolution depends on its batch.
EXACT = ["precision=float64", "true_cfg=2.0", "decode_batch=1"]


def train_until_killed(recipe: str, *changes: str) -> None:
    """Trains and kills its own process, as `kill -9`, right after the first checkpoint; for run_processes."""
    from g2rpo.training import trainer

    save = trainer.save_checkpoint

    def save_and_die(*arguments, **options):
        save(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    trainer.save_checkpoint = save_and_die
    trainer.train(load_settings(recipe, list(changes)))


@dataclass(frozen=True)
class Trained:
    """A run that was killed after its first iteration and resumed.

    Attributes:
        out: its folder.
        changes: its settings.
        rank: rank of its adapters.
        killed: exit code and output of the process that was killed.
    """

    out: Path
    changes: list[str]
    rank: int
    killed: tuple[int, str]


def settings_of(contract: Contract, folder: Path, out: Path, *changes: str) -> list[str]:
    options = [f"{name}={value}" for name, value in contract.options.items() if name != "guidance"]
    prompts = folder.parent / "prompts.txt"
    prompts.write_text("\n".join([*PROMPTS, "a green square", "a black star above a circle"]) + "\n")
    given = [f"model={folder}", f"prompts={prompts}", f"cache={folder.parent / 'cache'}", f"out={out}"]
    if "guidance" in contract.options:
        options.append(f"guidance={contract.options['guidance']}")
    if "max_sequence_length" not in contract.options:
        options.append("max_sequence_length=none")
    height, width = contract.oblong
    return [*SETTINGS, *options, *given, f"resolution=[{height}, {width}]", *changes]


@pytest.fixture(scope="module", params=RANKS.values(), ids=RANKS.keys())
def trained(request, contract, folder, tmp_path_factory) -> Trained:
    place = tmp_path_factory.mktemp("place")
    changes = settings_of(contract, folder, place / "run", f"lora_rank={request.param}")
    (killed,) = run_processes(1, train_until_killed, "flux_tiny_random", *changes, log=place / "log")
    assert latest_checkpoint(place / "run").name == "step_000001", killed[1]
    train(load_settings("flux_tiny_random", changes))
    return Trained(place / "run", changes, request.param, killed)


def metrics(out: Path) -> list[dict]:
    return [line for line in timeless(read_metrics(out / "metrics.jsonl")) if "nfe" in line]


def test_a_killed_run_goes_on_bit_for_bit(trained, tmp_path):
    assert trained.killed[0] == -signal.SIGKILL
    train(load_settings("flux_tiny_random", [*trained.changes, f"out={tmp_path / 'uninterrupted'}"]))
    assert [line["step"] for line in metrics(trained.out)] == [1, 2]
    assert metrics(trained.out) == metrics(tmp_path / "uninterrupted")
    ours, theirs = (read_tensors(latest_checkpoint(run)) for run in (trained.out, tmp_path / "uninterrupted"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_ratio_is_1_before_the_update(trained):
    # Rollout and update evaluate the same network, in batches of other sizes.
    first = metrics(trained.out)[0]
    assert first["ratio_max_dev"] <= 1e-5 and first["grad_norm"] > 0


def test_export_equals_the_stock_pipeline(contract, folder, trained, tmp_path):
    policy = open_policy(trained.out, device="cpu")  # not the export: both could be wrong in the same way
    exported = tmp_path / "export"
    export_run(trained.out, exported)
    steps = {"num_inference_steps": STEPS, "sigmas": shifted_sigmas(STEPS, 3.0)[:-1].tolist()}
    untrained = stock_images(contract, stock_pipeline(folder), policy, noise(policy), **steps)
    pipeline = stock_pipeline(folder if trained.rank else exported)
    if trained.rank:
        # Offline, diffusers before 0.40 does not look for the file.
        pipeline.load_lora_weights(exported, weight_name=LORA_FILE)
    images = stock_images(contract, pipeline, policy, noise(policy), **steps)
    own = own_images(policy, num_steps=STEPS, shift=3.0)
    assert (images - untrained).abs().max() > 8 / 255, "training changed nothing that could be compared"
    assert (own - images).abs().max() <= 2 / 255
    # The export passes `g2rpo doctor --verify` and opens again as a policy.
    assert {row.status for row in verify(exported, base=str(folder))} == {"ok"}
    opened = open_policy(exported, base=str(folder), device="cpu")
    assert (own_images(opened, num_steps=STEPS, shift=3.0) - own).abs().max() <= 2 / 255


def distance(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Distance of two sets of tensors, relative to the norm of the second."""
    off = sum((actual[name].double() - value.double()).square().sum() for name, value in expected.items())
    return float((off / sum(value.double().square().sum() for value in expected.values())).sqrt())


@pytest.mark.parametrize("lora_rank", [4, pytest.param(0, marks=pytest.mark.long)])
def test_two_processes_equal_one(contract, folder, tmp_path, lora_rank):
    exact = [*EXACT, f"lora_rank={lora_rank}"]
    one, two = (settings_of(contract, folder, tmp_path / name, *exact) for name in ("one", "two"))
    if contract.options.get("guidance"):  # a second guidance is refused
        one, two = [*one, "guidance=1.0"], [*two, "guidance=1.0"]
    train(load_settings("flux_tiny_random", one))
    ended = run_processes(2, train_as, "flux_tiny_random", *two, log=tmp_path / "log")
    assert [code for code, _ in ended] == [0, 0], "\n".join(text for _, text in ended)
    outs = tmp_path / "one", tmp_path / "two"
    one, two = (read_tensors(latest_checkpoint(out)) for out in outs)
    assert one.keys() == two.keys() and one
    for part in ("module", "optimizer"):
        tensors = {name: value for name, value in one.items() if name.startswith(part)}
        assert tensors and distance({name: two[name] for name in tensors}, tensors) <= 1e-6
    for ours, theirs in zip(*map(metrics, outs), strict=True):
        for name in ("reward/colourfulness", "loss", "grad_norm", "ratio_max_dev"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-6, abs=1e-9), name
        assert theirs["nfe"] == ours["nfe"]
