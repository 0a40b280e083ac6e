"""The command as users call it: help, costs, training, images and exports, by the files that it writes."""

import json
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.processes import run_command

from g2rpo.cli.console import positive_number, print_table, recipe_and_overrides
from g2rpo.inference.images import from_pil, read_png_text
from g2rpo.rewards.registry import REWARDS
from g2rpo.run.metrics import read_metrics

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "train",
    "plan",
    "settings",
    "fetch",
    "embed",
    "sample",
    "score",
    "evaluate",
    "gallery",
    "compare",
    "report",
    "reproduce",
    "demo",
    "export",
    "doctor",
)
SMALL = [
    "prompts=world:demo",
    "prompts_per_iteration=1",
    "num_steps=4",
    "train_steps=2",
    "granularities=[1,2]",
    "group_size=3",
    "rewards={'bright:score'=1}",
    "guidance=2.0",
    "max_sequence_length=16",
    "sigma_rounding=released",
    "eval_rewards=['verifier']",
    "eval_prompts=world:heldout",
    "num_eval_prompts=2",
    "eval_every=0",
    "eval_num_steps=2",
    "sample_every=0",
    "num_sample_prompts=1",
    "compare_images=0",
    "iterations=2",
    "lr=1e-3",  # too high for a real run, but changes the images within two iterations
    "warmup_iterations=0",
    "device=cpu",
    "cache=cache",
    "out=run",
]


def g2rpo(*words, cwd=None, code=0, width=200):
    """stdout and stderr of a command."""
    done = run_command(*map(str, words), cwd=cwd, COLUMNS=str(width))
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def test_help_lists_every_command_with_a_complete_sentence():
    output = g2rpo("--help", width=80)[0]
    lines = [line.split(maxsplit=1) for line in output.split("Commands:")[1].strip().splitlines()]
    assert [name for name, _ in lines] == list(COMMANDS)
    assert all(summary.endswith(".") for _, summary in lines)  # none is truncated


def test_help_needs_no_torch():
    code = "import sys, g2rpo.__main__; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        (None, None, (None, [])),
        ("tiny", ["lr=1"], ("tiny", ["lr=1"])),
        ("lr=1", ["seed=2"], (None, ["lr=1", "seed=2"])),
        ("rewards.a.b:c=1", None, (None, ["rewards.a.b:c=1"])),
        ("prompts=a/b.txt", None, (None, ["prompts=a/b.txt"])),
        ("runs/lr=1/config.toml", ["seed=2"], ("runs/lr=1/config.toml", ["seed=2"])),
    ],
)
def test_a_first_word_with_an_equals_sign_is_an_override(recipe, overrides, expected):
    assert recipe_and_overrides(recipe, overrides) == expected


def test_a_number_or_a_word():
    assert positive_number("--shift", "2.5", "pipeline") == 2.5
    for text in ("0", "-1", "nan", "inf", "pipelin"):
        with pytest.raises(ValueError, match=f"--shift {text}: give a number above 0, or pipeline"):
            positive_number("--shift", text, "pipeline")


def test_a_narrow_table_keeps_every_word(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    finding, advice = (
        "a file of another kind, with keys that nobody knows",
        "give one of those that are published",
    )
    headers = ("", "status", "found", "advice")
    print_table(headers, [("a rather long name", "missing", finding, advice)], fold=("found",))
    words = capsys.readouterr().out.split()
    assert {"missing", *finding.split(), *advice.split()} <= set(words)


def test_traceback_on_request():
    assert "Traceback" in g2rpo("--traceback", "train", "lr=-1", code=1)[1]


def rows(table):
    """Cells of a printed table's lines, by their item."""
    cells = [line.split("   ") for line in table.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in cells]
    return {row[-2]: row[-1] for row in cells if len(row) >= 2}


def test_plan_counts_without_weights(tmp_path):
    shipped = Path(str(resources.files("g2rpo"))) / "assets" / "tiny_flux"
    weightless = shutil.copytree(shipped, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    words = [f"model={weightless}", "num_steps=8", "train_steps=4", "granularities=[1,2]", "group_size=8"]
    words += ["prompts_per_iteration=4", "iterations=10", "eval_every=0", "compare_images=0"]
    table = rows(g2rpo("plan", *words, "--seconds-per-forward", "0.5")[0])
    # The tails of a member with stride 1 take 7 + 6 + 5 + 4 forwards from steps 1 to 4; stride 2 evaluates 1
    # 2 4 6, 2 3 5, 3 4 6 and 4 5, of which the first two are shared: 2 + 1 + 1 + 0 more. 4 x (8 + 8 x 26) =
    # 864.
    assert table["rollout, tails"] == "832" and table["rollout, all"] == "864"
    assert table["update (with backward)"] == "16"  # 4 prompts x 4 steps: members share the state
    assert table["rollout"] == "432.0 s" and table["update"] == "24.0 s"  # 864 / 2; x 3 for the backward


def test_plan_reports_what_does_not_fit():
    output = g2rpo("plan", "--memory", "0.001")[0]
    assert output.startswith("does not fit: ") and "of 1.00 MB" in output


def test_doctor_reports_this_machine():
    output = g2rpo("doctor")[0]
    assert rows(output)["ok"] != ""
    line = next(line for line in output.splitlines() if "torch" in line.split()[:1])
    assert torch.__version__ in line and "embedded model ok" in " ".join(output.split())


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with a run of two iterations, stopped after the first and continued by the same command."""
    workspace = tmp_path_factory.mktemp("workspace")
    (workspace / "bright.py").write_text(
        "def score(images, prompts, metadata=None):\n    return images.mean((1, 2, 3))\n"
    )
    g2rpo("train", "tiny", *SMALL, "stop_after=1", cwd=workspace)
    assert [line["step"] for line in read_metrics(workspace / "run" / "metrics.jsonl") if "nfe" in line] == [
        1
    ]
    finished, errors = g2rpo("train", "tiny", *SMALL, cwd=workspace)
    assert (
        "Loading weights" not in errors and "%|" not in errors
    )  # no progress bars and messages of other packages
    (workspace / "finished.txt").write_text(finished)
    return workspace


def test_training_leaves_a_run(workspace):
    lines = [line for line in read_metrics(workspace / "run" / "metrics.jsonl") if "nfe" in line]
    assert [line["step"] for line in lines] == [1, 2]
    # 4 anchor steps; tails from steps 1 and 2 of 3 members: 3 + 2, and with stride 2 (1 2, 2 3) nothing more
    assert [line["nfe"] for line in lines] == [4 + 3 * 5] * 2
    assert 0 < lines[0]["reward/bright:score"] < 1 and "bright:score" not in REWARDS
    assert (workspace / "run" / "latest").read_text() == "step_000002\n"
    output = (workspace / "finished.txt").read_text()
    assert "g2rpo sample run --compare tiny --prompts world:heldout --limit 8 --steps 2 --shift 3" in output


def images_in(folder):
    return torch.stack([from_pil(Image.open(path)) for path in sorted(folder.glob("0*.png"))])


def test_images_of_a_run_and_of_its_export_are_the_same(workspace):
    words = ["--prompt", "a red circle", "--prompt", "two blue stars", "--num-images", "2"]
    words += ["--steps", "3", "--seed", "5", "--device", "cpu"]
    output, errors = g2rpo("sample", "run", *words, "--compare", "tiny", "--out", "pair", cwd=workspace)
    assert "Loading weights" not in errors
    tuned, base = images_in(workspace / "pair"), images_in(workspace / "pair" / "compare")
    assert len(tuned) == len(base) == 4 and (tuned - base).abs().max() > 2 / 255
    prompt, info = read_png_text(workspace / "pair" / "0003.png")
    assert prompt == "two blue stars" and info["seed"] == 8 and info["model"] == "run"
    # The base is sampled under the conditions of the run, not with its own defaults.
    other = read_png_text(workspace / "pair" / "compare" / "0000.png")[1]
    assert other == {**info, "model": "tiny", "seed": 5} and info["guidance"] == 2.0
    assert (info["max_sequence_length"], info["sigma_rounding"]) == (16, "released")
    for name in ("grid.png", "comparison.png"):
        assert f"pair/{name}" in output and (workspace / "pair" / name).is_file()

    output, _ = g2rpo("export", "run", "--out", "tuned", "--layout", "diffusers", cwd=workspace)
    assert output == "tuned\n"
    assert json.loads((workspace / "tuned" / "model_index.json").read_text())["_class_name"] == "FluxPipeline"
    g2rpo("sample", "tuned", *words, "--out", "again", cwd=workspace)
    assert torch.equal(images_in(workspace / "again"), tuned)


def test_another_model_takes_the_last_steps(workspace):
    copy = shutil.copytree(resources.files("g2rpo") / "assets" / "tiny_flux", workspace / "copy")
    file = copy / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shift": 1.25}))
    words = ["copy", "--prompt", "a red circle", "--steps", "3", "--device", "cpu", "--shift", "pipeline"]
    g2rpo("sample", *words, "--first-steps", "2", "--then", "run", "--out", "shared", cwd=workspace)
    g2rpo("sample", *words, "--compare", "run", "--out", "single", cwd=workspace)
    info = read_png_text(workspace / "shared" / "0000.png")[1]
    assert (info["model"], info["then"], info["first_steps"], info["shift"]) == ("copy", "run", 2, 1.25)
    images = [images_in(workspace / folder) for folder in ("shared", "single", "single/compare")]
    assert all((images[0] - other).abs().max() > 2 / 255 for other in images[1:])
    assert "belong together" in g2rpo("sample", *words, "--then", "tiny", cwd=workspace, code=2)[1]


def test_doctor_checks_files(workspace):
    output, _ = g2rpo("export", "run", "--out", "exported", "--layout", "single_file", cwd=workspace)
    file = max((workspace / output.strip()).glob("*.safetensors"), key=lambda path: path.stat().st_size)
    output, _ = g2rpo("doctor", "--verify", str(file), "--base", "tiny", cwd=workspace)
    assert "ok" in output and "torch" not in output
    (workspace / "torn.safetensors").write_bytes(file.read_bytes()[:5000])
    output, errors = g2rpo("doctor", "--verify", "torn.safetensors", "--base", "tiny", cwd=workspace, code=1)
    assert "missing" in output and not errors
    assert "--verify PATH" in g2rpo("doctor", "--base", "tiny", code=2)[1]


def test_prompts_of_a_file_are_limited(workspace):
    (workspace / "prompts.txt").write_text("a red circle\n\na blue star\na red circle\na green square\n")
    output, _ = g2rpo(
        "sample",
        "tiny",
        "--prompts",
        "prompts.txt",
        "--limit",
        "2",
        "--steps",
        "1",
        "--out",
        "few",
        cwd=workspace,
    )
    assert "3 prompts; 1 empty lines skipped; 1 repeated prompts left out" in output
    assert [read_png_text(path)[0] for path in sorted((workspace / "few").glob("0*.png"))] == [
        "a red circle",
        "a blue star",
    ]
