"""The tab "Runs" through its handlers: what it shows, what it leaves alone, and what it refuses."""

import json
import os
import re
import shutil

import gradio as gr
import pytest
from test_runs_data import HOSTILE, made_run

from g2rpo.run.lock import LOCK, exclusive
from g2rpo.web.context import WebContext
from g2rpo.web.runs import RunsHandlers, moved, runs_tab
from g2rpo.web.runs_data import MAX_RUNS

OUTPUTS = 8


@pytest.fixture
def folder(tmp_path):
    for name in ("a", "b"):
        made_run(tmp_path / "runs" / name)
    return tmp_path / "runs"


@pytest.fixture
def context(folder):
    made = WebContext([str(folder)], device="cpu")
    yield made
    made.close()


def drawn(context, selected, position=1, to_stop=None, seen=None):
    outputs = RunsHandlers(context).draw(selected, position, to_stop, seen)
    chosen, table, stop_row, stoppable, slider, grid, charts, seen = outputs
    return {
        "names": [value for value, _ in chosen.choices],
        "table": table,
        "stop": stop_row.visible,
        "running": [value for value, _ in stoppable.choices],
        "to_stop": stoppable.value,
        "last": slider.maximum if slider.visible else None,
        "at": slider.value,
        "grid": grid,
        "charts": charts,
        "seen": seen,
    }


def test_one_slider_moves_the_grids_of_all_runs(context):
    shown = drawn(context, ["a", "b"])
    assert shown["names"] == ["a", "b"] and shown["last"] == 3 and not shown["stop"]
    grids = [RunsHandlers(context).show_grid(["a", "b"], position) for position in (1, 2, 3)]
    images = [re.findall(r'<img src="([^"]+)"', grid) for grid in grids]
    assert [len(set(of_image)) for of_image in zip(*images, strict=True)] == [3, 3, 3, 3]
    assert [int(re.search(r"Samples at iteration (\d+)", grid)[1]) for grid in grids] == [0, 2, 4]
    assert shown["charts"].count("<svg") > 1


def test_the_slider_begins_at_the_latest_grid_and_stays_there(context, folder):
    shown = drawn(context, ["a"])
    assert shown["at"] == 3 and "Samples at iteration 4" in shown["grid"]
    (folder / "a" / "samples" / "step_000006").mkdir()
    for name in ("0000.png", "0001.png", "grid.png"):
        shutil.copy(
            folder / "a" / "samples" / "step_000004" / name, folder / "a" / "samples" / "step_000006" / name
        )
    assert drawn(context, ["a"], 3, seen=shown["seen"])["at"] == 4
    assert drawn(context, ["a"], 2, seen=shown["seen"])["at"] == 2


def test_text_of_a_run_stays_text(context, folder):
    (folder / "a" / "warnings.jsonl").write_text(json.dumps({"step": 1, "kind": "x", "message": HOSTILE}))
    shown = drawn(context, ["a"])
    page = shown["table"] + shown["grid"] + shown["charts"]
    assert "<img src=x" not in page and "&lt;img src=x onerror" in shown["grid"]


def test_the_page_is_left_alone_while_nothing_changes(context, folder):
    handlers = RunsHandlers(context)
    seen = drawn(context, ["a"])["seen"]
    skipped = handlers.draw_if_changed(["a"], 1, None, seen)
    assert skipped == [gr.skip()] * OUTPUTS
    with (folder / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "nfe": 10, "seconds": 2.0}) + "\n")
    assert "5 / 4" in handlers.draw_if_changed(["a"], 1, None, seen)[1]
    made_run(folder / "begun_later")
    names = [value for value, _ in handlers.draw_if_changed(["a"], 1, None, seen)[0].choices]
    assert names == ["a", "b", "begun_later"]


def test_a_deleted_or_damaged_run_does_not_hide_the_others(context, folder):
    shutil.rmtree(folder / "a")
    (folder / "b" / "metrics.jsonl").write_text("no\nmetrics\n")
    shown = drawn(context, ["a", "b"])
    assert "no longer exists" in shown["table"] and "not a line of metrics" in shown["table"]
    assert "Nothing to draw" in shown["charts"]
    shutil.rmtree(folder / "b")
    made_run(folder / "b")
    shown = drawn(context, ["a", "b", "never there"])
    assert "no longer exists" in shown["table"] and 'data-run="b"' in shown["table"]
    assert "<svg" in shown["charts"]


def test_values_that_no_page_sends_are_survived(context):
    for selected, position in ((None, None), ([], "x"), ([1, {}], 10**9), (["../../etc"], -5)):
        assert "Choose a run" in drawn(context, selected, position)["table"]
    assert (
        moved(True, [1, 2]) == 0
        and moved(float(7), [1, 2]) == 1
        and moved(2, []) == moved(float("nan"), [1]) == 0
    )


def test_more_runs_than_colours_are_cut_with_a_message(context, folder):
    names = [f"more{n}" for n in range(MAX_RUNS + 1)]
    for name in names:
        made_run(folder / name, steps=())
    shown = drawn(context, names)
    assert f"{MAX_RUNS + 1} runs are chosen; the first {MAX_RUNS} are shown" in shown["table"]
    assert "No sample grid is drawn yet" in shown["grid"]


def test_without_runs_the_page_says_how_to_make_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    context = WebContext(device="cpu")
    assert "g2rpo train" in drawn(context, [])["table"]
    context.close()


def test_a_stop_needs_a_run_at_work_and_a_confirmation(context, folder, monkeypatch):
    handlers = RunsHandlers(context)
    for name, message in (("a", "not running"), ("x", "no run"), (None, "no run"), ("../b", "no run")):
        with pytest.raises(gr.Error, match=message):
            handlers.ask(name)
    with pytest.raises(gr.Error, match="first"):
        handlers.stop(None)
    sent = []
    monkeypatch.setattr(
        "psutil.Process.send_signal", lambda process, number: sent.append((process.pid, number))
    )
    (folder / "a" / LOCK).touch()
    with exclusive(folder / "a"):
        shown = drawn(context, ["a", "b"], to_stop="b")
        assert shown["running"] == ["a"] and shown["to_stop"] == "a" and shown["stop"]
        confirm, question, pending = handlers.ask("a")
        assert confirm.visible and f"process {os.getpid()}" in question and not sent
        confirm, pending_after, answer = handlers.stop(pending)
        assert sent == [(os.getpid(), 15)] and not confirm.visible and pending_after is None
        assert "writes a checkpoint" in answer
    with pytest.raises(gr.Error, match="nothing was stopped"):  # it has ended in the meantime
        handlers.stop(pending)
    assert len(sent) == 1


def test_the_tab_has_stable_names(context):
    with gr.Blocks() as page:
        runs_tab(context)
    ids = {block.elem_id for block in page.blocks.values()}
    names = "choice follow table stop-row stop-choice stop confirm stop-yes stop-no answer slider grid charts"
    assert {f"runs-{name}" for name in names.split()} <= ids
