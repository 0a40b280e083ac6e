"""The examples of docs/extending.md, each run as its docstring says, at the smallest sizes."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support.code_lines import code_lines
from support.processes import run_command
from support.small_runs import timeless

import g2rpo
from g2rpo.inference.open import open_run
from g2rpo.run.metrics import read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = """
model = "tiny"
guidance = 1.0
num_steps = 3
group_size = 3
prompts = "prompts.txt"
prompts_per_iteration = 1
rewards = { "interrupting:brightness" = 1.0 }
iterations = 2
checkpoint_every = 1
num_sample_prompts = 1
eval_num_steps = 1
tensorboard = false
lr = 1e-3
device = "cpu"
cache = "cache"
"""
INTERRUPTING = '''
import os
import signal

calls = 0


def brightness(images, prompts, metadata=None):
    """A reward that presses Ctrl-C in its call number INTERRUPT_AT."""
    global calls
    calls += 1
    if os.environ.get("INTERRUPT_AT") == str(calls):
        os.kill(os.getpid(), signal.SIGINT)
    return images.mean((1, 2, 3))
'''
TILES = ("model=random:tiles", "train_steps=2", "granularities=[1]")
FAMILY = ("--family", "own_family:FAMILY")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder of a user: the examples, a recipe and prompts."""
    folder = tmp_path_factory.mktemp("user")
    for file in EXAMPLES.glob("own_*.py"):
        shutil.copy(file, folder)
    (folder / "small.toml").write_text(SMALL)
    (folder / "interrupting.py").write_text(INTERRUPTING)
    (folder / "prompts.txt").write_text("a red circle\ntwo blue stars\n")
    return folder


@pytest.fixture
def examples(monkeypatch) -> None:
    """Makes the examples importable in this process."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def done(*words: str, cwd: Path) -> str:
    """Runs a command that must succeed; returns its standard output."""
    result = run_command(*words, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


def pixels_of(folder: Path) -> bytes:
    with Image.open(folder / "0000.png") as image:
        return image.tobytes()


def interrupted(*words: str, cwd: Path) -> None:
    """Runs `train` and interrupts it in the second iteration."""
    result = run_command(
        "train", *words, cwd=cwd, INTERRUPT_AT="4"
    )  # a dry call, an iteration, and the second scoring of the pre-flight
    assert result.returncode == 130 and "1 iterations are saved" in result.stdout, (
        result.stdout + result.stderr
    )


def weights_of(run: Path, family: str | None = None) -> dict[str, torch.Tensor]:
    policy, _, _ = open_run(run, family=family)
    (module,) = policy.modules.values()
    return module.state_dict()


def assert_same_run(first: Path, second: Path, family: str | None = None) -> None:
    """Both runs have the same metrics, times aside, and the same weights."""
    lines = [timeless(read_metrics(run / "metrics.jsonl")) for run in (first, second)]
    assert lines[0] == lines[1] and len(lines[0]) == 2
    whole, resumed = weights_of(first, family), weights_of(second, family)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(("file", "limit"), [("own_algorithm.py", 60), ("own_objective.py", 80)])
def test_the_examples_are_short(file, limit):
    assert code_lines(EXAMPLES / file) <= limit


def test_the_examples_use_public_names_only():
    modules = set(re.findall(r"`(g2rpo\.[a-z_.]+)`", (EXAMPLES.parent / "docs/extending.md").read_text()))
    for file in EXAMPLES.glob("own_*.py"):
        text = file.read_text()
        assert set(re.findall(r"from (g2rpo[\w.]*) import", text)) <= modules, file
        assert set(re.findall(r"(?<![\w.])g2rpo\.([A-Za-z_]+)(?!\w*\.)", text)) - {
            "algorithms",
            "flow",
            "objectives",
            "rollouts",
        } <= set(g2rpo.__all__), file


DRAWN = "algorithm=own_algorithm:DrawnStep"
OPTIONS = {"num_steps": 3, "shift": 3.0, "drawn_steps": 2, "strides": [1], "eta": 0.7, "clip_range": 1e-4}


@pytest.fixture(scope="module")
def drawn(folder) -> Path:
    done("train", "small.toml", DRAWN, "drawn_steps=2", "strides=[1]", "out=runs/drawn", cwd=folder)
    return folder / "runs" / "drawn"


def test_a_run_of_an_own_algorithm_resumes_with_its_options(drawn, folder):
    options = ("small.toml", DRAWN, "strides=[1]", "out=runs/resumed")
    interrupted(*options, "drawn_steps=2", cwd=folder)
    other = run_command("train", *options, "drawn_steps=1", cwd=folder)
    assert other.returncode == 2 and "drawn_steps: 2 stored, 1 given" in other.stderr
    done("train", *options, "drawn_steps=2", cwd=folder)
    assert_same_run(drawn, folder / "runs" / "resumed")
    recorded = tomllib.loads((drawn / "config.toml").read_text())
    assert recorded["algorithm"] == "own_algorithm:DrawnStep"
    assert recorded["algorithm_options"] == OPTIONS


def test_wrong_options_of_an_own_algorithm_are_refused(folder):
    for change, message in (
        ("drawn_steps=3", "noise of the last step would stay in the image"),
        ("drawn_step=2", "has no option drawn_step; it would have no effect; did you mean 'drawn_steps'"),
        ("strides=[0]", "greater than or equal to 1"),
    ):
        refused = run_command("train", "small.toml", DRAWN, change, "out=runs/never", cwd=folder)
        assert refused.returncode == 2 and message in refused.stderr, refused.stderr
    assert not (folder / "runs" / "never").exists()


def test_a_run_of_an_own_algorithm_is_sampled_and_exported_without_its_code(drawn, folder, tmp_path):
    prompt = ("--prompt", "a red circle", "--steps", "1", "--device", "cpu")
    done("sample", str(drawn), *prompt, "--out", "drawn", cwd=tmp_path)
    done("export", str(drawn), "--out", "tuned", cwd=tmp_path)  # there is no own_algorithm.py in this folder
    done("sample", "tuned", *prompt, "--out", "again", cwd=tmp_path)
    assert pixels_of(tmp_path / "drawn") == pixels_of(tmp_path / "again")
    record = json.loads((tmp_path / "tuned" / "g2rpo.json").read_text())
    assert record["settings"]["algorithm_options"] == OPTIONS
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    refused = run_command("train", str(drawn / "config.toml"), cwd=tmp_path)
    assert refused.returncode == 2 and "no module 'own_algorithm'" in refused.stderr


@pytest.mark.long
def test_an_own_algorithm_is_compared(drawn, folder):
    arm = f"again=small.toml {DRAWN} drawn_steps=2 strides=[1]"
    done(
        "compare", "--run", "drawn=runs/drawn", "--arm", arm, "--seeds", "42", "--out", "compared", cwd=folder
    )
    assert_same_run(drawn, folder / "compared" / "runs" / "again" / "42")
    assert "again" in (folder / "compared" / "compare.md").read_text()


def test_the_advantages_of_the_own_algorithm_are_ranks(examples):
    from own_algorithm import DrawnStep

    rewards = torch.tensor([[[[1.0, 5.0, 5.0, torch.nan]]], [[[30.0, 20.0, 10.0, 0.0]]]])  # [R, K, J, G]
    valid = torch.tensor([[True, True, True, False]])
    rollout = type("Group", (), {"rewards": rewards, "valid": valid})()
    (advantages,) = DrawnStep().advantages([rollout], [1.0, 2.0])
    # Wins minus losses over 3, of 3 valid members: (-2, 1, 1) and twice (2, 0, -2).
    assert advantages.tolist() == [pytest.approx([2 / 3, 1 / 3, -1.0, 0.0])]
    steps = [DrawnStep(num_steps=8, drawn_steps=5).plan(0, n).noise_steps[0] for n in range(60)]
    assert set(steps) == {0, 1, 2, 3, 4}


def test_an_own_objective_trains_towards_the_better_images(examples, tmp_path):
    """Its rows are the noisy images, its gradient points to the images with the larger weights."""
    from own_family import Tiles
    from own_objective import WeightedFlow

    (tmp_path / "prompts.txt").write_text("a red circle\n")
    settings = g2rpo.load_settings(
        "tiny",
        {
            "prompts": str(tmp_path / "prompts.txt"),
            "prompts_per_iteration": 1,
            "group_size": 4,
            "compare_images": 0,
            "out": str(tmp_path / "run"),
            "cache": str(tmp_path / "cache"),
            "device": "cpu",
        },
    )
    trainer = g2rpo.Trainer(
        settings,
        policy=Tiles(g2rpo.PolicyOptions(), torch.device("cpu")),
        rewards={"colourfulness": g2rpo.load_reward("colourfulness", "cpu")},
        algorithm=WeightedFlow(num_steps=4, num_levels=3, temperature=0.5),
    )
    (rollout,), _, counted = trainer.explore()
    assert counted["nfe"] == 4 * 4 and counted["nfe_update"] == 4 * 3 * 3
    (advantage,) = trainer.algorithm.advantages([rollout], [1.0])
    context = g2rpo.Context(trainer.sigmas, "flow", 0.0, 0, 0)
    rows = trainer.objective.rows([rollout], [advantage], context)
    assert len(rows) == 12 and rows.member.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    images = rows.x - rows.sigma[:, None, None] * rows.target
    torch.testing.assert_close(images, rollout.latents[0][rows.member])
    torch.testing.assert_close(rows.weight, (2 * advantage[0][rows.member]).exp())
    velocity = torch.zeros_like(rows.x, requires_grad=True)
    loss = trainer.objective.loss(rows, velocity)
    loss.value.backward()
    torch.testing.assert_close(velocity.grad, -2 * rows.weight[:, None, None] * rows.target / rows.x.numel())
    best, worst = int(advantage[0].argmax()) * 3, int(advantage[0].argmin()) * 3
    assert rows.weight[best] > 2 * rows.weight[worst]
    assert loss.mean["flow_matching"] == pytest.approx(rows.target.square().mean().item())


def test_an_own_objective_trains_by_the_command(folder):
    words = ("small.toml", "algorithm=own_objective:WeightedFlow", "temperature=0.5")
    planned = done("plan", *words, cwd=folder)
    assert "forwards" in planned
    done("train", *words, "out=runs/weighted", cwd=folder)
    lines = [line for line in read_metrics(folder / "runs" / "weighted" / "metrics.jsonl") if "loss" in line]
    assert len(lines) == 2 and all(0 < line["loss"] < 100 and line["grad_norm"] > 0 for line in lines)
    assert all(line["nfe"] == 3 * 3 and line["nfe_update"] == 3 * 2 * 3 for line in lines)


@pytest.fixture(scope="module")
def tiles(folder) -> Path:
    said = done("train", "small.toml", *TILES, "family=own_family:FAMILY", "out=runs/tiles", cwd=folder)
    assert "g2rpo export runs/tiles --family own_family:FAMILY\n" in said
    return folder / "runs" / "tiles"


def test_a_run_of_an_own_family_resumes(tiles, folder, examples):
    options = ("small.toml", *TILES, "family=own_family:FAMILY", "out=runs/tiles_resumed")
    interrupted(*options, cwd=folder)
    done("train", *options, cwd=folder)
    assert_same_run(tiles, folder / "runs" / "tiles_resumed", "own_family:FAMILY")


def test_a_later_model_that_does_not_take_the_conditions_is_refused_before_the_first_samples(tiles, folder):
    """The embedded model's conditions include a number of text tokens, which the tiles have not."""
    words = ("evaluate", "tiny", "runs/tiles", "--prompts", "prompts.txt", "--rewards", "colourfulness")
    refused = run_command(*words, *FAMILY, "--steps", "1", "--out", "refused", cwd=folder)
    assert refused.returncode == 2 and "max_sequence_length" in refused.stderr, refused.stderr
    assert not list((folder / "refused").rglob("*.png"))


def test_an_own_family_is_planned_and_its_options_are_checked(folder):
    words = ("small.toml", *TILES, "family=own_family:FAMILY")
    assert "forwards" in done("plan", *words, cwd=folder)
    refused = run_command("train", *words, "lora_rank=4", "out=runs/never", cwd=folder)
    assert (
        refused.returncode == 2 and "the family of tiles has no lora_rank=4; leave it out" in refused.stderr
    )


def test_an_own_family_is_exported_sampled_and_evaluated(tiles, folder, examples):
    assert done("export", str(tiles), *FAMILY, "--out", "tuned", cwd=folder).strip() == "tuned"
    exported = load_file(folder / "tuned" / "tiles.safetensors")
    trained = weights_of(tiles, "own_family:FAMILY")
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], trained[name]) for name in trained)
    options = ("--device", "cpu", "--steps", "2", *FAMILY)
    for model, out in ((str(tiles), "of_run"), ("tuned", "of_export")):
        done("sample", model, "--prompt", "a red circle", "--out", out, *options, cwd=folder)
    assert pixels_of(folder / "of_run") == pixels_of(folder / "of_export")
    done(
        "evaluate", "random:tiles", "runs/tiles", "tuned", "--prompts", "prompts.txt",
        "--rewards", "colourfulness", *options, cwd=folder,
    )  # fmt: skip
    table = (folder / "evaluation" / "results.md").read_text()
    assert "tiles" in table and "tuned" in table


def test_the_code_of_an_own_family_is_imported_only_if_it_is_named(tiles, folder):
    for words in (
        ("export", str(tiles)),
        ("sample", str(tiles), "--prompt", "a red circle"),
        ("evaluate", str(tiles), "--prompts", "prompts.txt", "--rewards", "colourfulness"),
    ):
        refused = run_command(*words, cwd=folder)
        assert refused.returncode == 2, refused.stderr
        assert "give --family own_family:FAMILY" in refused.stderr


def test_an_own_reward_trains_and_scores(folder, examples):
    from own_reward import Colour

    images = torch.tensor([0.9, 0.6, 0.2])[None, :, None, None].expand(2, 3, 8, 8).clone()
    images[1] = 0.0
    scores = g2rpo.load_reward("own_reward:Colour", "cpu")(images, ["", ""])
    # (0.9 + 0.6 + 0.2) / 3 away
    assert scores.tolist() == pytest.approx([0.0, -1.7 / 3], abs=1e-6)
    assert Colour.spec.num_params == 0
    with pytest.raises(ValueError, match="each in \\[0, 1\\]"):
        g2rpo.load_reward("own_reward:Colour", "cpu", {"rgb": [2, 0, 0]})
    words = (
        "small.toml", "rewards.interrupting:brightness=none", "rewards.own_reward:Colour=1.0",
        'reward_options={"own_reward:Colour"={rgb=[1.0, 0.5, 0.0]}}', "train_steps=1", "granularities=[1]",
    )  # fmt: skip
    assert "not counted" not in done("plan", *words, cwd=folder)
    done("train", *words, "iterations=1", "out=runs/orange", cwd=folder)
    (line,) = [m for m in read_metrics(folder / "runs/orange/metrics.jsonl") if "loss" in m]
    assert -1 < line["reward/own_reward:Colour"] < 0
    done(
        "score", "--images", "runs/orange/samples/step_000000", "--rewards", "own_reward:Colour",
        "--option", "own_reward:Colour.rgb=[1.0, 0.5, 0.0]", "--device", "cpu", "--out", "scored", cwd=folder,
    )  # fmt: skip


def test_an_own_groupwise_reward_trains(folder, examples):
    judge = g2rpo.load_reward("own_group_reward:MoreColourful", "cpu", {"margin": 0.5})
    grey, red = torch.full((3, 8, 8), 0.5), torch.zeros(3, 8, 8)
    red[0] = 1.0
    assert judge.reward(torch.stack([grey, red, grey]), "a circle").tolist() == [0.25, 1.0, 0.25]
    words = (
        "small.toml", "rewards.interrupting:brightness=none", "rewards.own_group_reward:MoreColourful=1.0",
        'reward_options={"own_group_reward:MoreColourful"={margin=0.5}}', "train_steps=1",
        "granularities=[1]",
    )  # fmt: skip
    assert "3 comparisons" in done("plan", *words, cwd=folder)
    done("train", *words, "iterations=1", "out=runs/colourful", cwd=folder)
    (line,) = [m for m in read_metrics(folder / "runs/colourful/metrics.jsonl") if "loss" in m]
    # Each comparison gives one point in all, so the mean win rate of a group is 1/2.
    assert line["reward/own_group_reward:MoreColourful"] == pytest.approx(0.5)
