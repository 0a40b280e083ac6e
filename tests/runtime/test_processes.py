"""The environment variables of torchrun: empty, wrong and incomplete ones; and who prints."""

import pytest
import torch
from support.processes import command_as, run_command, run_processes
from support.small_runs import SMALL

from g2rpo.runtime.processes import environment_number, is_first_process, start_processes

TINY = [
    f"{key}={value}"
    for key, value in {**SMALL, "iterations": 1, "rewards": "{colourfulness=1.0}"}.items()
    if key not in ("granularities", "tensorboard")
] + ["granularities=[1,2]", "tensorboard=false", "rollout_batch=8"]


@pytest.mark.parametrize("text, number", [("", 5), ("  ", 5), ("0", 0), (" 3 ", 3)])
def test_an_empty_variable_is_not_set(monkeypatch, text, number):
    monkeypatch.setenv("WORLD_SIZE", text)
    assert environment_number("WORLD_SIZE", 5) == number


@pytest.mark.parametrize("text", ["two", "-1", "1.5", "0x2"])
def test_a_wrong_variable_is_named(monkeypatch, text):
    monkeypatch.setenv("RANK", text)
    with pytest.raises(ValueError, match=r"RANK=.* is not a whole number from 0; .*unset RANK"):
        is_first_process()


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment_is_one_message(monkeypatch, missing):
    values = {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, "" if name == missing else value)
    with pytest.raises(ValueError, match=f"WORLD_SIZE=2 .* {missing} is not set; start them with torchrun"):
        start_processes(torch.device("cpu"))


@pytest.mark.parametrize("size", ["", "0", "1"])
def test_one_process_trains_whatever_an_outer_shell_left(tmp_path, size):
    words = ["train", "tiny", *TINY, f"out={tmp_path / 'run'}", f"cache={tmp_path / 'cache'}"]
    done = run_command(*words, WORLD_SIZE=size, RANK="", LOCAL_RANK="", MPLBACKEND="module://not_there")
    assert done.returncode == 0 and (tmp_path / "run" / "curve.png").is_file(), done.stderr


def test_wrong_variables_are_a_message_of_the_command(tmp_path):
    words = ["train", "tiny", *TINY, f"out={tmp_path / 'run'}", f"cache={tmp_path / 'cache'}"]
    done = run_command(*words, WORLD_SIZE="many")
    assert done.returncode == 2 and "WORLD_SIZE='many' is not a whole number" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


def test_the_last_lines_of_a_run_are_printed_once(tmp_path):
    words = ["train", "tiny", *TINY, f"out={tmp_path / 'run'}", f"cache={tmp_path / 'cache'}"]
    outputs = run_processes(2, command_as, *words, log=tmp_path / "log")
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert ["g2rpo export" in text for _, text in outputs] == [True, False]
