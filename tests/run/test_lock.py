"""A run folder is used by one run at a time."""

import errno
import fcntl
import json
import os
import socket
from contextlib import contextmanager
from datetime import datetime

import pytest
from support.processes import started_command
from support.small_runs import SMALL, wait_for

import g2rpo
from g2rpo.config.load import load_settings
from g2rpo.run.lock import LOCK, begin_run, exclusive
from g2rpo.run.metrics import read_metrics


def test_a_second_run_is_refused_while_the_first_is_at_work(tmp_path, monkeypatch):
    """The same command twice, as a queue or a forgotten terminal does; then the first is killed."""
    values = {**SMALL, "cache": str(tmp_path / "cache"), "out": str(tmp_path / "run"), "checkpoint_every": 1}
    words = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in values.items() if k != "rewards"]
    command = ["train", "tiny", *words, "rewards={tiny_clip=1.0}", "iterations=500"]
    metrics = tmp_path / "run" / "metrics.jsonl"
    with started_command(*command) as first:
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2)
        with monkeypatch.context() as patch:
            patch.setattr(
                "g2rpo.training.trainer.load_policy", lambda *args, **options: pytest.fail("loaded a model")
            )
            with pytest.raises(
                ValueError,
                match=rf"another run is using .*run: wait for it, .* process {first.pid} on this host, ",
            ):
                g2rpo.train("tiny", **values, iterations=500)
        before = len(metrics.read_text().splitlines())
        wait_for(lambda: len(metrics.read_text().splitlines()) > before)  # it was not disturbed
        first.kill()
    done = read_metrics(metrics)[-1]["step"]
    assert g2rpo.train("tiny", **values, iterations=done + 1).finished, "the lock went with the process"


@contextmanager
def locked(file, holder=None):
    """Holds the lock as another process does, or one on another host of a shared file system."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.ftruncate(descriptor, 0)
    os.pwrite(
        descriptor, holder.encode() if isinstance(holder, str) else json.dumps(holder or {}).encode(), 0
    )
    try:
        yield
    finally:
        os.close(descriptor)


def test_a_folder_that_two_begin_at_once(tmp_path):
    out, settings = tmp_path / "run", load_settings("tiny")
    with exclusive(out):
        assert not out.exists()
        out.mkdir()
        with locked(out / LOCK), pytest.raises(ValueError, match="another run is using"):
            begin_run(out, settings)
        assert not (out / "config.toml").exists()
        begin_run(out, settings)
    with locked(out / LOCK):
        assert (out / "config.toml").exists(), "and it is free again"


def test_other_processes_of_a_run_do_not_ask(tmp_path, monkeypatch):
    with locked(tmp_path / LOCK):
        monkeypatch.setenv("RANK", "1")
        with exclusive(tmp_path):
            pass
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(ValueError, match="another run"), exclusive(tmp_path):
            pass


SINCE = "2026-01-02T03:04:05+00:00"


@pytest.mark.parametrize(
    ("holder", "expected"),
    [
        ({"pid": os.getpid()}, ["another run is using", "on this host, ", "stop it"]),
        ({"pid": 2**22 - 7}, ["That process has ended, so the lock is stale", "(only that file)"]),
        ({"host": "node17"}, ["on node17, ", "If that process no longer runs, the lock is stale: remove it"]),
        ("", ["another run is using", "does not name its process"]),
        ('{"host": 1', ["does not name its process"]),
        ("[]", ["does not name its process"]),
    ],
)
def test_a_held_lock_names_its_holder(tmp_path, holder, expected):
    if isinstance(holder, dict):
        holder = {"host": socket.gethostname(), "pid": 12345, "since": SINCE} | holder
        expected = [*expected, f"process {holder['pid']} on", f"since {SINCE}"]
    with locked(tmp_path / LOCK, holder), pytest.raises(ValueError) as error, exclusive(tmp_path):
        pass
    for words in [*expected, str(tmp_path / LOCK), "give another out=FOLDER"]:
        assert words in str(error.value)


def test_the_lock_names_its_holder_only_while_it_is_held(tmp_path):
    with exclusive(tmp_path):
        holder = json.loads((tmp_path / LOCK).read_text())
        assert (holder["host"], holder["pid"]) == (socket.gethostname(), os.getpid())
        assert datetime.fromisoformat(holder["since"]).tzinfo is not None
    assert (tmp_path / LOCK).read_text() == ""


HELD = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
NOT_PROVIDED = [
    errno.ENOLCK,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EIO,
    errno.EINVAL,
    errno.ESTALE,
    errno.EBADF,
]
NOT_PROVIDED += [errno.EPERM, errno.EREMOTEIO, errno.ETIMEDOUT, 524]  # 524: ENOTSUPP, of the kernel alone


@pytest.mark.parametrize("number", [*NOT_PROVIDED, *sorted(HELD)])
def test_a_file_system_without_locks_gives_one_warning(tmp_path, monkeypatch, caplog, number):
    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    if number in HELD:
        with pytest.raises(ValueError, match="another run is using"), exclusive(tmp_path):
            pass
        return
    with exclusive(tmp_path):
        begin_run(tmp_path, load_settings("tiny"))
    assert (tmp_path / "config.toml").exists()
    [warning] = [record.getMessage() for record in caplog.records]
    assert f"has no locks ({os.strerror(number)})" in warning and str(tmp_path / LOCK) in warning


def test_without_locks_a_killed_or_running_run_is_named(tmp_path, monkeypatch, caplog):
    (tmp_path / LOCK).write_text(json.dumps({"host": "node17", "pid": 12345, "since": SINCE}))
    monkeypatch.setattr(fcntl, "flock", lambda *given: os.listdir(tmp_path / "not there"))
    with exclusive(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert f"process 12345 on node17, since {SINCE}, may still do so" in caplog.text


def test_what_is_no_lock_file_is_named(tmp_path):
    (tmp_path / LOCK).mkdir()
    with (
        pytest.raises(ValueError, match=r"cannot open the lock file .*\.lock: Is a directory"),
        exclusive(tmp_path),
    ):
        pass
