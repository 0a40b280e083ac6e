"""FLUX end to end through the commands: embed, train (killed, resumed), export, sample, and stock diffusers.

Each of it with all weights trained and with adapters, on a folder in diffusers layout as FLUX.1's is.
"""

import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.policies import load
from support.processes import started_command
from support.random_flux import save_random_flux
from typer.testing import CliRunner

from g2rpo.__main__ import app
from g2rpo.inference.images import from_pil, read_png_text
from g2rpo.inference.open import open_policy, open_run
from g2rpo.inference.sample import sample_images, start_noise
from g2rpo.models.flux.text import FluxText
from g2rpo.run.folder import latest_checkpoint
from g2rpo.run.metrics import read_metrics

ROOT = Path(__file__).parents[2]
PROMPTS = [
    "a red circle",
    "two blue star",
    "a green square on white background",
    "a black star above a circle",
]
ITERATIONS, STEPS, SEED = 8, 4, 5
RANKS = {"all weights": 0, "adapters": 4}
TRAINED = [
    f"iterations={ITERATIONS}",
    f"num_steps={STEPS}",
    "train_steps=2",
    "group_size=3",
    "prompts_per_iteration=2",
    "rewards={colourfulness=1.0}",
    "guidance=2.0",
    "max_sequence_length=12",
    "num_sample_prompts=1",
    "eval_num_steps=2",
    "lr=1e-2",  # too much for a real run; a visible change after a few iterations
    "checkpoint_every=1",
    "tensorboard=false",
    "device=cpu",
]


def g2rpo(*words, code=0):
    """stdout and stderr of a command, run in this process."""
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The model: its noise schedule shifts with the resolution, as FLUX.1-dev's."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    folder = save_random_flux(tmp_path_factory.mktemp("model") / "flux")
    FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).save_pretrained(folder / "scheduler")
    (folder.parent / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("embeddings")


def recipe(base, cache, out, rank=0, *changes):
    """A command's words: recipe and overrides, of which the last one of a setting counts."""
    given = [f"model={base}", f"prompts={base.parent / 'prompts.txt'}", f"cache={cache}", f"out={out}"]
    words = {word.partition("=")[0]: word for word in [*TRAINED, *given, f"lora_rank={rank}", *changes]}
    return ["flux_tiny_random", *words.values()]


@pytest.fixture(scope="module")
def embedded(base, cache) -> str:
    """What `embed` said on the first call; the prompts and their embeddings are the same for all runs."""
    return g2rpo("embed", *recipe(base, cache, cache / "no run"))[0]


@dataclass(frozen=True)
class Trained:
    """A run that was killed and resumed.

    Attributes:
        out: its folder. words: of its command. rank: of its adapters.
        killed, resumed: what the two processes printed.
        steps: iterations of the checkpoint at the kill.
        code: of the killed process.
    """

    out: Path
    words: list[str]
    rank: int
    killed: str
    resumed: str
    steps: int
    code: int


@pytest.fixture(scope="module", params=RANKS.values(), ids=RANKS.keys())
def trained(request, base, cache, embedded, tmp_path_factory) -> Trained:
    out = tmp_path_factory.mktemp("place") / "run"
    words = recipe(base, cache, out, request.param)
    with started_command("train", *words) as process:
        deadline = time.monotonic() + 120
        while not (out / "latest").exists() and process.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
        ended = process.wait()
    killed = ended.stdout + ended.stderr
    checkpoint = latest_checkpoint(out)
    assert checkpoint is not None, killed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FluxText, "_load", lambda self: pytest.fail("loaded the text encoders"))
        resumed = "".join(g2rpo("train", *words))
    steps = int(checkpoint.name.removeprefix("step_"))
    return Trained(out, words, request.param, killed, resumed, steps, ended.returncode)


def weights(out):
    policy, _, _ = open_run(out, device="cpu")
    return {name: p.detach().numpy().tobytes() for name, p in policy.module.named_parameters()}


def timeless(out):
    lines = [line for line in read_metrics(out / "metrics.jsonl") if "nfe" in line]
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines]


def test_embed_fills_the_cache_for_every_run(base, cache, embedded):
    assert "4 different prompts: 0 already embedded, 4 to do" in embedded
    again, _ = g2rpo("embed", *recipe(base, cache, cache / "no run", 4))
    assert "4 different prompts: 4 already embedded, 0 to do" in again


def test_a_killed_run_goes_on_bit_for_bit(trained, tmp_path, monkeypatch):
    assert trained.code == -signal.SIGKILL and 1 <= trained.steps < ITERATIONS, trained.killed
    for output in (trained.killed, trained.resumed):  # both found all that `embed` had made
        assert "2 prompts x 19 forwards" in output.replace("\n", " ") and "embedding " not in output
    monkeypatch.setattr(FluxText, "_load", lambda self: pytest.fail("loaded the text encoders"))
    uninterrupted = tmp_path / "whole"
    g2rpo("train", *trained.words, f"out={uninterrupted}")
    for run in (uninterrupted, trained.out):
        assert latest_checkpoint(run).name == f"step_{ITERATIONS:06d}"
    assert [line["step"] for line in timeless(trained.out)] == list(range(1, ITERATIONS + 1))
    assert timeless(trained.out) == timeless(uninterrupted)
    assert weights(trained.out) == weights(uninterrupted)


def test_a_torn_checkpoint_is_passed_over(trained, tmp_path, caplog):
    """A file of the newest checkpoint loses its end: the iteration is done again, with the same result."""
    torn = shutil.copytree(trained.out, tmp_path / "torn")
    newest = torn / "checkpoints" / f"step_{ITERATIONS:06d}"
    file = next(newest.glob("*.distcp"))
    size = file.stat().st_size
    os.truncate(file, size // 2)
    output, _ = g2rpo("train", *trained.words, f"out={torn}")
    before = f"step_{ITERATIONS - 1:06d}"
    assert (
        f"{file.name} has {size // 2} of its {size} bytes); using the newest intact checkpoint, {before}"
        in caplog.text
    )
    assert f"from iteration {ITERATIONS - 1} on" in output.replace("\n", " ")
    assert file.stat().st_size == size and latest_checkpoint(torn) == newest
    assert weights(torn) == weights(trained.out)


def pictures(folder):
    return torch.stack([from_pil(Image.open(path)) for path in sorted(folder.glob("0*.png"))])


def stock(pipeline, noise):
    """The pictures of a diffusers pipeline, with its own schedule."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        PROMPTS[:2],
        latents=noise,
        num_inference_steps=STEPS,
        guidance_scale=2.0,
        height=16,
        width=16,
        max_sequence_length=12,
        output_type="pt",
    ).images


def test_the_export_draws_the_same_in_diffusers(trained, base, tmp_path):
    from diffusers import FluxPipeline

    layout = "lora" if trained.rank else "diffusers"
    exported = tmp_path / "export"
    assert g2rpo("export", trained.out, "--out", exported)[0] == f"{exported}\n"
    assert (exported / "model_index.json").is_file() == (layout == "diffusers")
    words = [word for prompt in PROMPTS[:2] for word in ("--prompt", prompt)]
    words += ["--steps", STEPS, "--seed", SEED, "--shift", "pipeline", "--device", "cpu"]
    g2rpo("sample", exported, *words, "--compare", base, "--out", tmp_path / "drawn")
    tuned, untuned = pictures(tmp_path / "drawn"), pictures(tmp_path / "drawn" / "compare")

    policy = open_policy(trained.out, device="cpu")  # not the export: both could be wrong in the same way
    seeds, shift = [SEED, SEED + 1], policy.pipeline_shift()
    info = read_png_text(tmp_path / "drawn" / "0000.png")[1]
    assert (
        info["guidance"] == policy.options.guidance == 2.0
        and info["shift"] == pytest.approx(shift)
        and shift > 1.2
    )
    noise = start_noise(policy, seeds)
    own = sample_images(policy, PROMPTS[:2], num_steps=STEPS, shift=shift, seeds=seeds)
    pipeline = FluxPipeline.from_pretrained(base if trained.rank else exported)
    if trained.rank:
        assert (stock(pipeline, noise) - untuned).abs().max() <= 2 / 255
        pipeline.load_lora_weights(exported)
    expected = stock(pipeline, noise)
    assert expected.std() > 0.01, "a flat picture would agree with anything"
    assert (expected - untuned).abs().max() > 8 / 255, "training changed nothing that could be compared"
    assert (own - expected).abs().max() <= 2 / 255
    assert (tuned - expected).abs().max() <= 2 / 255


@pytest.mark.parametrize("layout", ["diffusers", "lora", "single_file", "comfyui"])
@torch.no_grad()
def test_every_export_opens_again(trained, base, tmp_path, layout):
    exported = tmp_path / layout
    if layout in ("lora", "comfyui") and not trained.rank:
        _, errors = g2rpo("export", trained.out, "--out", exported, "--layout", layout, code=2)
        assert "there is no LoRA" in errors and not exported.exists()
        return
    g2rpo("export", trained.out, "--out", exported, "--layout", layout)
    files = list(exported.glob("*.safetensors"))
    assert len(files) == (layout != "diffusers")
    policy, _, _ = open_run(trained.out, device="cpu")
    cond, sigma = policy.encode(PROMPTS), torch.tensor([1.0, 0.8, 0.4, 0.05])
    x = start_noise(policy, [1, 2, 3, 4])
    expected = policy.velocity(x, sigma, cond)
    untrained = load(base, guidance=2.0, max_sequence_length=12).velocity(x, sigma, cond)
    assert (expected - untrained).abs().max() > 0.01
    alone = {"guidance": 2.0, "max_sequence_length": 12}  # a file by itself does not tell
    for path, known in [(exported, {}), *((file, alone) for file in files)]:
        opened = open_policy(path, base=str(base), device="cpu", **known)
        assert opened.velocity(x, sigma, cond).dtype == torch.float32
        torch.testing.assert_close(opened.velocity(x, sigma, cond), expected, rtol=0, atol=1e-5)


def test_other_settings_cannot_go_on(trained, monkeypatch):
    monkeypatch.setattr("g2rpo.training.trainer.load_policy", lambda *_, **__: pytest.fail("loaded a model"))
    config = (trained.out / "config.toml").read_bytes()
    _, errors = g2rpo("train", *trained.words, "lr=2e-2", "group_size=4", code=2)
    lines = [line.strip() for line in errors.splitlines()]
    differences = [line for line in lines if " stored, " in line]
    assert sorted(differences) == ["group_size: 3 stored, 4 given", "lr: 0.01 stored, 0.02 given"]
    assert (trained.out / "config.toml").read_bytes() == config


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ("model=./nowhere", ["model='./nowhere' looks like a folder, but there is no such folder"]),
        ("model=nowhere", ["no model folder 'nowhere'", "owner/model"]),
        ("model=no/such", ["'no/such' is neither a folder here nor a hub model", "`hf auth login`"]),
        ("resolution=18", ["resolution=18: sides must be multiples of 4 pixels, as resolution=16 would be"]),
        ("max_sequence_length=13", ["max_sequence_length=13 is outside 1..12"]),
        ("lora_rank=4 lora_targets=['attn.to_z']", ["ends in 'attn.to_z'", "attn.to_q", "ff.net.2"]),
    ],
)
def test_what_does_not_fit_is_reported_before_weights_are_read(
    base, cache, tmp_path, monkeypatch, changes, expected
):
    def unread(_):
        return lambda module: pytest.fail("read the weights")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("g2rpo.models.transformer.policy.fill_from_folder", unread)
    _, errors = g2rpo("train", *recipe(base, cache, tmp_path / "run", 0, *changes.split()), code=2)
    assert errors.startswith("error: ") and errors.count("error: ") == 1
    for part in expected:
        assert part in errors
    assert not (tmp_path / "run").exists()
