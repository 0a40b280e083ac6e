"""The tab "Runs": curves, sample grids and health of runs at work and finished; a stop with a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import Context
from markupsafe import Markup

from g2rpo.web.context import WebContext
from g2rpo.web.jobs import messages, status_html
from g2rpo.web.runs_data import (
    MAX_RUNS,
    RunState,
    RunView,
    fingerprint,
    grid_steps,
    read_view,
    run_state,
    stop_run,
)
from g2rpo.web.runs_html import INTRODUCTION, charts_html, grid_html, table_html
from g2rpo.web.view import style_sheet

REFRESH_SECONDS = 4


def runs_tab(context: WebContext) -> None:
    """Builds the tab; call it inside its `gr.Tab`."""
    names = list(context.current_runs())
    handlers = RunsHandlers(context)
    gr.HTML(style_sheet() + INTRODUCTION, elem_id="runs-introduction")
    chosen = gr.CheckboxGroup(names, value=names[:1], label="Runs", elem_id="runs-choice")
    follow = gr.Checkbox(True, label=f"Refresh every {REFRESH_SECONDS} s", elem_id="runs-follow")
    table = gr.HTML(elem_id="runs-table")
    with gr.Row(visible=False, elem_id="runs-stop-row") as stop_row:
        to_stop = gr.Dropdown([], label="A run in progress", elem_id="runs-stop-choice", scale=3)
        ask = gr.Button("Stop this run …", elem_id="runs-stop", scale=1)
    with gr.Group(visible=False, elem_id="runs-confirm") as confirm:
        question = gr.HTML(elem_id="runs-question")
        with gr.Row():
            yes = gr.Button("Stop with a checkpoint", variant="primary", elem_id="runs-stop-yes")
            no = gr.Button("Keep running", elem_id="runs-stop-no")
    answer = gr.HTML(elem_id="runs-answer")
    slider = gr.Slider(
        1, 2, 1, step=1, label="Sample grids, from the first to the latest", visible=False, buttons=[],
        elem_id="runs-slider",
    )  # fmt: skip
    grid = gr.HTML(elem_id="runs-grid")
    charts = gr.HTML(elem_id="runs-charts")
    mark, pending = gr.State(None), gr.State(None)
    timer = gr.Timer(REFRESH_SECONDS)

    inputs = [chosen, slider, to_stop, mark]
    outputs = [chosen, table, stop_row, to_stop, slider, grid, charts, mark]
    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    page = Context.root_block
    assert page is not None, "runs_tab is called inside gr.Blocks"
    page.load(handlers.draw, inputs, outputs, **quiet)
    timer.tick(handlers.draw_if_changed, inputs, outputs, **quiet)
    chosen.input(handlers.draw, inputs, outputs, **quiet)
    slider.input(handlers.show_grid, [chosen, slider], grid, trigger_mode="always_last", **quiet)
    follow.change(lambda on: gr.Timer(active=bool(on)), follow, timer, **quiet)
    ask.click(handlers.ask, to_stop, [confirm, question, pending], **quiet)
    yes.click(handlers.stop, pending, [confirm, pending, answer], **quiet)
    no.click(lambda: [gr.Group(visible=False), None], None, [confirm, pending], **quiet)


@dataclass(frozen=True)
class Seen:
    """What the page shows.

    Attributes:
        files: fingerprint of the list of runs and of the files of the chosen ones.
        grids: number of sample grids, the positions of the slider.
    """

    files: tuple[Any, ...]
    grids: int


class RunsHandlers:
    """The events of the tab."""

    def __init__(self, context: WebContext) -> None:
        self._context = context

    def draw(self, selected: Any, position: Any, to_stop: Any, seen: Any) -> list[Any]:
        """Returns the updates of the whole tab, in the order of its outputs.

        Args:
            selected: names of the chosen runs.
            position: position of the slider; at the end it stays at the end when grids are added.
            to_stop: the chosen one of the runs at work.
            seen: what the page shows, from the last call; None: nothing yet.
        """
        with messages():
            runs = self._context.current_runs()
            names = known_names(runs, selected)
            views = chosen_views(runs, names)
            steps = grid_steps(views)
            was_at_end = seen is None or moved(position, range(seen.grids)) == seen.grids - 1
            at = len(steps) - 1 if was_at_end else moved(position, steps)
            running = [v.name for v in views if v.record and run_state(v.record).kind == "running"]
            kept = to_stop if to_stop in running else next(iter(running), None)
            return [
                gr.CheckboxGroup(choices=list(runs), value=names),
                table_html(views, len(runs), len(names)),
                gr.Row(visible=bool(running)),
                gr.Dropdown(choices=running, value=kept),
                gr.Slider(maximum=max(2, len(steps)), value=max(1, at + 1), visible=len(steps) > 1),
                grid_html(views, steps, at),
                charts_html(views),
                Seen(self._files(selected), len(steps)),
            ]

    def draw_if_changed(self, selected: Any, position: Any, to_stop: Any, seen: Any) -> list[Any]:
        """As `draw`, but leaves the page alone while no file of the runs has changed."""
        if seen is not None and seen.files == self._files(selected):
            return [gr.skip()] * 8
        return self.draw(selected, position, to_stop, seen)

    def show_grid(self, selected: Any, position: Any) -> str:
        """Returns the sample grids at a position of the slider."""
        with messages():
            runs = self._context.current_runs()
            views = chosen_views(runs, known_names(runs, selected))
            steps = grid_steps(views)
            return grid_html(views, steps, moved(position, steps))

    def ask(self, name: Any) -> list[Any]:
        """Returns the question before a run is stopped, and which process it is about."""
        with messages():
            state = state_of(self._context, name)
            question = Markup(
                '<div class="g2rpo-view"><p>Stop <b>{}</b> (process {}, since {})? It writes a checkpoint, '
                "and the same command continues it later.</p></div>"
            ).format(name, state.pid, state.since)
            return [gr.Group(visible=True), str(question), (name, state.pid, state.since)]

    def stop(self, asked: Any) -> list[Any]:
        """Stops the process that `ask` named."""
        with messages():
            if not asked:
                raise ValueError("choose a run and press “Stop this run …” first")
            name, pid, since = asked
            said = stop_run(folder_of(self._context, name), pid, since)
            return [gr.Group(visible=False), None, status_html(f"{name}: {said}")]

    def _files(self, selected: Any) -> tuple[Any, ...]:
        runs = self._context.current_runs()
        return tuple(runs), fingerprint([runs[name] for name in known_names(runs, selected)])


def folder_of(context: WebContext, name: Any) -> Path:
    """Returns the folder of a run of the list.

    Raises:
        ValueError: there is no run of this name.
    """
    runs = context.current_runs()
    if not isinstance(name, str) or name not in runs:
        raise ValueError(f"no run {str(name)[:80]!r} on this page; there are: {', '.join(runs) or 'none'}")
    return runs[name]


def state_of(context: WebContext, name: Any) -> RunState:
    """Returns the state of a run that is at work.

    Raises:
        ValueError: no such run, or it is not at work on this machine.
    """
    view = read_view(str(name), folder_of(context, name))
    if view.record is None:
        raise ValueError(view.problem)
    state = run_state(view.record)
    if state.kind != "running":
        raise ValueError(f"{name} is not running on this machine: {state.text}")
    return state


def known_names(runs: Mapping[str, Path], selected: Any) -> list[str]:
    """Returns the names of the choice that are runs of the list; a browser may send anything."""
    names = selected if isinstance(selected, list) else []
    return [name for name in names if isinstance(name, str) and name in runs]


def chosen_views(runs: Mapping[str, Path], names: Sequence[str]) -> list[RunView]:
    """Reads the chosen runs, the first `MAX_RUNS` of them."""
    return [read_view(name, runs[name]) for name in names[:MAX_RUNS]]


def moved(position: Any, steps: Sequence[int]) -> int:
    """Returns the position of the slider, which counts from 1, as an index of `steps`."""
    if isinstance(position, bool) or not isinstance(position, int | float) or not math.isfinite(position):
        return 0
    return min(max(0, round(position) - 1), max(0, len(steps) - 1))
