"""Two processes (gloo, FSDP2) train the same as one: gradients, weights, metrics and checkpoints."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.policies import load
from support.processes import run_processes, train_as
from support.random_flux import save_random_flux

from g2rpo.__main__ import app
from g2rpo.config.load import load_settings
from g2rpo.data import embeddings as conditioning
from g2rpo.models.flux.random import RandomText
from g2rpo.models.loading.reading import read_weights, weight_files
from g2rpo.models.transformer import policy as transformer
from g2rpo.run.best import best_checkpoint
from g2rpo.run.checkpoint_index import read_index, read_tensors
from g2rpo.run.folder import damage, latest_checkpoint
from g2rpo.runtime.sharding import sharding_mesh
from g2rpo.training.optimizer import make_optimizer
from g2rpo.training.trainer import train

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
WIDE = ["x_embedder.weight", "single_transformer_blocks.0.proj_out.weight"]
METHODS = {
    "full": [],
    "lora": ["lora_rank=4"],
    "path, an update a step, KL": [
        "algorithm=dance_grpo",
        "train_steps=none",
        "granularities=none",
        "update=per_step",
        "update_batch=1",  # a step's rows differ in number: forwards of one process make up for it
        "kl_beta=1.0",
    ],
    "path, an update a part of the members": [
        "algorithm=dance_grpo",
        "train_steps=none",
        "granularities=none",
    ],
}


def train_on(count, tmp_path, *settings):
    """Trains on `count` processes and checks that all of them succeed."""
    ended = run_processes(count, train_as, "flux_tiny_random", *settings, log=tmp_path / "log")
    assert [code for code, _ in ended] == [0] * count, "\n".join(text for _, text in ended)


def stored(run: Path, step: int) -> dict[str, dict]:
    """Tensors of a checkpoint by part ("module", "ema", "optimizer") and by their names in the part."""
    parts = {"module": {}, "ema": {}, "optimizer": {}}
    for name, tensor in read_tensors(run / "checkpoints" / f"step_{step:06d}").items():
        part, _, rest = name.partition(".")
        parts[part][rest] = tensor
    return parts


def writers(checkpoint: Path) -> set[int]:
    """Ranks of the processes that wrote files of the checkpoint."""
    return {int(file.name.split("_")[2]) for file in checkpoint.glob("__*.distcp")}


def apart(a: dict, b: dict) -> float:
    """Distance of two sets of tensors, relative to the norm of the first."""
    assert a.keys() == b.keys() and a
    off = sum((a[name].double() - b[name].double()).square().sum() for name in a)
    return float((off / sum(value.double().square().sum() for value in a.values())).sqrt())


def gradients(checkpoint: dict) -> dict:
    """AdamW's running mean, which after one optimizer step is a tenth of the gradient."""
    return {name: value for name, value in checkpoint["optimizer"].items() if name.endswith(".exp_avg")}


LONG_METHODS = ("full", "path, an update a step, KL", "path, an update a part of the members")


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=pytest.mark.long if m in LONG_METHODS else ()) for m in METHODS]
)
def test_two_processes_train_what_one_trains(method, tmp_path):
    settings = [*SETTINGS, *METHODS[method], "precision=float64", f"cache={tmp_path / 'cache'}"]
    one, two = tmp_path / "one", tmp_path / "two"
    keep = "keep_last=3"
    train(load_settings("flux_tiny_random", [*settings, keep, f"out={one}"]))
    train_on(2, tmp_path, *settings, keep, f"out={two}", "stop_after=2")
    assert writers(two / "checkpoints" / "step_000002") == {0, 1}

    first, first_two = stored(one, 1), stored(two, 1)
    assert apart(gradients(first), gradients(first_two)) < 1e-8
    second, second_two = stored(one, 2), stored(two, 2)
    for part in ("module", "ema"):
        assert apart(second[part], second_two[part]) < 1e-8
        assert apart(first[part], second[part]) > 1e-6  # and it moves

    train(load_settings("flux_tiny_random", [*settings, keep, f"out={two}"]))  # one process goes on from two
    third, third_two = stored(one, 3), stored(two, 3)
    assert apart(third["module"], third_two["module"]) < 1e-8
    lines, lines_two = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, two)
    )
    assert [line["step"] for line in lines] == [line["step"] for line in lines_two] == [1, 2, 3]
    for a, b in zip(lines, lines_two, strict=True):
        assert a["nfe"] == b["nfe"]
        for name in ("reward/colourfulness", "advantage_abs", "grad_norm", "invalid_fraction"):
            assert a[name] == pytest.approx(b[name], rel=1e-6), name
        assert max(a["rollout_ratio_dev"], b["rollout_ratio_dev"]) < 1e-9
    assert (one / "comparison.md").read_text() == (two / "comparison.md").read_text()


@pytest.mark.long
def test_copies_of_a_sharded_network_train_what_one_process_trains(tmp_path):
    """HSDP: four processes, two copies of the weights, each sharded over two."""
    settings = [
        f"cache={tmp_path / 'cache'}",
        "iterations=2",
        "prompts_per_iteration=4",
        "num_steps=4",
        "num_sample_prompts=1",  # three processes draw nothing
        "prompts=world:demo",
        "keep_last=3",
        "ema_decay=0.9",
        "tensorboard=false",
        "eval_every=1",
        "eval_prompts=world:demo",
        "num_eval_prompts=2",
        "eval_num_steps=2",
        "keep_best=colourfulness",
        "max_sequence_length=8",
        "precision=float64",
    ]
    one, four = tmp_path / "one", tmp_path / "four"
    train(load_settings("flux_tiny_random", [*settings, f"out={one}"]))
    train_on(4, tmp_path, *settings, "shard_size=2", f"out={four}")
    metadata = read_index(four / "checkpoints" / "step_000002").state_dict_metadata
    assert {len(metadata[f"module.{name}"].chunks) for name in WIDE} == {2}  # two shards, each written once
    first, first_four = stored(one, 1), stored(four, 1)
    assert apart(gradients(first), gradients(first_four)) < 1e-8
    second, second_four = stored(one, 2), stored(four, 2)
    assert best_checkpoint(one).name == best_checkpoint(four).name
    for part in ("module", "ema"):
        assert apart(second[part], second_four[part]) < 1e-8
        assert apart(first[part], second[part]) > 1e-6


@pytest.mark.parametrize(
    "way", ["SIGTERM to torchrun", pytest.param("SIGINT to all processes", marks=pytest.mark.long)]
)
@pytest.mark.long
def test_a_stopped_torchrun_leaves_a_checkpoint_that_one_process_goes_on_from(tmp_path, way):
    run = tmp_path / "run"
    settings = [
        "flux_tiny_random",
        "iterations=1000",
        "checkpoint_every=1000",
        "num_sample_prompts=1",
        "prompts=world:demo",
        "tensorboard=false",
        f"cache={tmp_path / 'cache'}",
        f"out={run}",
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    process = subprocess.Popen(
        [*torchrun, "g2rpo", "train", *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + 120
    while process.poll() is None and not (metrics.is_file() and metrics.read_bytes()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    if way == "SIGTERM to torchrun":
        process.terminate()
    else:  # as a batch system does; torchrun passes it on besides
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(workers) >= 2
        for pid in (process.pid, *map(int, workers)):
            os.kill(pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    saved = latest_checkpoint(run)
    assert saved is not None and not damage(saved), output
    step = int(saved.name.removeprefix("step_"))
    assert 1 <= step < 1000 and f"interrupted; {step} iterations are saved" in output
    assert writers(saved) == {0, 1}
    recipe, *changes = settings
    done = train(load_settings(recipe, [*changes, f"stop_after={step + 1}"]))
    assert [line["step"] for line in done.metrics] == list(range(1, step + 2))
    assert latest_checkpoint(run).name == f"step_{step + 1:06d}"


def train_signalled(moment: str, pid: Path, *settings: str) -> None:
    """The command, of whose two processes one is signalled to stop while the prompts are embedded."""
    first, encode, encoded = os.environ["RANK"] == "0", RandomText.encode, []

    def encode_and_signal(self, prompts):
        encoded.extend(prompts)
        if first:
            pid.write_text(str(os.getpid()))
        elif len(encoded) == 3 and moment == "at work":
            os.kill(os.getpid(), signal.SIGTERM)
        elif len(encoded) == 4 and moment == "done and waiting":
            time.sleep(1)  # the first process has the same to do and does not sleep
            os.kill(int(pid.read_text()), signal.SIGTERM)
        return encode(self, prompts)

    RandomText.encode = encode_and_signal
    conditioning.SHARD_PROMPTS = 2
    app(["train", "flux_tiny_random", *settings])


@pytest.mark.parametrize(("moment", "kept"), [("at work", 4 + 2), ("done and waiting", 4 + 4)])
def test_a_signal_to_one_process_stops_all_that_embed(tmp_path, monkeypatch, moment, kept):
    (tmp_path / "p.txt").write_text("".join(f"{number} stars\n" for number in range(8)))
    out = tmp_path / "run"
    settings = [
        f"prompts={tmp_path / 'p.txt'}",
        "iterations=4",
        "num_sample_prompts=1",
        "compare_images=0",
        "tensorboard=false",
        f"cache={tmp_path / 'cache'}",
        f"out={out}",
    ]
    ended = run_processes(2, train_signalled, moment, tmp_path / "pid", *settings, log=tmp_path / "log")
    output = "".join(text for _, text in ended)
    assert [code for code, _ in ended] == [130, 130], output
    assert output.count(f"interrupted; {kept} embeddings are kept; run the same command to continue") == 1
    assert not out.exists()
    encode, encoded = RandomText.encode, []
    monkeypatch.setattr(RandomText, "encode", lambda self, new: encoded.extend(new) or encode(self, new))
    assert train(load_settings("flux_tiny_random", [*settings, "stop_after=1"])).step == 1
    assert len(encoded) == 8 - kept


def train_signalled_at_gathering(*settings: str) -> None:
    """The command; its second process is signalled just before all gather the weights for a rollout."""
    gather, calls = transformer.resident, []

    def resident(module):
        calls.append(module)
        if os.environ["RANK"] == "1" and len(calls) == 2:  # the first draws the images of step 0
            signal.raise_signal(signal.SIGTERM)
        return gather(module)

    transformer.resident = resident
    app(["train", "flux_tiny_random", *settings])


def test_a_signal_never_comes_between_the_processes_gathering(tmp_path):
    settings = [
        "prompts=world:demo",
        "num_sample_prompts=1",
        "tensorboard=false",
        f"cache={tmp_path / 'cache'}",
        f"out={tmp_path / 'run'}",
    ]
    ended = run_processes(2, train_signalled_at_gathering, *settings, log=tmp_path / "log")
    assert [code for code, _ in ended] == [130, 130], "".join(text for _, text in ended)
    assert "interrupted; 0 iterations are saved; run the same command to continue" in ended[0][1]
    assert writers(latest_checkpoint(tmp_path / "run")) == {0, 1}


@pytest.mark.long
def test_float32_agrees_to_summation_order(tmp_path):
    settings = [*SETTINGS, f"cache={tmp_path / 'cache'}", "iterations=2"]
    train(load_settings("flux_tiny_random", [*settings, f"out={tmp_path / 'one'}"]))
    train_on(2, tmp_path, *settings, f"out={tmp_path / 'two'}")
    one, two = (stored(tmp_path / name, 1) for name in ("one", "two"))
    assert apart(gradients(one), gradients(two)) < 1e-4


@pytest.mark.long
def test_eight_bit_moments_resume_bit_for_bit_and_on_two_processes(tmp_path, monkeypatch):
    settings = [*SETTINGS, "optimizer=adamw8bit", f"cache={tmp_path / 'cache'}"]
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for out, stops in (("uninterrupted", [3]), ("parts", [2, 3])):
        for stop in stops:
            train(
                load_settings("flux_tiny_random", [*settings, f"out={tmp_path / out}", f"stop_after={stop}"])
            )
    uninterrupted, parts = (stored(tmp_path / out, 3) for out in ("uninterrupted", "parts"))
    assert all(torch.equal(value, parts["module"][name]) for name, value in uninterrupted["module"].items())
    parameter = torch.nn.Parameter(torch.zeros(64, 128))
    optimizer = make_optimizer([parameter], load_settings("flux_tiny_random", ["optimizer=adamw8bit"]))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].codes.dtype == torch.uint8
    train_on(2, tmp_path, *settings, f"out={tmp_path / 'two'}", "stop_after=2")
    train_on(2, tmp_path, *settings, f"out={tmp_path / 'two'}")
    # Blocks of quantised moments are cut at the shards, so this is close and no more.
    assert apart(uninterrupted["module"], stored(tmp_path / "two", 3)["module"]) < 1e-2


def test_a_weight_file_is_read_shard_by_shard(tmp_path):
    folder = save_random_flux(tmp_path / "flux")
    transformer = folder / "transformer"
    single_file = transformer / "diffusion_pytorch_model.safetensors"
    policy = load(folder)
    before = {name: value.clone() for name, value in policy.module.state_dict().items()}

    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel.from_pretrained(transformer)
    single_file.unlink()
    model.save_pretrained(transformer, max_shard_size="20KB")
    assert len(set(weight_files(transformer).values())) > 1
    again = load(folder).module.state_dict()
    assert all(torch.equal(before[name], again[name]) for name in before)

    shards = sorted(transformer.glob("*.safetensors"))
    data = shards[0].read_bytes()
    shards[0].write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=f"{shards[0].name} is damaged .*fetch it again"):
        load(folder)
    shards[0].unlink()
    with pytest.raises(ValueError, match=f"names {shards[0].name}, which does not exist"):
        load(folder)


def test_weights_of_other_shapes_are_refused(tmp_path):
    files = weight_files(save_random_flux(tmp_path / "flux") / "transformer")
    module = load("random:tiny").module
    with pytest.raises(ValueError, match=r"does not fit its config.json \(\d+ differences"):
        read_weights(module, files, tmp_path / "flux")


def test_a_shard_size_must_divide(monkeypatch):
    assert sharding_mesh(torch.device("cpu")) is None
    monkeypatch.setattr("g2rpo.runtime.sharding.world_size", lambda: 6)
    with pytest.raises(ValueError, match="shard_size=4 does not divide the 6 processes"):
        sharding_mesh(torch.device("cpu"), 4)


def test_groups_must_be_divided_evenly(tmp_path):
    settings = ["flux_tiny_random", "prompts_per_iteration=3", f"out={tmp_path / 'run'}"]
    for code, output in run_processes(2, train_as, *settings, log=tmp_path / "log"):
        assert code == 1 and "3 groups cannot be divided evenly among 2 processes" in output
    assert not (tmp_path / "run").exists()
