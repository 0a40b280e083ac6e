"""A finished run that is started again says so and loads nothing, unless something is left to do."""

import json
import shlex

import pytest
from support.small_runs import SMALL
from typer.testing import CliRunner

import g2rpo
from g2rpo.cli.app import app
from g2rpo.run.folder import latest_checkpoint
from g2rpo.training import trainer

MORE = {"eval_every": 2, "eval_prompts": "world:heldout", "num_eval_prompts": 2, "compare_images": 2}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    values = {**SMALL, **MORE, "iterations": 2, "cache": str(folder / "cache"), "out": str(folder / "run")}
    return values, g2rpo.train("tiny", **values)


class Loaded(Exception):
    pass


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    def loaded(*given, **options):
        raise Loaded

    monkeypatch.setattr(trainer, "loaded_and_checked", loaded)


def test_it_says_so_and_returns_the_result(finished, nothing_is_loaded, capsys):
    values, done = finished
    again = g2rpo.train("tiny", **values)
    out = capsys.readouterr().out
    assert f"{done.out} is finished: all 2 iterations are done, and nothing was changed" in out
    assert "iterations=4" in out and f"g2rpo report {shlex.quote(str(done.out))}" in out
    assert (again.step, again.finished, again.interrupted) == (2, True, False)
    assert again.changes == done.changes and again.metrics == done.metrics and done.changes


def test_the_command_shows_the_table_again(finished, nothing_is_loaded):
    values, _ = finished
    words = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()
    ]
    words = [word for word in words if not word.startswith("rewards=")] + ["rewards={tiny_clip=1.0}"]
    result = CliRunner().invoke(app, ["train", "tiny", *words])
    assert result.exit_code == 0, result.output
    assert "is finished" in result.output and "unseen prompts" in result.output


@pytest.mark.parametrize(
    "changes", [{"iterations": 3}, {"eval_every": 1, "eval_rewards": ["verifier"]}, {"compare_images": 0}]
)
def test_what_is_left_to_do_is_done(finished, nothing_is_loaded, changes):
    with pytest.raises(Loaded):
        g2rpo.train("tiny", **{**finished[0], **changes})


def test_loggers_and_stops_leave_it_finished(finished, nothing_is_loaded):
    assert g2rpo.train("tiny", **{**finished[0], "loggers": ["tensorboard"], "stop_after": 2}).finished


@pytest.mark.parametrize(
    "damage",
    ["checkpoint", "comparison/before.json", "comparison/after.json", "comparison/before_0/0000.png",
     "evaluations/step_000000.json", "samples/step_000002/grid.png", "curve.png"],
)  # fmt: skip
def test_damage_is_made_good_for(finished, nothing_is_loaded, damage):
    values, done = finished
    path = done.out / damage
    if damage == "checkpoint":
        path = max(latest_checkpoint(done.out).glob("*.distcp"), key=lambda file: file.stat().st_size)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + b"\0\1\2\3" + whole[len(whole) // 2 + 4 :])
    if damage == "curve.png" or "samples" in damage:
        path.unlink()
    try:
        with pytest.raises(Loaded):
            g2rpo.train("tiny", **values)
    finally:
        path.write_bytes(whole)
    assert g2rpo.train("tiny", **values).finished
