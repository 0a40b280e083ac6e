"""The environment variables of torchrun: empty, wrong and incomplete ones; and who prints."""

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.processes import command_as, run_command, run_processes
from support.small_runs import SMALL

from g2rpo.config.load import load_settings
from g2rpo.runtime import processes
from g2rpo.runtime.processes import check_environment, environment_number, is_first_process, start_processes
from g2rpo.training.embed import embed_run

TINY = [
    f"{key}={value}"
    for key, value in {**SMALL, "iterations": 1, "rewards": "{colourfulness=1.0}"}.items()
    if key not in ("granularities", "loggers")
] + ["granularities=[1,2]", "loggers=[]", "rollout_batch=8"]


@pytest.mark.parametrize("text, number", [("", 5), ("  ", 5), ("0", 0), (" 3 ", 3)])
def test_an_empty_variable_is_not_set(monkeypatch, text, number):
    monkeypatch.setenv("WORLD_SIZE", text)
    assert environment_number("WORLD_SIZE", 5) == number


@pytest.mark.parametrize("text", ["two", "-1", "1.5", "0x2"])
def test_a_wrong_variable_is_named(monkeypatch, text):
    monkeypatch.setenv("RANK", text)
    with pytest.raises(ValueError, match=r"RANK=.* is not a whole number >= 0; .*unset RANK"):
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


TWO = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"RANK": "2"}, "WORLD_SIZE=2 RANK=2 LOCAL_RANK=1: with WORLD_SIZE=2 .* 0 to 1, so RANK cannot be 2"),
        ({"RANK": "0"}, "WORLD_SIZE=2 RANK=0 LOCAL_RANK=1: LOCAL_RANK, .* cannot be above RANK"),
        ({"LOCAL_RANK": "5"}, "so LOCAL_RANK cannot be 5"),
        ({"WORLD_SIZE": ""}, "with no WORLD_SIZE the processes have the numbers 0 to 0, so RANK cannot be 1"),
        ({"WORLD_SIZE": "1"}, "with WORLD_SIZE=1 the processes have the numbers 0 to 0, so RANK cannot be 1"),
        ({"WORLD_SIZE": "", "RANK": ""}, "LOCAL_RANK=1: with no WORLD_SIZE .* so LOCAL_RANK cannot be 1"),
        ({"LOCAL_WORLD_SIZE": "1"}, "LOCAL_WORLD_SIZE=1: the number of processes on this host must be above"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3: .* at most WORLD_SIZE"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port, 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not a port"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number"),
        ({"MASTER_ADDR": "no.such.host.invalid"}, "MASTER_ADDR=no.such.host.invalid is not the name of a"),
        (
            {"MASTER_ADDR": "a" * 70 + ".invalid"},
            "MASTER_ADDR=a+.invalid is not the name of a reachable host",
        ),
        ({"RANK": "-1"}, "RANK='-1' is not a whole number"),
    ],
)
def test_contradictory_variables_are_one_message(monkeypatch, changes, expected):
    for name in (*TWO, "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, changes.get(name, TWO.get(name, "")))
    with pytest.raises(ValueError, match=expected):
        check_environment()
    with pytest.raises(ValueError, match=expected):
        start_processes(torch.device("cpu"))
    if not any(name.startswith("MASTER") for name in changes):  # `embed` does not communicate
        with pytest.raises(ValueError, match=expected):
            embed_run(load_settings("tiny"))


def test_variables_that_agree_are_accepted(monkeypatch):
    for name in (*TWO, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    check_environment()
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)
    check_environment()


def test_processes_that_do_not_meet_are_one_message(monkeypatch, caplog):
    """A port that another program uses, and peers that never come: variables of an earlier run."""
    monkeypatch.setattr(processes, "WAITING_SECONDS", 0.2)
    init = dist.init_process_group
    brief = {"timeout": timedelta(seconds=1)}
    monkeypatch.setattr(dist, "init_process_group", lambda *given: init(*given, **brief))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        for name, value in (TWO | {"RANK": "0", "LOCAL_RANK": "0"}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        with pytest.raises(ValueError, match=r"process 0 of 2 did not find the others at 127.0.0.1:"):
            start_processes(torch.device("cpu"))
        port = other.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(ValueError, match=r"did not find the others .* unset WORLD_SIZE, RANK and LOCAL_RANK"):
        start_processes(torch.device("cpu"))
    assert "process 0 of 2 is still waiting for the others at 127.0.0.1:" in caplog.text


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
