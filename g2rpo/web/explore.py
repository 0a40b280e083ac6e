"""The tab "Explore a group": one group with its anchor path, branches, advantages and update."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gradio as gr

from g2rpo.config.load import read_settings
from g2rpo.rewards.registry import REWARDS
from g2rpo.web.context import WebContext
from g2rpo.web.explore_data import (
    GROUP_NOISES,
    LOCAL_REWARDS,
    MAX_GROUP,
    MAX_STEPS,
    PRESETS,
    SAMPLINGS,
    ExploredGroup,
    ExploreRequest,
    explore_group,
)
from g2rpo.web.explore_figure import write_figure
from g2rpo.web.explore_html import INTRODUCTION, group_html
from g2rpo.web.inputs import checked_prompt
from g2rpo.web.jobs import MODEL_QUEUE, Job, Progress, messages, status_html
from g2rpo.web.view import style_sheet
from g2rpo.world.captions import prompt_set

STEPS = 8
"""Denoising steps at first: enough for three different granularities after an early noise step."""

GRANULARITIES = (1, 2, 3, 4, 5, 6)
"""Strides that the page offers."""


def explore_tab(context: WebContext) -> None:
    """Builds the tab; call it inside its `gr.Tab`."""
    examples = example_prompts()
    title, preset = next(iter(PRESETS.items()))
    gr.HTML(style_sheet() + INTRODUCTION, elem_id="explore-introduction")
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            presets = gr.Radio(list(PRESETS), value=title, label="Preset", elem_id="explore-preset")
            prompt = gr.Textbox(examples[0], label="Prompt", lines=2, max_lines=4, elem_id="explore-prompt")
            gr.Examples(examples, prompt, label="Prompts of the embedded world", elem_id="explore-examples")
            model = gr.Dropdown(
                list(context.models), value=next(iter(context.models)), label="Model", elem_id="explore-model"
            )
        with gr.Column(scale=1, min_width=280):
            sampling = gr.Radio(
                [
                    ("one noise step at a time (singular)", SAMPLINGS[0]),
                    ("noise at every step (path)", SAMPLINGS[1]),
                ],
                value=preset["sampling"],
                label="Sampling",
                elem_id="explore-sampling",
            )
            noise_steps = gr.CheckboxGroup(
                list(range(STEPS - 1)),
                value=list(preset["noise_steps"]),
                label="Noise step k",
                info="Counted from the noise end. Several are explored one by one.",
                elem_id="explore-noise-steps",
            )
            granularities = gr.CheckboxGroup(
                list(GRANULARITIES),
                value=list(preset["granularities"]),
                label="Granularities Λ",
                info="Strides of the tails: 1 is fine, larger ones are coarse.",
                elem_id="explore-granularities",
            )
            rewards = gr.CheckboxGroup(
                reward_choices(context),
                value=[LOCAL_REWARDS[0]],
                label="Rewards",
                info="Standardised within the group, then added.",
                elem_id="explore-rewards",
            )
        with gr.Column(scale=1, min_width=280):
            group_size = gr.Slider(
                2, MAX_GROUP, 6, step=1, label="Group size G", elem_id="explore-group-size"
            )
            eta = gr.Slider(0.1, 1.5, 0.7, step=0.05, label="Noise strength eta", elem_id="explore-eta")
            num_steps = gr.Slider(
                3, MAX_STEPS, STEPS, step=1, label="Denoising steps T", elem_id="explore-steps"
            )
            seed = gr.Number(0, label="Seed", precision=0, elem_id="explore-seed")
            shared = gr.Checkbox(
                preset["shared_start"],
                label="Shared initial noise",
                info="As in training. Without it each member starts from noise of its own.",
                elem_id="explore-shared",
            )
            noise = gr.Dropdown(
                list(GROUP_NOISES),
                value=GROUP_NOISES[0],
                label="Noise of the members",
                elem_id="explore-noise",
            )
    with gr.Row():
        run = gr.Button("Explore", variant="primary", elem_id="explore-run")
        cancel = gr.Button("Cancel", elem_id="explore-cancel")
    status = gr.HTML(status_html("Press Explore."), elem_id="explore-status")
    result = gr.HTML(elem_id="explore-result")
    with gr.Row():
        figure = gr.DownloadButton("Download as PNG figure", interactive=False, elem_id="explore-png")
        numbers = gr.DownloadButton("Download the numbers (JSON)", interactive=False, elem_id="explore-json")
    explored = gr.State(None)

    inputs = [
        model, prompt, rewards, sampling, noise_steps, granularities,
        num_steps, eta, group_size, seed, shared, noise,
    ]  # fmt: skip

    def explore(*values: Any) -> Iterator[dict[Any, Any]]:
        with messages():
            label, request = values[0], request_of(*values[1:])
            context.model(label)
            for event in context.jobs.run(lambda job: compute(context, job, label, request)):
                if isinstance(event, Progress):
                    yield {status: status_html(event.text, event)}
                    continue
                yield {
                    status: status_html(f"explored in {event.seconds:.1f} s"),
                    result: group_html(event.value),
                    figure: gr.DownloadButton(interactive=False),  # until the files of this group are written
                    numbers: gr.DownloadButton(interactive=False),
                    explored: (event.value, label),
                }

    def offer_files(made: tuple[ExploredGroup, str] | None) -> list[Any]:
        if made is None:
            return [gr.skip(), gr.skip(), None]
        with messages():
            files = [
                gr.DownloadButton(value=str(path), interactive=True) for path in write_files(context, *made)
            ]
            return [*files, None]

    presets.change(
        preset_values, [presets, num_steps], [sampling, noise_steps, granularities, shared], queue=False
    )
    num_steps.change(possible_steps, [num_steps, noise_steps], noise_steps, queue=False)
    sampling.input(used_controls, sampling, [noise_steps, granularities], queue=False)
    event = run.click(
        explore, inputs, [status, result, figure, numbers, explored],
        **MODEL_QUEUE, show_progress="hidden", trigger_mode="once", api_name="explore",
    )  # fmt: skip
    # An event of its own: drawing takes seconds, and the next group need not wait for it.
    event.success(
        offer_files, explored, [figure, numbers, explored], show_progress="hidden", api_visibility="private"
    )
    # After the cancellation, so that the last progress does not replace it.
    cancel.click(None, None, None, cancels=[event], queue=False).then(
        cancelled, None, status, show_progress="hidden", api_visibility="private"
    )


def compute(context: WebContext, job: Job, label: str, request: ExploreRequest) -> ExploredGroup:
    """Explores a group in a job."""
    job.report(0, 0, "opening the model")
    policy = context.policy(label)

    def report(done: int, total: int, text: str) -> None:
        job.report(done, total, f"{text}, forward")

    return explore_group(policy, request, progress=report)


def write_files(context: WebContext, group: ExploredGroup, model: str) -> tuple[Path, Path]:
    """Writes the files to download: the group as PNG figure, and its numbers as JSON.

    The folder's name cannot be guessed.
    """
    folder = context.folder / "explored" / secrets.token_urlsafe(12)
    folder.mkdir(parents=True)
    record = folder / f"group_seed{group.request.seed}.json"
    record.write_text(json.dumps(group_record(group, model), indent=1, ensure_ascii=False), encoding="utf-8")
    return write_figure(group, record.with_suffix(".png")), record


def group_record(group: ExploredGroup, model: str) -> dict[str, Any]:
    """Returns the numbers of a group as JSON values; what has no score is None."""
    return {
        "model": model,
        "request": asdict(group.request),
        "sigmas": _plain(group.request.sigmas.tolist()),
        "nfe": group.nfe,
        "anchor_rewards": _plain(group.anchor_rewards.tolist()),
        "cells": [
            {
                "noise_steps": list(cell.noise_steps),
                "granularities": list(cell.granularities),
                "rewards [R, J, G]": _plain(cell.rewards.tolist()),
                "parts [J, G]": _plain(cell.parts.tolist()),
                "advantages [G]": _plain(cell.advantages.tolist()),
                "push_rewards [R, 3]": None if cell.push is None else _plain(cell.push.rewards.tolist()),
            }
            for cell in group.cells
        ],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if math.isfinite(value) else None


def request_of(
    prompt: Any, rewards: Any, sampling: Any, noise_steps: Any, granularities: Any,
    num_steps: Any, eta: Any, group_size: Any, seed: Any, shared: Any, noise: Any,
) -> ExploreRequest:  # fmt: skip
    """Makes a request of the values of the page, or of whoever calls its API.

    Raises:
        ValueError: a value is missing, of another kind, or not allowed.
    """
    return ExploreRequest(
        prompt=checked_prompt(prompt),
        rewards={str(name): 1.0 for name in rewards or ()},
        sampling=str(sampling),
        noise_steps=tuple(_whole("noise step k", k) for k in noise_steps or ()),
        granularities=tuple(_whole("granularity", g) for g in granularities or ()),
        num_steps=_whole("the number of denoising steps T", num_steps),
        eta=_real("eta", eta),
        group_size=_whole("the group size G", group_size),
        seed=_whole("the seed", seed),
        shared_start=bool(shared),
        noise=str(noise),
    )


def _whole(name: str, value: Any) -> int:
    number = _real(name, value)
    if not number.is_integer():
        raise ValueError(f"{name} is {value}; give a whole number")
    return int(number)


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {str(value)[:40]!r}; give a number")
    return float(value)


def cancelled() -> str:
    """Returns the status after a cancellation, when news that were on their way have arrived."""
    time.sleep(0.5)
    return status_html("cancelled")


def preset_values(title: str, num_steps: int) -> list[Any]:
    """Returns the updates of a preset: sampling, noise steps, granularities, shared initial noise."""
    preset = PRESETS.get(title)
    if preset is None:
        return [gr.skip()] * 4
    if preset["sampling"] != SAMPLINGS[0]:
        return [preset["sampling"], *used_controls(preset["sampling"]), preset["shared_start"]]
    steps = [k for k in preset["noise_steps"] if k <= num_steps - 2]
    return [
        preset["sampling"],
        gr.CheckboxGroup(value=steps, visible=True),
        gr.CheckboxGroup(value=list(preset["granularities"]), visible=True),
        preset["shared_start"],
    ]


def possible_steps(num_steps: int, chosen: list[int]) -> Any:
    """Returns the update of the noise steps after T has changed: the last step has no noise."""
    choices = list(range(max(1, int(num_steps) - 1)))
    return gr.CheckboxGroup(choices=choices, value=[k for k in chosen or () if k in choices])


def used_controls(sampling: str) -> list[Any]:
    """Returns which controls have an effect: a path has no single noise step and no granularity."""
    singular = sampling == SAMPLINGS[0]
    return [gr.CheckboxGroup(visible=singular), gr.CheckboxGroup(visible=singular)]


def example_prompts() -> list[str]:
    """Returns prompts of the embedded world: those of the demo run, and longer ones."""
    return [text for text, _ in prompt_set("demo")] + [text for text, _ in prompt_set("heldout", 3)]


def reward_choices(context: WebContext) -> list[str]:
    """Returns the rewards that need no download, and the registered ones that the shown runs train."""
    names = dict.fromkeys(LOCAL_REWARDS)
    for folder in context.runs.values():
        try:
            trained = read_settings(folder).rewards
        except (ValueError, OSError):  # the tab Runs says what is wrong with it
            continue
        names.update(dict.fromkeys(name for name in trained if name in REWARDS))
    return list(names)
