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


def drawn(context, selected, position=0):
    chosen, table, stop_row, to_stop, slider, grid, charts, mark = RunsHandlers(context).draw(
        selected, position
    )
    return {
        "names": [value for value, _ in chosen.choices],
        "chosen": chosen.value,
        "table": table,
        "stop": stop_row.visible,
        "running": [value for value, _ in to_stop.choices],
        "last": slider.maximum if slider.visible else None,
        "grid": grid,
        "charts": charts,
        "mark": mark,
    }


def test_one_slider_moves_the_grids_of_all_runs(context):
    shown = drawn(context, ["a", "b"])
    assert shown["names"] == ["a", "b"] and shown["last"] == 2 and not shown["stop"]
    first = re.findall(r'<img src="([^"]+)"', shown["grid"])
    later = re.findall(r'<img src="([^"]+)"', RunsHandlers(context).show_grid(["a", "b"], 1))
    assert len(first) == len(later) == 4 and all(x != y for x, y in zip(first, later, strict=True))
    assert "Samples at iteration 0" in shown["grid"] and shown["charts"].count("<svg") > 1


def test_text_of_a_run_stays_text(context, folder):
    (folder / "a" / "warnings.jsonl").write_text(json.dumps({"step": 1, "kind": "x", "message": HOSTILE}))
    shown = drawn(context, ["a"])
    page = shown["table"] + shown["grid"] + shown["charts"]
    assert "<img src=x" not in page and "&lt;img src=x onerror" in shown["grid"]


def test_the_page_is_left_alone_while_nothing_changes(context, folder):
    handlers = RunsHandlers(context)
    mark = drawn(context, ["a"])["mark"]
    skipped = handlers.draw_if_changed(["a"], 0, mark)
    assert skipped == [gr.skip()] * OUTPUTS
    with (folder / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "nfe": 10, "seconds": 2.0}) + "\n")
    assert "5 / 4" in handlers.draw_if_changed(["a"], 0, mark)[1]
    made_run(folder / "begun_later")
    names = [value for value, _ in handlers.draw_if_changed(["a"], 0, mark)[0].choices]
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
    assert moved(True, [1, 2]) == 0 and moved(float(7), [1, 2]) == 1 and moved(1, []) == 0


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
    for name, message in (("a", "not at work"), ("x", "no run"), (None, "no run"), ("../b", "no run")):
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
        assert drawn(context, ["a", "b"])["running"] == ["a"] and drawn(context, ["a"])["stop"]
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
