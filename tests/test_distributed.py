"""Two processes (gloo, FSDP2) train what one trains: gradients, weights, metrics, checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_flux import save_random_flux
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from g2rpo.config import load_settings
from g2rpo.distributed import sharding_mesh
from g2rpo.models.flux import FluxPolicy
from g2rpo.models.network import read_weights, weight_files
from g2rpo.optimizer import make_optimizer
from g2rpo.trainer import train

TWO = """
import sys
import torch
torch.compile = lambda function, **options: function  # torchao's step; compiling needs a C++ compiler here
from g2rpo.config import load_settings
from g2rpo.trainer import train
train(load_settings("flux_tiny_random", sys.argv[1:]))
"""
SETTINGS = [
    "iterations=3",
    "num_sample_prompts=3",  # an odd number: one process draws fewer
    "compare_images=3",
    "eval_prompts=world:heldout",
    "num_eval_prompts=3",
    "decode_batch=1",
    "ema_decay=0.9",
    "tensorboard=false",
    "max_sequence_length=8",
]
METHODS = {
    "full": [],
    "lora": ["lora_rank=4"],
    "path, an update a step, KL": [
        "algorithm=dance_grpo",
        "train_steps=none",
        "granularities=none",
        "kl_beta=1.0",
    ],
}


def start_two(tmp_path, *settings):
    script = tmp_path / "two.py"
    script.write_text(TWO)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run([*command, *settings], capture_output=True, text=True, env=environment)


def stored(run: Path, step: int, tmp_path: Path) -> dict:
    dcp_to_torch_save(run / "checkpoints" / f"step_{step:06d}", tmp_path / "whole.pt")
    return torch.load(tmp_path / "whole.pt", weights_only=False)


def apart(a: dict, b: dict) -> float:
    """Distance of two sets of tensors over the norm of the first."""
    assert a.keys() == b.keys() and a
    off = sum((a[name].double() - b[name].double()).square().sum() for name in a)
    return float((off / sum(value.double().square().sum() for value in a.values())).sqrt())


def gradients(checkpoint: dict) -> dict:
    """AdamW's running mean: after one step a tenth of the gradient."""
    return {name: state["exp_avg"] for name, state in checkpoint["optimizer"]["state"].items()}


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_what_one_trains(method, tmp_path):
    settings = [*SETTINGS, *METHODS[method], "precision=float64", f"cache={tmp_path / 'cache'}"]
    one, two = tmp_path / "one", tmp_path / "two"
    keep = "keep_last=3"
    train(load_settings("flux_tiny_random", [*settings, keep, f"out={one}"]))
    done = start_two(tmp_path, *settings, keep, f"out={two}", "stop_after=2")
    assert done.returncode == 0, done.stderr
    assert len(list((two / "checkpoints" / "step_000002").glob("*.distcp"))) == 2  # each wrote its shards

    first, first_two = stored(one, 1, tmp_path), stored(two, 1, tmp_path)
    assert apart(gradients(first), gradients(first_two)) < 1e-8
    second, second_two = stored(one, 2, tmp_path), stored(two, 2, tmp_path)
    for part in ("module", "ema"):
        assert apart(second[part], second_two[part]) < 1e-8
        assert apart(first[part], second[part]) > 1e-6  # and it moves

    train(load_settings("flux_tiny_random", [*settings, keep, f"out={two}"]))  # one process goes on from two
    third, third_two = stored(one, 3, tmp_path), stored(two, 3, tmp_path)
    assert apart(third["module"], third_two["module"]) < 1e-8
    lines, lines_two = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, two)
    )
    assert [line["step"] for line in lines] == [line["step"] for line in lines_two] == [1, 2, 3]
    for a, b in zip(lines, lines_two, strict=True):
        assert a["nfe"] == b["nfe"]
        for name in ("reward/colourfulness", "advantage_abs", "grad_norm", "invalid_fraction"):
            assert a[name] == pytest.approx(b[name], rel=1e-6), name
    assert (one / "comparison.md").read_text() == (two / "comparison.md").read_text()


def test_float32_agrees_to_summation_order(tmp_path):
    settings = [*SETTINGS, f"cache={tmp_path / 'cache'}", "iterations=2"]
    train(load_settings("flux_tiny_random", [*settings, f"out={tmp_path / 'one'}"]))
    done = start_two(tmp_path, *settings, f"out={tmp_path / 'two'}")
    assert done.returncode == 0, done.stderr
    one, two = (stored(tmp_path / name, 1, tmp_path) for name in ("one", "two"))
    assert apart(gradients(one), gradients(two)) < 1e-4


def test_eight_bit_moments_resume_bit_for_bit_and_on_two_processes(tmp_path, monkeypatch):
    settings = [*SETTINGS, "optimizer=adamw8bit", f"cache={tmp_path / 'cache'}"]
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for out, stops in (("whole", [3]), ("parts", [2, 3])):
        for stop in stops:
            train(
                load_settings("flux_tiny_random", [*settings, f"out={tmp_path / out}", f"stop_after={stop}"])
            )
    whole, parts = (stored(tmp_path / out, 3, tmp_path) for out in ("whole", "parts"))
    assert all(torch.equal(value, parts["module"][name]) for name, value in whole["module"].items())
    parameter = torch.nn.Parameter(torch.zeros(64, 128))
    optimizer = make_optimizer([parameter], load_settings("flux_tiny_random", ["optimizer=adamw8bit"]))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].codes.dtype == torch.uint8
    done = start_two(tmp_path, *settings, f"out={tmp_path / 'two'}", "stop_after=2")
    assert done.returncode == 0, done.stderr
    again = start_two(tmp_path, *settings, f"out={tmp_path / 'two'}")
    assert again.returncode == 0, again.stderr
    # Blocks of quantised moments are cut at the shards, so this is close and no more.
    assert apart(whole["module"], stored(tmp_path / "two", 3, tmp_path)["module"]) < 1e-2


def test_a_weight_file_is_read_shard_by_shard(tmp_path):
    folder = save_random_flux(tmp_path / "flux")
    transformer = folder / "transformer"
    whole = transformer / "diffusion_pytorch_model.safetensors"
    policy = FluxPolicy.load(folder)
    before = {name: value.clone() for name, value in policy.module.state_dict().items()}

    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel.from_pretrained(transformer)
    whole.unlink()
    model.save_pretrained(transformer, max_shard_size="20KB")
    assert len(set(weight_files(transformer).values())) > 1
    again = FluxPolicy.load(folder).module.state_dict()
    assert all(torch.equal(before[name], again[name]) for name in before)

    shards = sorted(transformer.glob("*.safetensors"))
    data = shards[0].read_bytes()
    shards[0].write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=f"{shards[0].name} is damaged .*fetch the model again"):
        FluxPolicy.load(folder)
    shards[0].unlink()
    with pytest.raises(ValueError, match=f"names {shards[0].name}, which is not there"):
        FluxPolicy.load(folder)


def test_weights_of_other_shapes_are_refused(tmp_path):
    files = weight_files(save_random_flux(tmp_path / "flux") / "transformer")
    module = FluxPolicy.load("random:tiny").module
    with pytest.raises(ValueError, match=r"does not fit its config.json \(\d+ differences"):
        read_weights(module, files, tmp_path / "flux")


def test_a_shard_size_must_divide(monkeypatch):
    assert sharding_mesh(torch.device("cpu")) is None
    monkeypatch.setattr("g2rpo.distributed.world_size", lambda: 6)
    with pytest.raises(ValueError, match="shard_size=4 does not divide the 6 processes"):
        sharding_mesh(torch.device("cpu"), 4)


def test_groups_must_be_divided_evenly(tmp_path):
    done = start_two(tmp_path, "prompts_per_iteration=3", f"out={tmp_path / 'run'}")
    assert done.returncode != 0 and "3 groups cannot be divided evenly among 2 processes" in done.stderr
    assert not (tmp_path / "run").exists()
