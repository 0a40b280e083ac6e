"""benchmarks/slim_runs.py: fewer lines, and no cost or evaluation moved."""

import importlib.util
from pathlib import Path

import pytest


def load():
    path = Path(__file__).parents[1] / "benchmarks" / "slim_runs.py"
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
    found = load().slim(LINES, 5)
    assert [line["step"] for line in found] == [0, 5, 7, 7, 9]
    spent = 0
    for line in found:
        spent += line.get("nfe", 0)
        if line.get("eval/a") == 0.12346:
            assert spent == sum(100 + step for step in range(1, 8))
    assert spent == sum(line.get("nfe", 0) for line in LINES)


def test_costs_are_summed_and_the_rest_averaged():
    first = load().slim(LINES, 5)[1]
    assert first["nfe"] == 515 and first["seconds"] == pytest.approx(2.5) and first["reward/a"] == 3.0
    assert "lr" not in first
