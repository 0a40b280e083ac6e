"""Runs on the page: their state, curves and sample grids, and stopping them; whatever a folder holds."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest
from support.measured_runs import lines, write_run, write_samples
from support.processes import started_command
from support.small_runs import SMALL, wait_for

from g2rpo.run.lock import LOCK, read_holder
from g2rpo.run.metrics import read_metrics
from g2rpo.web.runs_data import (
    facts,
    fingerprint,
    grid_at,
    grid_steps,
    read_view,
    run_state,
    sections,
    stop_run,
)

HOSTILE = '<img src=x onerror=alert(1)> "quoted"'


def made_run(folder, values=(0.1, 0.2, 0.3, 0.4), steps=(0, 2, 4), rewards=None, **settings):
    given = lines(values, evals=[(0, 0.5), (4, 0.6)])
    given = [
        {**line, "invalid_fraction": 0.25, "grad_norm": 1.5} if "nfe" in line else line for line in given
    ]
    write_run(folder, given, rewards=rewards or {"tiny_clip": 1.0}, **settings)
    write_samples(folder, steps, HOSTILE)
    return folder


def test_the_facts_of_a_run(tmp_path):
    folder = made_run(tmp_path / "run")
    text = (folder / "metrics.jsonl").read_text().replace("reward/r", "reward/tiny_clip")
    (folder / "metrics.jsonl").write_text(text)
    row = facts(read_view("mine", folder))
    assert row.state.kind == "stopped" and row.iterations == "4 / 4"
    assert row.rewards == "tiny_clip 0.4 (+0.3)" and row.seconds == "2 s" and row.invalid == "25.0 %"
    assert row.warnings == "none"
    (folder / "finished").write_text("4\n")
    (folder / "warnings.jsonl").write_text('{"step": 3, "kind": "hacking", "message": "look at it"}\n')
    row = facts(read_view("mine", folder))
    assert row.state.text == "finished after 4 iterations"
    assert row.warnings == "1: look at it (iteration 3)"


def test_several_runs_share_each_chart(tmp_path):
    views = [read_view(name, made_run(tmp_path / name, seed=n)) for n, name in enumerate(("a", "b"))]
    charts = {section.title: section.charts for section in sections(views)}
    (evaluation,) = charts["Evaluations"]
    assert evaluation.count('class="line') == 2 and ">a</span>" in evaluation and ">b</span>" in evaluation
    assert "held out" in evaluation
    gradient = next(chart for chart in charts["Health"] if "Gradient norm" in chart)
    assert gradient.count('class="line') == 2
    # A metric that only one run has names that run.
    metrics = tmp_path / "b" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"grad_norm"', '"other"'))
    again = sections([views[0], read_view("b", tmp_path / "b")])
    assert any("Gradient norm before clipping (a only)" in chart for chart in again[2].charts)


def test_the_slider_moves_every_image(tmp_path):
    views = [
        read_view("a", made_run(tmp_path / "a", steps=(0, 2, 4))),
        read_view("b", made_run(tmp_path / "b", steps=(0, 3))),
    ]
    assert grid_steps(views) == [0, 2, 3, 4]
    first, second = grid_at(views[0], 0), grid_at(views[0], 2)
    assert (first[0], second[0]) == (0, 2)
    assert all(x.uri != y.uri for x, y in zip(first[1], second[1], strict=True))
    assert [(image.prompt, image.seed) for image in first[1]] == [(HOSTILE, 0), (HOSTILE, 1)]
    assert grid_at(views[1], 2)[0] == 0 and grid_at(views[1], 4)[0] == 3
    assert grid_at(views[0], -1) == (None, [])


def test_a_new_line_changes_the_fingerprint(tmp_path):
    folder = made_run(tmp_path / "run")
    before = fingerprint([folder, tmp_path / "absent"])
    assert fingerprint([folder, tmp_path / "absent"]) == before
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5}) + "\n")
    assert fingerprint([folder, tmp_path / "absent"]) != before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.toml", b"a = [", "damaged"),
        ("config.toml", b"\xff\xfe\x00", "damaged"),
        ("config.toml", b"rewards = 3\niterations = 'x'\n", ""),
        ("metrics.jsonl", b"{}\n", "metrics"),
        ("metrics.jsonl", b"not json\n{}\n", "metrics"),
        ("metrics.jsonl", b'{"step": 1, "nfe": "x", "seconds": "y"}\n', "nfe of iteration 1 is not a number"),
        ("metrics.jsonl", b'{"step": 1, "eval/e": [1]}\n', "eval/e of iteration 1 is not a number"),
        ("metrics.jsonl", b'{"step": 1, "nfe": 5, "loss": NaN, "grad_norm": NaN}\n', ""),
        ("groups.jsonl", b'{"step": 1}\n[]\n', ""),
        ("warnings.jsonl", b"[]\n", ""),
        ("comparison/before.json", b'{"sets": 3}', ""),
        ("evaluations/step_000000.json", b"[1]", ""),
        (".lock", b'{"host": 3, "pid": "x"}', ""),
    ],
)
def test_damage_gives_a_message(tmp_path, name, content, message):
    """Whatever a file holds, the run is shown with a note, or a message says why not; nothing raises."""
    folder = made_run(tmp_path / "run")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    view = read_view("run", folder)
    if view.record is None:
        assert message in view.problem and view.problem
    else:
        said = " ".join(view.record.problems)
        assert message in said
        facts(view)
        sections([view])
        grid_at(view, 4)


def test_folders_that_are_no_run_give_a_message(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "not a run folder" in read_view("x", tmp_path / "empty").problem
    assert "no longer exists" in read_view("x", tmp_path / "gone").problem
    folder = made_run(tmp_path / "run")
    view = read_view("x", folder)
    (folder / "samples" / "step_000002" / "0001.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(ValueError, match=r"0001.png cannot be read"):
        grid_at(view, 2)
    (folder / "samples" / "step_000002" / "0001.png").unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        grid_at(view, 2)


def lock(folder, **holder):
    since = {"since": "2026-01-01T00:00:00+00:00"}
    (folder / LOCK).write_text(
        json.dumps({"host": socket.gethostname(), "pid": os.getpid()} | since | holder)
    )


def test_a_process_that_only_has_the_number_of_the_run_is_left_alone(tmp_path):
    """After a crash the lock file names a pid that another process, such as this one, may have."""
    folder = made_run(tmp_path / "run")
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        lock(folder, pid=bystander.pid)
        assert run_state(read_view("run", folder).record).kind == "stopped"
        with pytest.raises(ValueError, match="does not hold the lock"):
            stop_run(folder, bystander.pid, "2026-01-01T00:00:00+00:00")
        with pytest.raises(ValueError, match="that process no longer runs this run"):
            stop_run(folder, bystander.pid + 1, "2026-01-01T00:00:00+00:00")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    assert run_state(read_view("run", folder).record).kind == "stopped"


def test_a_run_on_another_machine_cannot_be_stopped_here(tmp_path):
    folder = made_run(tmp_path / "run")
    lock(folder, host="elsewhere")
    state = run_state(read_view("run", folder).record)
    assert state.kind == "elsewhere" and "elsewhere" in state.text and state.pid is None
    with pytest.raises(ValueError, match="does not hold the lock"):
        stop_run(folder, os.getpid(), "2026-01-01T00:00:00+00:00")


def test_a_run_at_work_is_stopped_with_a_checkpoint(tmp_path):
    out = tmp_path / "run"
    values = {**SMALL, "cache": str(tmp_path / "cache"), "out": str(out), "checkpoint_every": 1000}
    words = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in values.items() if k != "rewards"]
    command = ["train", "tiny", *words, "rewards={tiny_clip=1.0}", "iterations=500"]
    with started_command(*command) as run:
        metrics = out / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2)
        state = run_state(read_view("run", out).record)
        assert state.kind == "running" and state.pid == run.pid and "left" in state.text
        assert read_holder(out).pid == run.pid
        said = stop_run(out, state.pid, state.since)
        assert "writes a checkpoint" in said
        ended = run.wait()
        output = ended.stdout + ended.stderr
    assert "iterations are saved" in output, output
    done = read_metrics(metrics)[-1]["step"]
    assert (out / "checkpoints" / f"step_{done:06d}").is_dir()
    for _ in range(50):  # the lock goes with the process
        if run_state(read_view("run", out).record).kind == "stopped":
            break
        time.sleep(0.1)
    assert run_state(read_view("run", out).record).kind == "stopped"
    with pytest.raises(ValueError, match="nothing was stopped"):
        stop_run(out, state.pid, state.since)
