"""User errors through the command: a clear message, exit code 2, and nothing is loaded or written."""

from pathlib import Path

import pytest
from support.processes import run_command

ROOT = Path(__file__).parents[2]
HOLLOW = "model=./hollow"
LONG = "a red circle " * 231  # 3,003 characters, 3,002 without the white space at the end


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder to stand in. `hollow` is a model folder without a model: loading it would be another error."""
    folder = tmp_path_factory.mktemp("bad_input")
    (folder / "hollow").mkdir()
    (folder / "taken").write_text("a file where a folder should be")
    (folder / "torn.safetensors").write_bytes(b"no header")
    (folder / "typo.toml").write_text('model = "./hollow"\ngroup_sise = 4\n')
    (folder / "broken.toml").write_text("lr = 1e-5\nseed = \n")
    (folder / "long.txt").write_text(f"a red circle\n{LONG}\n")
    (folder / "empty.jsonl").write_text('{"prompt": "a red circle"}\n{"prompt": "  "}\n')
    return folder


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refused(folder, *arguments):
    """stderr of a command that must fail cleanly."""
    before = contents(folder)
    done = run_command(*arguments, cwd=folder, HOME=str(folder))
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    assert contents(folder) == before
    return done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["typo.toml"], ["typo.toml", "'group_sise'", "did you mean 'group_size'"]),
        (["missing.toml", HOLLOW], ["no recipe 'missing.toml'", "tiny"]),
        (["broken.toml", HOLLOW], ["broken.toml:2:"]),
        ([HOLLOW, "eta=0"], ["eta must be > 0 for training"]),
        (["tiny", HOLLOW, "lr"], ["'lr' is not key=value"]),
        ([HOLLOW, "lerning_rate=1"], ["'lerning_rate'"]),
        ([HOLLOW, "prompts=missing.txt"], ["no prompt file 'missing.txt'"]),
        ([HOLLOW, "eval_prompts=missing.txt"], ["no prompt file 'missing.txt'"]),
        ([HOLLOW, "prompts=long.txt"], ["long.txt, line 2", "3002 characters", "2500"]),
        ([HOLLOW, "group_size=1"], ["group_size = 1", "at least 2 images"]),
        ([HOLLOW, "granularities=[0,1]"], ["granularities = [0, 1]", "1 takes every step"]),
        ([HOLLOW, "out=taken"], ["taken is a file; give a folder"]),
        ([HOLLOW, "out=taken/run"], ["taken is a file; give a folder"]),
        ([HOLLOW, "cache=taken"], ["cache='taken'", "taken is a file; give a folder"]),
        ([HOLLOW, "rewards.verifer=none"], ["no 'verifer' to remove", "'verifier'"]),
        (["rewards.no_such:thing=1"], ["no module 'no_such'", "current folder"]),
        ([HOLLOW, "rewards.tiny_clp=1"], ["'tiny_clp'", "did you mean 'tiny_clip'"]),
        ([HOLLOW, "algorithm=g2rp"], ["'g2rp'", "did you mean 'g2rpo'"]),
        ([HOLLOW, "window=3"], ["algorithm='g2rpo' has no option window", "granularities"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_train(folder, arguments, expected):
    message = refused(folder, "train", *arguments)
    assert message.startswith("error: ")
    for part in expected:
        assert part in message
    assert "model_index" not in message  # what loading `hollow` would say


def test_every_fault_of_a_recipe_is_one_line(folder):
    message = refused(folder, "train", HOLLOW, "lr=-1", "group_sise=3")
    assert len(message.splitlines()) == 2 and "lr = -1" in message and "'group_size'" in message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "give --prompt TEXT, or --prompts"),
        (["--prompt", ""], "has 1 to 2500 characters, this one has 0"),
        (["--prompt", "   "], "has 1 to 2500 characters, this one has 0"),
        (["--prompt", LONG], "has 1 to 2500 characters, this one has 3002"),
        (["--prompts", "long.txt"], "long.txt, line 2"),
        (["--prompts", "empty.jsonl"], "empty.jsonl, line 2"),
        (["--prompts", "missing.txt"], "no prompt file 'missing.txt'"),
        (["--prompts", "world:dmo"], "did you mean 'demo'"),
        (["--prompt", "a red circle", "--out", "taken"], "taken is a file; give a folder"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else None,
)
def test_sample(folder, arguments, expected):
    message = refused(folder, "sample", "hollow", *arguments)
    assert message.startswith("error: ") and expected in message and "model_index" not in message


def test_models_that_are_none(folder):
    assert "hollow contains no model_index.json" in refused(
        folder, "sample", "hollow", "--prompt", "a red circle"
    )
    (folder / "sd3").mkdir()
    (folder / "sd3" / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    for arguments in (
        ["train", "tiny", "model=sd3"],
        ["embed", "tiny", "model=sd3"],
    ):  # without a hub request
        assert "sd3 is a StableDiffusion3Pipeline; g2rpo has families for" in refused(folder, *arguments)
    assert "hollow is neither a run folder" in refused(folder, "export", "hollow")
    assert "taken is a file; give a folder" in refused(folder, "export", "hollow", "--out", "taken")
    message = refused(folder, "sample", "torn.safetensors", "--base", "tiny", "--prompt", "a red circle")
    assert "torn.safetensors is damaged" in message


def test_options_out_of_range_are_named(folder):
    assert "--steps" in refused(folder, "sample", "hollow", "--prompt", "a red circle", "--steps", "0")
    assert "group_size = 1" in refused(folder, "plan", "group_size=1")
    assert "--memory 0" in refused(folder, "plan", "--memory", "0")
    assert "use a multiple of 3" in refused(folder, "plan", "prompts_per_iteration=4", "--processes", "3")
    assert "give one" in refused(folder, "plan", "--measure", "--seconds-per-forward", "1")
