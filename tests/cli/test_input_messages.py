"""What the commands say about input files: notes of `plan` and `train`, errors before anything is loaded."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from g2rpo.cli.app import app

SMALLEST = ("iterations=1", "group_size=2", "prompts_per_iteration=1", "num_steps=3", "train_steps=1")
SMALLEST += ("granularities=[1]", "num_sample_prompts=1", "compare_images=0", "eval_num_steps=1")
SMALLEST += ("tensorboard=false", "eval_every=0", "keep_best=none", "sample_every=0")


def said(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_plan_names_what_was_chosen_and_what_is_hardly_meant(in_folder):
    (in_folder / "p.jsonl").write_text('{"prompt": "a red circle", "caption": "c"}\n')
    (in_folder / "columns.json").write_text(json.dumps({"prompt": ["a", "b"], "split": ["train", "test"]}))
    (in_folder / "empty.toml").touch()
    words = ("eval_every=1", "eval_prompts=columns.json", "num_eval_prompts=9", "clip_range=1e-12")
    output = said("plan", "empty.toml", "prompts=p.jsonl", *words, "granularities=[1,50]")
    for note in (
        "empty.toml sets nothing",
        "prompts are read from 'prompt'; 'caption' is passed to the rewards",
        "read as columns",
        "num_eval_prompts=9, but columns.json has only 2 prompts",
        "clip_range=1e-12",
        "granularities: 50",
    ):
        assert f"{note}" in output, output
    assert "note: " not in said("plan", "tiny", "compare_images=0", "granularities=[1]", "keep_best=none")


@pytest.mark.parametrize("command", ["sample", "plan", "train", "evaluate"])
def test_a_damaged_prompt_file_is_refused_before_anything_is_written(in_folder, command):
    path = in_folder / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b \\ud83d"}\n')
    words = {
        "sample": ("tiny", "--prompts", "p.jsonl"),
        "evaluate": ("tiny", "--prompts", "p.jsonl", "--rewards", "tiny_clip"),
    }.get(command, ("tiny", "prompts=p.jsonl"))
    output = said(command, *words, code=2)
    assert output.startswith("error: p.jsonl, line 2") and "U+D83D" in output
    assert list(Path().iterdir()) == [Path("p.jsonl")]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("~no_such_user_here/x", ["begins with ~", "full path"]),
        ("y" * 300, ["yyy", "too long", "shorter"]),
        ("x/" * 3000, ["x/x", "too long", "shorter"]),
    ],
    ids=["home", "name", "path"],
)
@pytest.mark.parametrize(
    "command",
    [
        ("report", "PATH"),
        ("export", "PATH"),
        ("sample", "PATH", "--prompt", "a"),
        ("sample", "tiny", "--prompt", "a", "--out", "PATH"),
        ("score", "--images", "PATH", "--rewards", "colourfulness"),
        ("doctor", "--verify", "PATH"),
    ],
    ids=" ".join,
)
def test_a_path_that_cannot_be_is_one_message(command, path, words):
    output = said(*(path if word == "PATH" else word for word in command), code=2)
    assert output.count("error: ") == 1 and all(word in output for word in words), output


def test_a_link_that_leads_nowhere_and_a_pipe_are_named(in_folder):
    (in_folder / "link.safetensors").symlink_to("nowhere")
    os.mkfifo(in_folder / "pipe.safetensors")
    for name, words in (("link", "a link to nowhere, which does not exist"), ("pipe", "a pipe or a device")):
        output = said("sample", f"{name}.safetensors", "--base", "tiny", "--prompt", "a", code=2)
        assert f"{name}.safetensors" in output and words in output, output


def test_an_infinite_memory_is_refused():
    assert "error: --memory inf: give the memory" in said("plan", "tiny", "--memory", "inf", code=2)


def test_prompts_that_an_encoder_truncates_are_counted(in_folder):
    long = " ".join(["a red circle above a blue star"] * 9)
    (in_folder / "p.txt").write_text(f"{long}\na red circle\n{long} and more\n")
    line = "T5 truncates 2 prompts to 20 tokens"
    run = said(
        *("train", "tiny", *SMALLEST, "prompts_per_iteration=3", "prompts=p.txt"),
        *("out=run", "cache=cache", "rewards={tiny_clip=1.0}"),
    )
    assert run.count(line) == 1, run
    sampled = said("sample", "tiny", "--compare", "tiny@g2rpo", "--prompts", "p.txt", "--steps", "1")
    assert sampled.count(line) == 1
    evaluated = said(
        *("evaluate", "tiny", "tiny@g2rpo", "--prompts", "p.txt", "--steps", "1"),
        *("--rewards", "tiny_clip", "--out", "results"),
    )
    assert evaluated.count(line) == 1
    assert "truncates" not in said("sample", "tiny", "--prompt", "a red circle", "--steps", "1")


def test_a_second_sample_leaves_nothing_of_the_first(in_folder):
    said("sample", "tiny@g2rpo", "--compare", "tiny", "--limit", "3", "--steps", "1")
    said("sample", "tiny", "--prompt", "a red circle", "--steps", "1")
    assert sorted(path.name for path in Path("samples").iterdir()) == [
        "0000.png",
        "grid.png",
        "manifest.json",
    ]
    (in_folder / "mine").mkdir()
    (in_folder / "mine" / "0000.png").write_bytes(b"mine")
    output = said("sample", "tiny", "--prompt", "a", "--steps", "1", "--out", "mine", code=2)
    assert "0000.png was not written by g2rpo sample" in output
    assert (in_folder / "mine" / "0000.png").read_bytes() == b"mine"
