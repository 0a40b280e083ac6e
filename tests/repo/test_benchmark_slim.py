"""benchmarks/slim_runs.py: fewer lines, and no cost or evaluation moved."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from g2rpo.config.load import load_settings, read_settings
from g2rpo.run.metrics import read_metrics


def load():
    path = Path(__file__).parents[2] / "benchmarks" / "slim_runs.py"
    spec = importlib.util.spec_from_file_location("slim_runs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(step, **more):
    return {"step": step, "nfe": 100 + step, "seconds": 0.5, "reward/a": float(step), "lr": 1e-5, **more}


LINES = [
    {"step": 0, "eval/a": 0.1},
    *(trained(step) for step in range(1, 8)),
    {"step": 7, "eval/a": 0.123456789},
    *(trained(step) for step in range(8, 10)),
]


def test_an_evaluation_keeps_its_exact_cost():
    slimmed = load().slim(LINES, 5)
    assert [line["step"] for line in slimmed] == [0, 5, 7, 7, 9]
    spent = 0
    for line in slimmed:
        spent += line.get("nfe", 0)
        if line.get("eval/a") == 0.12346:
            assert spent == sum(100 + step for step in range(1, 8))
    assert spent == sum(line.get("nfe", 0) for line in LINES)


def test_costs_are_summed_and_the_rest_averaged():
    first = load().slim(LINES, 5)[1]
    assert first["nfe"] == 515 and first["seconds"] == pytest.approx(2.5) and first["reward/a"] == 3.0
    assert "lr" not in first


def test_a_run_keeps_its_settings_but_where_it_was(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "arm" / "3"
    run.mkdir(parents=True)
    settings = load_settings("tiny", ["seed=3", f"out={run}", "lr=2e-5"])
    (run / "config.toml").write_text(settings.to_toml())
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    monkeypatch.setattr(sys, "argv", ["slim_runs.py", str(tmp_path / "runs"), str(tmp_path / "slim")])
    load().main()
    kept = tmp_path / "slim" / "arm" / "3"
    assert read_settings(kept) == settings.resolved().model_copy(update={"out": "arm/3"})
    assert read_metrics(kept / "metrics.jsonl") == load().slim(LINES, 5)
    assert str(tmp_path) not in (kept / "config.toml").read_text()
