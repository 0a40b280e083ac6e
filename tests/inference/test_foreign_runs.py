"""Commands that inspect the run folder of someone else import none of the code that it names."""

import shutil
import sys
from pathlib import Path

import pytest
from support.payloads import refused
from support.random_flux import save_random_flux
from support.trained_runs import make_run
from typer.testing import CliRunner

from g2rpo.cli.app import app

MODULES = ("foreign_reward", "foreign_judge", "foreign_algorithm", "foreign_family")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run whose config.toml names code for rewards, evaluations and the algorithm."""
    base = save_random_flux(tmp_path_factory.mktemp("base"))
    folder, _ = make_run(
        tmp_path_factory.mktemp("runs") / "run",
        base,
        lora_rank=2,
        rewards={"foreign_reward:score": 1.0},
        reward_options={"foreign_reward:score": {"speed": 1}},
        eval_rewards=["foreign_judge:Judge"],
    )
    config = folder / "config.toml"
    text = "\n".join(
        line
        for line in config.read_text().splitlines()
        if not line.startswith(("algorithm ", "granularities"))
    )
    config.write_text('algorithm = "foreign_algorithm:Mine"\n' + text)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, with modules of these names that leave a mark."""
    for module in MODULES:
        mark = f"import pathlib\npathlib.Path({str(tmp_path / 'mark')!r}).touch()\n"
        (tmp_path / f"{module}.py").write_text(
            mark + "def score(images, prompts, metadata):\n    return images\n"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # as `python -m g2rpo` has it
    return tmp_path


DRAW = ["--prompt", "a red circle", "--steps", "1", "--device", "cpu", "--resolution", "16"]
SCORED = ["--prompts", "prompts.txt", "--steps", "1", "--device", "cpu", "--rewards", "colourfulness"]
COMMANDS = {
    "sample": ["sample", "RUN", *DRAW],
    "compare": ["sample", "RUN", "--compare", "RUN", *DRAW],
    "gallery": ["gallery", "RUN", *DRAW],
    "export": ["export", "RUN", "--out", "exported"],
    "evaluate": ["evaluate", "RUN", *SCORED],
    "doctor": ["doctor", "--verify", "RUN"],
    "fetch": ["fetch", "RUN/config.toml", "--dry-run"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_code_of_a_run_is_imported(run, folder, command):
    (folder / "prompts.txt").write_text("a red circle\n")
    words = [word.replace("RUN", str(run)) for word in COMMANDS[command]]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == (1 if command == "doctor" else 0), (result.output, result.exception)
    assert not (folder / "mark").exists() and not set(MODULES) & sys.modules.keys()


def test_a_foreign_family_is_imported_only_if_named(run, folder, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    text = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text('family = "foreign_family:FAMILY"\n' + text)
    for command in (["sample", copy, *DRAW], ["export", copy], ["gallery", copy, *DRAW]):
        assert "imported only if you name it: give --family foreign_family:FAMILY" in refused(*command)
    assert not (folder / "mark").exists()
    refused("sample", copy, *DRAW, "--family", "foreign_family:FAMILY")
    assert (folder / "mark").exists()  # named by the user, so the marks do work


def test_the_current_folder_is_searched_only_for_code_that_was_named(run, tmp_path, monkeypatch):
    """A module in the current folder cannot stand in for an optional package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    CliRunner().invoke(app, ["sample", str(run), *DRAW])
    assert str(tmp_path) not in sys.path
