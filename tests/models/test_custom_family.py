"""A model family of a user, through a whole run: training, resumption, sampling, evaluation and export."""

from pathlib import Path

import pytest
import torch
from support.processes import run_command

from g2rpo.config.load import load_settings
from g2rpo.exporters.export import export_run
from g2rpo.inference.names import check_model
from g2rpo.inference.open import open_policy, open_run
from g2rpo.training.embed import embed_run
from g2rpo.training.run_prompts import RunPrompts
from g2rpo.training.trainer import train

TOY = "support.toy_family:FAMILY"


def settings(tmp_path: Path, **more):
    words = {
        "model": "random:toy",
        "family": TOY,
        "device": "cpu",
        "num_steps": 3,
        "train_steps": [0, 1],
        "granularities": [1],
        "group_size": 2,
        "prompts_per_iteration": 1,
        "iterations": 2,
        "checkpoint_every": 1,
        "prompts": str(tmp_path / "prompts.txt"),
        "out": str(tmp_path / "run"),
        "cache": str(tmp_path / "cache"),
        "num_sample_prompts": 1,
        "eval_every": 0,
        "compare_images": 0,
        "tensorboard": False,
        "ema_decay": 0.5,
        **more,
    }
    (tmp_path / "prompts.txt").write_text("a red circle\nblue\n")
    overrides = [f"{name}={value}" for name, value in words.items()]
    return load_settings("tiny", [*overrides, "rewards.verifier=none", "rewards.colourfulness=1"])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train(settings(tmp_path_factory.mktemp("toy"))).out


def test_a_run_resumes_with_the_same_weights(run, tmp_path):
    train(settings(tmp_path, stop_after=1))
    out = train(settings(tmp_path)).out
    whole, resumed = (open_run(path, family=TOY)[0].modules["field"].state_dict() for path in (run, out))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_its_code_is_imported_only_if_it_is_named(run):
    message = rf"custom model family {TOY}, whose code is imported only if you name it: give --family"
    for attempt in (
        lambda: open_policy(run),
        lambda: check_model(str(run)),
        lambda: export_run(run),
        lambda: open_run(run, family="other:FAMILY"),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()


def test_the_commands_take_the_family(run, tmp_path):
    options = ["--family", TOY, "--device", "cpu"]
    refused = run_command("sample", str(run), "--prompt", "a red circle", cwd=tmp_path)
    assert refused.returncode == 2 and f"give --family {TOY}" in refused.stderr
    sampled = run_command(
        "sample", str(run), "--prompt", "a red circle", "--out", "drawn", *options, cwd=tmp_path
    )
    assert sampled.returncode == 0 and (tmp_path / "drawn" / "0000.png").is_file(), sampled.stderr
    exported = run_command("export", str(run), "--out", "tuned", "--family", TOY, cwd=tmp_path)
    assert exported.returncode == 0 and (tmp_path / "tuned" / "field.pt").is_file(), exported.stderr
    assert "g2rpo sample" in (tmp_path / "tuned" / "README.md").read_text()
    evaluated = run_command(
        "evaluate", "random:toy", str(run), "tuned", "--prompts", str(run.parent / "prompts.txt"),
        "--rewards", "colourfulness", "--steps", "2", *options, cwd=tmp_path,
    )  # fmt: skip
    assert evaluated.returncode == 0, evaluated.stderr


def test_an_export_is_the_trained_policy(run, tmp_path):
    out = export_run(run, tmp_path / "tuned", family=TOY)
    opened, trained = open_policy(out, device="cpu", family=TOY), open_policy(run, device="cpu", family=TOY)
    x, sigma, cond = torch.randn(1, 64, 3), torch.tensor([0.5]), trained.encode(["a red circle"])
    assert torch.equal(opened.velocity(x, sigma, cond), trained.velocity(x, sigma, cond))
    with pytest.raises(ValueError, match="choose one of auto, diffusers"):
        export_run(run, tmp_path / "other", kind="single_file", family=TOY)
    with pytest.raises(ValueError, match="custom model family"):
        open_policy(out, device="cpu")


def test_its_prompts_are_embedded_before_the_run(tmp_path):
    own = settings(tmp_path)
    assert embed_run(own).added == len(RunPrompts.of(own).texts) == 2
    assert embed_run(own).added == 0


def test_its_own_errors_come_first(tmp_path):
    with pytest.raises(ValueError, match="the toy has images of 8 x 8 pixels only"):
        train(settings(tmp_path, resolution=16))
