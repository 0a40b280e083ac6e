"""A run folder is used by one run at a time."""

import json
import signal
import subprocess
import sys

import pytest
from filelock import FileLock
from support.small_runs import SMALL, quiet, wait_for

import g2rpo
from g2rpo.config.load import load_settings
from g2rpo.run.lock import LOCK, begin_run, exclusive
from g2rpo.run.metrics import read_metrics


def test_a_second_run_is_refused_while_the_first_is_at_work(tmp_path, monkeypatch):
    """The same command twice, as a queue or a forgotten terminal does; then the first is killed."""
    values = {**SMALL, "cache": str(tmp_path / "cache"), "out": str(tmp_path / "run"), "checkpoint_every": 1}
    words = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in values.items() if k != "rewards"]
    command = [
        sys.executable,
        "-m",
        "g2rpo",
        "train",
        "tiny",
        *words,
        "rewards={tiny_clip=1.0}",
        "iterations=500",
    ]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=quiet())
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2)
        with monkeypatch.context() as patch:
            patch.setattr(
                "g2rpo.training.trainer.load_policy", lambda *args, **options: pytest.fail("loaded a model")
            )
            with pytest.raises(ValueError, match=r"another run is using .*run: wait for it, stop it, or"):
                g2rpo.train("tiny", **values, iterations=500)
        before = len(metrics.read_text().splitlines())
        wait_for(lambda: len(metrics.read_text().splitlines()) > before)  # it was not disturbed
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    done = read_metrics(metrics)[-1]["step"]
    assert g2rpo.train("tiny", **values, iterations=done + 1).finished, "the lock went with the process"


def test_a_folder_that_two_begin_at_once(tmp_path):
    out, settings = tmp_path / "run", load_settings("tiny")
    with exclusive(out):
        assert not out.exists()
        out.mkdir()
        other = FileLock(out / LOCK, timeout=0)
        with other, pytest.raises(ValueError, match="another run is using"):
            begin_run(out, settings)
        assert not (out / "config.toml").exists()
        begin_run(out, settings)
    with other:
        assert (out / "config.toml").exists(), "and it is free again"


def test_other_processes_of_a_run_do_not_ask(tmp_path, monkeypatch):
    with FileLock(tmp_path / LOCK, timeout=0):
        monkeypatch.setenv("RANK", "1")
        with exclusive(tmp_path):
            pass
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(ValueError, match="another run"), exclusive(tmp_path):
            pass


def test_a_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch, caplog):
    def acquire(self, *args, **options):
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with exclusive(tmp_path):
        begin_run(tmp_path, load_settings("tiny"))
    assert (tmp_path / "config.toml").exists() and "has no locks" in caplog.text
