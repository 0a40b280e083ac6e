"""Loggers: real ones (TensorBoard, wandb offline, trackio), and ones that fail wherever they can."""

import errno
import importlib.util
import json
import math
import os
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from support.small_runs import SMALL, quiet, timeless
from support.wandb_files import config, history, run_id
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import g2rpo
from g2rpo.config.load import load_settings, read_settings
from g2rpo.config.loggers import LOGGERS
from g2rpo.run.loggers import Loggers, flat_settings
from g2rpo.run.metrics import MetricsWriter, read_metrics
from g2rpo.run.warnings_file import read_warnings

SERVICE = '''
"""Stands for a service's package, with its errors."""
import os, random, sys

FAILS = os.environ.get("SERVICE_FAILS", "")
LOGGED = []
config = {}

def fails(where):
    if FAILS == where:
        raise RuntimeError("no  route\\nto host api_key='hunter22secret'")
    if FAILS == where + " by exit":
        sys.exit("log in first")

fails("import")

class Image:
    def __init__(self, image):
        fails("image")

class Run:
    id = "abc"

    def log(self, values, step=None):
        fails("log")
        random.seed(0), __import__("torch").manual_seed(0), os.chdir("/")
        LOGGED.append((step, dict(values)))

    def finish(self):
        fails("finish")

def init(**options):
    LOGGED.append(("init", options))
    fails("init")
    return Run()
'''


@pytest.fixture
def service(tmp_path, monkeypatch):
    """A package `swanlab` that fails where it is told to; returns a function that imports it for a test."""
    (tmp_path / "site" / "swanlab").mkdir(parents=True)
    (tmp_path / "site" / "swanlab" / "__init__.py").write_text(SERVICE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "swanlab", raising=False)

    def failing(where=""):
        monkeypatch.setenv("SERVICE_FAILS", where)

    yield failing
    sys.modules.pop("swanlab", None)


def log_everything(out, names=("tensorboard", "swanlab"), **options):
    """Uses all calls of the loggers; returns what they said."""
    said = []
    loggers = Loggers(names, out, {"lr": 1e-5}, say=said.append, **options)
    for step in (1, 2):
        loggers.log({"step": step, "loss": 0.5 * step, "note": "text", "flag": True, "nan": math.nan})
        loggers.images("samples", step, torch.zeros(2, 3, 8, 8))
    loggers.finish()
    return said


def events(out):
    accumulator = EventAccumulator(str(out))
    accumulator.Reload()
    return accumulator


def test_a_service_gets_numbers_images_and_settings(service, tmp_path):
    service()
    assert log_everything(tmp_path / "my_run") == []
    logged = sys.modules["swanlab"].LOGGED
    assert logged[0][0] == "init" and logged[0][1]["project"] == "g2rpo" and logged[0][1]["name"] == "my_run"
    assert sys.modules["swanlab"].config["lr"] == 1e-5
    assert [entry for entry in logged if entry[0] == 1] == [
        (1, {"loss": 0.5}),
        (1, {"samples": logged[2][1]["samples"]}),
    ]
    assert len(logged[2][1]["samples"]) == 2
    assert json.loads((tmp_path / "my_run" / "loggers.json").read_text()) == {"swanlab": {"id": "abc"}}


def test_a_resumed_run_continues_the_services_run(service, tmp_path, monkeypatch):
    service()
    log_everything(tmp_path)
    monkeypatch.setenv("SWANLAB_PROJ_NAME", "mine")
    log_everything(tmp_path, resumed_step=2)
    log_everything(tmp_path)  # begins again
    options = [entry[1] for entry in sys.modules["swanlab"].LOGGED if entry[0] == "init"]
    assert [given.get("id") for given in options] == [None, "abc", None]
    assert options[1]["resume"] == "allow" and options[1]["project"] == "mine"
    (tmp_path / "loggers.json").write_text("{")
    assert log_everything(tmp_path, resumed_step=2) == []  # a new run of the service


@pytest.mark.parametrize(
    "where, when",
    [
        ("import", "at its start"),
        ("init", "at its start"),
        ("init by exit", "at its start"),
        ("log", "after iteration 1"),
        ("image", "after iteration 1"),
        ("finish", "at its end"),
    ],
)
def test_a_failing_logger_is_left_out_with_one_warning(service, tmp_path, where, when):
    service(where)
    (warning,) = log_everything(tmp_path)
    assert (
        warning.startswith(f"warning: the logger swanlab failed {when} (")
        and "the run continues without it" in warning
    )
    assert "no route to host" in warning or "log in first" in warning
    assert "hunter22secret" not in warning
    (line,) = read_warnings(tmp_path)
    assert (line["kind"], line["logger"], f"warning: {line['message']}") == ("logger", "swanlab", warning)
    assert line["step"] == {"at its start": 0, "after iteration 1": 1, "at its end": 2}[when]
    assert [event.step for event in events(tmp_path).Scalars("loss")] == [
        1,
        2,
    ]  # the others are not concerned


def test_a_logger_changes_nothing_of_the_process(service, tmp_path, monkeypatch):
    service()
    monkeypatch.chdir(tmp_path)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    log_everything(tmp_path, ["swanlab"])
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert before == after and os.getcwd() == str(tmp_path)


def test_a_run_goes_on_with_the_same_numbers(service, tmp_path):
    service("log")
    shared = {**SMALL, "cache": str(tmp_path / "cache"), "iterations": 1}
    run = g2rpo.train("tiny", **{**shared, "out": str(tmp_path / "run"), "loggers": ["swanlab"]})
    plain = g2rpo.train("tiny", **{**shared, "out": str(tmp_path / "plain")})
    assert run.finished and timeless(run.metrics) == timeless(plain.metrics)
    assert [line["kind"] for line in read_warnings(run.out)] == ["logger"]


def test_the_hook_for_a_full_disk_is_installed_once(tmp_path, monkeypatch):
    """Starts of many runs in one process do not wrap it again and again; other errors stay visible."""
    reported = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    Loggers([], tmp_path)
    hook = threading.excepthook
    Loggers([], tmp_path)
    assert threading.excepthook is hook
    full = OSError(errno.ENOSPC, "No space left on device")
    tensorboard = type("_AsyncWriterThread", (threading.Thread,), {})()
    broken = ValueError("broken")
    for thread, error in ((tensorboard, full), (threading.Thread(), full), (tensorboard, broken)):
        hook(threading.ExceptHookArgs((type(error), error, None, thread)))
    assert [(type(said.thread), said.exc_value is full) for said in reported] == [
        (threading.Thread, True),
        (type(tensorboard), False),
    ]


def test_other_processes_have_no_loggers(service, tmp_path, monkeypatch):
    service("import")
    monkeypatch.setattr("g2rpo.run.loggers.rank", lambda: 1)
    assert log_everything(tmp_path) == [] and not list(tmp_path.glob("events*"))


def test_tensorboard_shows_the_resumed_run_only(tmp_path):
    def write(step, lines):
        with MetricsWriter(tmp_path, resumed_step=step) as writer:
            writer.add_sink(Loggers(["tensorboard"], tmp_path, resumed_step=step))
            for line in lines:
                writer.write(line)
            writer.images("samples", step + 1, torch.rand(2, 3, 8, 8))

    write(-1, [{"step": step, "nfe": 100, "note": "text", "flag": True} for step in (1, 2, 3)])
    write(1, [{"step": 2, "nfe": 100, "loss": math.nan}])
    found = events(tmp_path)
    assert set(found.Tags()["scalars"]) == {"nfe", "loss"}
    assert [event.step for event in found.Scalars("nfe")] == [1, 2]
    assert math.isnan(found.Scalars("loss")[0].value)
    image = found.Images("samples")[-1]
    assert (image.step, image.width, image.height) == (2, 16, 8)


def test_settings_are_flat_and_hold_no_secret():
    options = {"url": "http://host/x?token=abcd1234", "headers": {"Authorization": "Bearer abcd1234"}}
    settings = load_settings(
        "tiny", {"rewards": {"http": 2}, "reward_options": {"http": options}, "lora_rank": 4}
    )
    flat = flat_settings(settings)
    assert flat["rewards.http"] == 2.0 and flat["lora_rank"] == 4 and flat["weights"] is None
    assert flat["granularities"] == json.dumps(settings.option("granularities"))
    assert all(value is None or isinstance(value, bool | int | float | str) for value in flat.values())
    assert "reward_options.http.headers.Authorization" in flat and "abcd1234" not in str(flat)


@pytest.mark.parametrize(
    "override, loggers",
    [
        ("loggers=[]", []),
        ("loggers=wandb,trackio", ["wandb", "trackio"]),
        ("loggers=mlflow", ["mlflow"]),
        ('loggers=["wandb"]', ["wandb"]),
        ("tensorboard=false", []),  # the earlier setting
        ("tensorboard=true", ["tensorboard"]),
        ("tensorboard=False", []),  # as Python writes it
        ("tensorboard=True", ["tensorboard"]),
    ],
)
def test_loggers_on_the_command_line(tmp_path, override, loggers):
    (tmp_path / "recipe.toml").write_text('loggers = ["swanlab"]\n')
    settings = load_settings(tmp_path / "recipe.toml", [override])
    assert settings.loggers == loggers
    (tmp_path / "config.toml").write_text(settings.to_toml())
    assert read_settings(tmp_path).loggers == loggers


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"loggers": "wanbd"}, r"no logger 'wanbd'; there are tensorboard, wandb, .*did you mean 'wandb'"),
        ({"loggers": ["wandb", "wandb"]}, "given twice"),
        ({"loggers": 3}, "loggers = 3"),
        ({"tensorboard": "yes"}, r"this setting is now loggers = \[\"tensorboard\"\] or \[\]"),
        ({"tensorboard": True, "loggers": []}, "tensorboard is the earlier name of loggers"),
    ],
)
def test_invalid_loggers_are_one_message(settings, message):
    with pytest.raises(ValueError, match=message):
        load_settings("tiny", settings)


@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_that_is_not_installed_is_reported_before_anything_is_loaded(name, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda other: None if other == name else found(other))
    monkeypatch.setattr(
        "g2rpo.training.trainer.loaded_and_checked", lambda *_: pytest.fail("loaded a reward")
    )
    with pytest.raises(
        ValueError, match=rf"{name} is not installed; pip install {name}, or remove it from loggers"
    ):
        g2rpo.train("tiny", **{**SMALL, "out": str(tmp_path / "run"), "loggers": [name]})
    assert not (tmp_path / "run" / "config.toml").exists()


def test_wandb_and_trackio_get_everything(tmp_path):
    """The real packages, without a network: an offline run of wandb, and trackio's own database."""
    out = tmp_path / "run"
    words = [f"{key}={json.dumps(value)}" for key, value in SMALL.items() if not isinstance(value, dict)]
    words = [
        word for word in words if not word.startswith(("loggers", "eval_every", "compare_images", "sample"))
    ]
    words += [
        "iterations=2",
        "loggers=wandb,trackio",
        "eval_every=1",
        "eval_prompts=world:heldout",
        "sample_every=1",
    ]
    words += ["num_eval_prompts=2", "compare_images=2", "rewards={tiny_clip=1.0}", "checkpoint_every=1"]
    words += ["keep_best=none", f"out={out}", f"cache={tmp_path / 'cache'}"]
    environment = {
        **quiet(),
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HOME": str(tmp_path),
    }
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    for more in (["stop_after=1"], []):
        done = subprocess.run(
            [sys.executable, "-m", "g2rpo", "train", "tiny", *words, *more],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
    assert read_warnings(out) == []
    expected: dict[int, dict[str, float]] = {}
    for line in read_metrics(out / "metrics.jsonl"):
        numbers = {name: value for name, value in line.items() if name != "step" and value is not None}
        expected.setdefault(line["step"], {}).update(numbers)
    assert (
        set(expected) == {0, 1, 2} and "eval/tiny_clip" in expected[2] and "reward/tiny_clip" in expected[2]
    )

    files = sorted(out.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2 and len({run_id(file) for file in files}) == 1  # two starts, one run
    logged: dict[int, dict] = {}
    for file in files:
        for entry in history(file):
            logged.setdefault(entry["_step"], {}).update(entry)
    for step, numbers in expected.items():
        assert {name: logged[step][name] for name in numbers} == pytest.approx(numbers), step
    assert logged[0]["samples/count"] == 1 and logged[2]["before_after/count"] == 4
    assert config(files[0])["rewards.tiny_clip"] == 1.0 and config(files[0])["group_size"] == 3

    reader = """
import json, trackio
storage = trackio.SQLiteStorage
(run,) = storage.get_runs("g2rpo")
print(json.dumps([storage.get_logs("g2rpo", run), storage.get_run_config("g2rpo", run)]))
"""
    read = subprocess.run(
        [sys.executable, "-c", reader], capture_output=True, text=True, check=True, env=environment
    )
    logs, settings = json.loads(read.stdout.splitlines()[-1])
    by_step: dict[int, dict] = {}
    for entry in logs:
        by_step.setdefault(entry["step"], {}).update(entry)
    for step, numbers in expected.items():
        assert {name: by_step[step][name] for name in numbers} == pytest.approx(numbers), step
    assert by_step[2]["samples/0"]["_type"] == by_step[2]["before_after/3"]["_type"] == "trackio.image"
    assert settings["rewards.tiny_clip"] == 1.0
