"""Shell completion, by the protocol by which a shell asks the installed program for candidates."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from g2rpo.algorithms.registry import PRESETS
from g2rpo.config.recipe import shipped_recipes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Folder with an executable `g2rpo`, as an installation has it."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "g2rpo"
    script.write_text(
        f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)} -m g2rpo "$@"\n'
    )
    script.chmod(0o755)
    return folder


def run(program: Path, *words: str, cwd=None, **variables: str) -> str:
    environment = {**os.environ, "PATH": f"{program}{os.pathsep}{os.environ['PATH']}", **variables}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def bash(program):
    """Returns the candidates for the last of some words, by the script that --show-completion prints."""
    detection = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = run(program, "g2rpo", "--show-completion", "bash", **detection)

    def candidates(*words: str, cwd=None) -> list[str]:
        listed = shlex.join(("g2rpo", *words))
        code = f"{script}\nCOMP_WORDS=({listed}) COMP_CWORD={len(words)}\n_g2rpo_completion g2rpo\n"
        code += 'printf "%s\\n" "${COMPREPLY[@]}"'
        return run(program, "bash", "--norc", "-c", code, cwd=cwd).splitlines()

    return candidates


def test_commands_and_options(bash):
    assert bash("tr") == ["train"]
    assert bash("plan", "--me") == ["--measure", "--memory"]


def test_recipes_come_first_and_files_follow(bash, tmp_path):
    (tmp_path / "mine.toml").touch()
    (tmp_path / "mine.txt").touch()
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "deep.toml").touch()
    every = bash("train", "", cwd=tmp_path)
    assert every[: len(shipped_recipes())] == shipped_recipes() and "mine.toml" in every and "lr=" in every
    assert bash("plan", "flux_l", cwd=tmp_path) == ["flux_lora_1gpu", "flux_lora_24gb"]
    assert bash("plan", "mi", cwd=tmp_path) == ["mine.toml", "mixed/"]
    assert bash("plan", "mixed/", cwd=tmp_path) == ["mixed/deep.toml"]


@pytest.mark.parametrize("command", ["train", "plan", "compare"])
def test_settings_after_a_recipe(bash, command):
    assert bash(command, "tiny", "lr") == ["lr=", "lr_schedule="]
    assert bash(command, "tiny", "eta=0.7", "num_st") == [
        "num_steps=",
        *bash(command, "tiny", "num_steps")[1:],
    ]


def test_the_only_candidate_brings_values_so_that_no_blank_follows(bash):
    assert bash("train", "tiny", "precis") == [
        "precision=",
        "precision=float32",
        "precision=tf32",
        "precision=bfloat16",
        "precision=float64",
    ]
    lr = bash("train", "tiny", "weight_d")
    assert lr[0] == "weight_decay=" and len(lr) > 1


def test_values_where_bash_passes_the_equals_sign_as_a_word(bash):
    assert bash("train", "tiny", "precision", "=", "b") == ["bfloat16"]
    assert bash("train", "tiny", "precision", "=") == ["float32", "tf32", "bfloat16", "float64"]
    assert bash("train", "skip_flat", "=", "") == ["true", "false"]
    assert bash("train", "algorithm", "=", "") == list(PRESETS)
    assert bash("train", "tiny", "precision", "=", "tf32", "adam_e") == ["adam_eps=", "adam_eps=1e-8"]


def test_rewards_and_names_of_settings(bash):
    assert bash("train", "tiny", "rewards.tiny_") == ["rewards.tiny_clip=", "rewards.tiny_preference="]
    assert bash("settings", "lora_t") == ["lora_targets"]
    assert bash("settings", "mix") == ["mix_grpo"]


def test_nothing_completes_what_nobody_knows(bash):
    assert bash("train", "tiny", "xyzzy") == [""]
    assert bash("train", "tiny", "xyzzy=") == [""]


def test_zsh_and_fish_pass_one_word(program):
    zsh = run(
        program, "g2rpo", _G2RPO_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="g2rpo train tiny precision=b"
    )
    assert "precision=bfloat16" in zsh and "tf32" not in zsh
    with_help = run(
        program, "g2rpo", _G2RPO_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="g2rpo train tiny_"
    )
    assert "tiny_gpu" in with_help and "on one GPU" in with_help
    fish = {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_ARGS": "g2rpo plan tiny lr_s"}
    assert "lr_schedule=cosine" in run(program, "g2rpo", _G2RPO_COMPLETE="complete_fish", **fish)


def test_installation_writes_the_script(program, tmp_path):
    detection = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    said = run(program, "g2rpo", "--install-completion", "bash", HOME=str(tmp_path), **detection)
    (script,) = (tmp_path / ".bash_completions").iterdir()
    assert "bash completion installed in" in said and "_G2RPO_COMPLETE=complete_bash" in script.read_text()
    assert f"source '{script}'" in (tmp_path / ".bashrc").read_text()
