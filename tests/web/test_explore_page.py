"""The tab "Explore a group": the numbers it shows are those of the group, and it answers every input."""

import dataclasses
import json
import math
import re

import gradio as gr
import pytest
import torch
from PIL import Image
from support.policies import load

from g2rpo.report.charts import number
from g2rpo.web.context import WebContext
from g2rpo.web.explore import (
    compute,
    explore_tab,
    group_record,
    possible_steps,
    preset_values,
    request_of,
    reward_choices,
    used_controls,
    write_files,
)
from g2rpo.web.explore_data import PRESETS, ExploreRequest, explore_group
from g2rpo.web.explore_html import group_html
from g2rpo.web.jobs import Cancelled, Done, Progress

HOSTILE = '<img src=x onerror=alert(1)> **bold** "quoted" & more'
GIVEN = {
    "prompt": "four red circles",
    "rewards": ["tiny_clip"],
    "sampling": "singular",
    "noise_steps": [1],
    "granularities": [1, 2],
    "num_steps": 4,
    "eta": 0.7,
    "group_size": 3,
    "seed": 5,
    "shared": True,
    "noise": "independent",
}


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    made = WebContext(["tiny"], device="cpu", votes=tmp_path_factory.mktemp("votes"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def group():
    request = request_of(**GIVEN | {"rewards": ["tiny_clip", "verifier"], "noise_steps": [0, 1]})
    return explore_group(load("tiny"), request)


def test_the_page_shows_the_numbers_of_the_group_in_order(group):
    page = group_html(group)
    tables = re.findall(r'<table class="group">.*?</table>', page, re.DOTALL)
    assert len(tables) == 2
    for table, cell in zip(tables, group.cells, strict=True):
        shown = re.findall(r'data-member="(\d+)" data-advantage="([^"]+)"', table)
        assert [int(member) for member, _ in shown] == cell.order
        for member, advantage in shown:
            assert float(advantage) == pytest.approx(float(cell.advantages[int(member)]), abs=1e-5)
        for r, name in enumerate(("tiny_clip", "verifier")):
            values = re.findall(rf'data-reward="{name}">{name} ([^<]+)<', table)
            expected = [number(float(cell.rewards[r, j, g])) for j in range(2) for g in cell.order]
            assert values == expected
    assert page.count("<img") == 2 * 5 + 2 * (2 * 3 + 3 + 3)
    assert page.count("▲ raise") == sum(int((c.advantages > 0).sum()) for c in group.cells)
    assert f"{group.nfe['total']} forwards" in page


def test_text_of_a_prompt_stays_text(group):
    hostile = dataclasses.replace(group, request=dataclasses.replace(group.request, prompt=HOSTILE))
    page = group_html(hostile)
    assert "<img src=x" not in page and "&lt;img src=x onerror=alert(1)&gt;" in page


def test_a_group_without_advantages_says_why():
    asked = ExploreRequest("a cat", {"verifier": 1.0}, num_steps=4, group_size=2, granularities=(1,))
    page = group_html(explore_group(load("tiny"), asked))
    words = re.sub(r"data:image[^\"]*", "", page)
    assert "no branch has a score" in words and "verifier no score" in words and "nan" not in words.lower()


def test_a_path_says_that_its_steps_share_an_advantage():
    asked = request_of(**GIVEN | {"sampling": "path"})
    page = group_html(explore_group(load("tiny"), asked))
    assert "same advantage counts for all its noise steps" in page and "no single direction" in page


def test_the_files_hold_prompt_settings_and_numbers(context, group):
    png, record = write_files(context, group, "tiny")
    assert png.is_relative_to(context.folder) and record.is_relative_to(context.folder)
    with Image.open(png) as image:
        assert image.width > image.height * 0.5 and image.width > 800
        assert image.text["prompt"] == group.request.prompt
        assert json.loads(image.text["g2rpo"])["seed"] == 5
    numbers = json.loads(record.read_text(encoding="utf-8"))
    assert numbers["request"]["noise_steps"] == [0, 1] and numbers["model"] == "tiny"
    for cell, written in zip(group.cells, numbers["cells"], strict=True):
        assert written["advantages [G]"] == pytest.approx(cell.advantages.tolist())
        assert torch.tensor(written["rewards [R, J, G]"]).shape == cell.rewards.shape
    bad = dataclasses.replace(group, anchor_rewards=torch.tensor([math.nan, 1.0]))
    assert group_record(bad, "tiny")["anchor_rewards"] == [None, 1.0]


def test_a_job_reports_forwards_and_stops_when_it_is_closed(context):
    request = request_of(**GIVEN)
    events = list(context.jobs.run(lambda job: compute(context, job, "tiny", request)))
    assert isinstance(events[-1], Done) and events[-1].value.request == request
    assert all(isinstance(event, Progress) for event in events[:-1])

    large = request_of(**GIVEN | {"group_size": 16, "num_steps": 20, "noise_steps": [0, 1]})
    ended = []

    def work(job):
        try:
            return compute(context, job, "tiny", large)
        except Cancelled:
            ended.append("cancelled")
            raise

    running = context.jobs.run(work)
    for event in running:
        if "branches" in event.activity:
            break
    running.close()
    small = list(context.jobs.run(lambda job: compute(context, job, "tiny", request)))  # waits for the other
    assert ended == ["cancelled"] and isinstance(small[-1], Done)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ""}, "empty prompt"),
        ({"prompt": None}, "empty prompt"),
        ({"prompt": "x" * 5000}, "5000 characters; shorten it to at most 2500"),
        ({"rewards": None}, "no reward is chosen"),
        ({"rewards": []}, "no reward is chosen"),
        ({"num_steps": None}, "T is 'None'; give a number"),
        ({"num_steps": 1e300}, "from 3 to 30"),
        ({"group_size": 2.5}, "whole number"),
        ({"group_size": True}, "give a number"),
        ({"eta": float("inf")}, "give a number"),
        ({"seed": "<script>"}, "give a number"),
        ({"noise_steps": None}, "give 1 to 6"),
        ({"noise_steps": ["x"]}, "give a number"),
        ({"granularities": [10**12]}, "it must be from 1 to 3"),
        ({"sampling": None}, "singular, path"),
    ],
)
def test_wrong_input_gets_a_message(changes, message):
    with pytest.raises(ValueError, match=message):
        request_of(**GIVEN | changes)


def test_presets_and_controls_fit_together():
    for title, preset in PRESETS.items():
        sampling, steps, _, shared = preset_values(title, 8)
        assert (sampling, shared) == (preset["sampling"], preset["shared_start"])
        assert steps.visible == ("noise_steps" in preset)
        if "noise_steps" in preset:
            assert steps.value == list(preset["noise_steps"])
    assert preset_values("An early and a late noise step", 4)[1].value == [0]
    changed = possible_steps(5, [1, 3, 6])
    assert [value for _, value in changed.choices] == [0, 1, 2, 3] and changed.value == [1, 3]
    assert [control.visible for control in used_controls("path")] == [False, False]


def test_rewards_of_the_list_need_no_download_or_code(context):
    names = reward_choices(context)
    assert names[0] == "tiny_preference" and not any(":" in name for name in names)


def test_the_tab_has_stable_names(context):
    with gr.Blocks() as page:
        explore_tab(context)
    ids = {block.elem_id for block in page.blocks.values()}
    names = "preset prompt model sampling noise-steps granularities rewards group-size eta steps seed shared"
    expected = {f"explore-{name}" for name in f"{names} noise run cancel status result png json".split()}
    assert expected <= ids
