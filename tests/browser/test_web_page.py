"""The page of `g2rpo demo` in a browser: tabs work, show what is computed, and can be used by everyone."""

import csv
import json
import math
import re
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import HOSTILE
from playwright.sync_api import expect
from support.browser import WIDTHS, axe_findings, focus_with_tab, overflow

from g2rpo.inference.images import read_png_text
from g2rpo.inference.open import open_policy
from g2rpo.report.charts import number
from g2rpo.web.explore_data import ExploreRequest, explore_group

TABS = ("Generate", "Explore a group", "Runs", "Vote")
PATIENCE = 120_000
"""Milliseconds for work of a model on a busy machine."""
ALLOWED = Path(__file__).parent / "allowed_findings.toml"


def page_of(visit, web, tab, **options):
    page = visit(web[0], **options)
    page.get_by_role("tab", name=tab).click(timeout=PATIENCE)
    return page


def set_number(page, component, value):
    box = page.locator(f"#{component} input[type=number]")
    box.fill(str(value))
    box.press("Tab")


def generate(page, prompt, steps=3, seed=5):
    page.locator("#generate-prompt textarea").fill(prompt)
    set_number(page, "generate-steps", steps)
    set_number(page, "generate-seed", seed)
    page.locator("#generate-button").click()


def downloaded(page, button, folder):
    with page.expect_download(timeout=PATIENCE) as download:
        page.locator(button).click()
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def test_generate(visit, web, tmp_path):
    page = page_of(visit, web, "Generate")
    files = []
    for seed in (5, 6, 5):
        generate(page, "two red circles", seed=seed)
        expect(page.locator("#generate-gallery img")).to_have_count(2 * len(files) + 2, timeout=PATIENCE)
        expect(page.locator("#generate-status")).to_contain_text("done in")
        files.append(downloaded(page, "#generate-file-left", tmp_path / str(len(files))))
    text, info = read_png_text(files[0])
    assert text == "two red circles" and info["seed"] == 5 and info["num_steps"] == 3
    assert files[0].read_bytes() == files[2].read_bytes() != files[1].read_bytes()
    right = downloaded(page, "#generate-file-right", tmp_path / "right")
    assert right.read_bytes() != files[2].read_bytes()  # the tuned model, from the same noise
    for image in ("#generate-image-left img", "#generate-image-right img"):
        assert page.locator(image).evaluate("image => image.complete && image.naturalWidth") == 64
    assert page.locator("#generate-slider img").count() == 2


def test_explore_shows_what_the_functions_of_training_compute(visit, web, tmp_path):
    page = page_of(visit, web, "Explore a group")
    page.locator("#explore-prompt textarea").fill("two red circles")
    set_number(page, "explore-group-size", 4)
    set_number(page, "explore-steps", 4)
    set_number(page, "explore-seed", 3)
    page.locator("#explore-run").click()
    expect(page.locator("#explore-status")).to_contain_text("explored in", timeout=PATIENCE)
    record = json.loads(downloaded(page, "#explore-json", tmp_path).read_text())
    asked = {k: tuple(v) if isinstance(v, list) else v for k, v in record["request"].items()}
    with torch.no_grad():
        group = explore_group(open_policy("tiny", device="cpu", guidance=1.0), ExploreRequest(**asked))
    assert asked["group_size"] == 4 and asked["seed"] == 3 and len(group.cells) >= 1
    heads = page.locator("#explore-group th[data-member]").evaluate_all(
        "heads => heads.map(head => [Number(head.dataset.member), Number(head.dataset.advantage)])"
    )
    expected = []
    for cell, stored in zip(group.cells, record["cells"], strict=True):
        advantages = cell.advantages.tolist()
        assert stored["advantages [G]"] == pytest.approx(advantages, abs=1e-5)
        order = sorted(range(4), key=lambda g: -advantages[g])
        expected += [pytest.approx([g, advantages[g]], abs=1e-4) for g in order]
    assert heads == expected
    name = next(iter(asked["rewards"]))
    rows = page.locator("#explore-group tbody tr").filter(has=page.locator(f'[data-reward="{name}"]'))
    shown = [
        text
        for i in range(rows.count())
        for text in rows.nth(i).locator(f'[data-reward="{name}"]').all_text_contents()
    ]
    computed = [
        f"{name} {number(float(cell.rewards[0, j, g]))}"
        for cell in group.cells
        for j in range(len(cell.granularities))
        for g in sorted(range(4), key=lambda g: -float(cell.advantages[g]))
    ]
    assert shown == computed
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0 || !image.offsetParent)")


def test_runs_shows_the_metrics_and_moves_every_image(visit, web, runs):
    page = page_of(visit, web, "Runs")
    expect(page.locator('#runs-table tr[data-run="mine"]')).to_be_visible(timeout=PATIENCE)
    lines = [json.loads(line) for line in (runs / "mine" / "metrics.jsonl").read_text().splitlines()]
    trained = [line["reward/tiny_clip"] for line in lines if "nfe" in line]
    cells = page.locator('#runs-table tr[data-run="mine"] td').all_text_contents()
    assert cells[0] == "finished after 3 iterations" and cells[1] == "3 / 3"
    assert cells[2].startswith(f"tiny_clip {number(trained[-1])}")
    images, grid = page.locator("#runs-grid img"), page.locator("#runs-grid [data-iteration]")
    slider = page.locator("#runs-slider input[type=range]")
    seen = []
    for iteration in (3, 2, 1, 0):  # a page begins with the latest grid
        if iteration < 3:
            slider.press("ArrowLeft")
        expect(grid).to_have_attribute("data-iteration", str(iteration), timeout=PATIENCE)
        seen.append(images.evaluate_all("images => images.map(image => image.src)"))
    assert all(len(sources) == 4 for sources in seen)
    assert all(len(set(of_image)) == 4 for of_image in zip(*seen, strict=True))
    assert page.locator("#runs-charts svg").count() >= 4
    assert page.get_by_text("delete", exact=False).filter(has=page.locator("button")).count() == 0


def test_vote_counts_what_was_chosen(visit, web, tmp_path):
    page = page_of(visit, web, "Vote")
    page.locator("#vote-prompts textarea").fill("two red circles\na blue star\nthree green squares")
    set_number(page, "vote-steps", 2)
    page.locator("#vote-start").click()
    for i, choice in enumerate(("#vote-left", "#vote-right", "#vote-tie"), 1):
        expect(page.locator("#vote-heading")).to_contain_text(f"{i} of 3", timeout=PATIENCE)
        expect(page.locator(choice)).to_be_enabled(timeout=PATIENCE)
        assert "tiny" not in page.locator("#vote-booth").inner_text()  # blind
        page.locator(choice).click()
    expect(page.locator("#vote-result")).to_contain_text("win rate", timeout=PATIENCE)
    with downloaded(page, "#vote-file-csv", tmp_path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["prompt"] for row in rows] == ["two red circles", "a blue star", "three green squares"]
    assert [row["choice"] for row in rows] == ["left", "right", "tie"]
    won = [row["winner"] for row in rows]
    assert won == [rows[0]["left"], rows[1]["right"], ""]
    wins, ties = won.count("tiny@g2rpo"), 1
    share, n, z = (wins + ties / 2) / 3, 3, 1.959964
    # Wilson: (p + z²/2n ± z sqrt(p(1 - p)/n + z²/4n²)) / (1 + z²/n)
    centre, scale = share + z * z / (2 * n), 1 + z * z / n
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
    shown = page.locator("#vote-result tbody tr").first.locator("td").all_text_contents()
    assert shown == [
        str(wins),
        str(3 - wins - ties),
        str(ties),
        f"{100 * share:.1f} %",
        f"{100 * low:.1f} to {100 * high:.1f} %",
    ]
    assert len(list(web[1].glob("votes_*.csv"))) >= 1


@pytest.mark.parametrize(("prompt", "message"), [("", "empty"), ("   ", "empty"), ("x" * 5000, "2,?500")])
@pytest.mark.parametrize(
    ("tab", "field", "button"),
    [
        ("Generate", "#generate-prompt", "#generate-button"),
        ("Explore a group", "#explore-prompt", "#explore-run"),
        ("Vote", "#vote-prompts", "#vote-start"),
    ],
)
def test_unusable_prompts_give_a_message(visit, web, tab, field, button, prompt, message):
    page = page_of(visit, web, tab)
    page.locator(f"{field} textarea").fill(prompt)
    page.locator(button).click()
    toast = page.locator(".toast-body")
    expect(toast).to_be_visible(timeout=PATIENCE)
    said = toast.inner_text()
    expected = "[Nn]o prompts|empty" if message == "empty" else message
    assert re.search(expected, said) and "Traceback" not in said and len(said) < 500, said


def test_html_and_markdown_in_a_prompt_stay_text(visit, web):
    page = page_of(visit, web, "Generate")
    generate(page, HOSTILE, steps=1)
    expect(page.locator("#generate-status")).to_contain_text("done in", timeout=PATIENCE)
    page.get_by_role("tab", name="Explore a group").click()
    page.locator("#explore-prompt textarea").fill(HOSTILE)
    set_number(page, "explore-group-size", 2)
    page.locator("#explore-run").click()
    expect(page.locator("#explore-group h3").first).to_have_text(HOSTILE, timeout=PATIENCE)
    page.get_by_role("tab", name="Vote").click()
    page.locator("#vote-prompts textarea").fill(HOSTILE)
    set_number(page, "vote-steps", 1)
    page.locator("#vote-start").click()
    expect(page.locator("#vote-heading")).to_contain_text(HOSTILE, timeout=PATIENCE)
    assert page.title() == "g2rpo" and page.locator("img[src=x]").count() == 0


def test_an_absurd_size_gives_a_message(visit, web):
    page = page_of(visit, web, "Generate")
    page.locator("#generate-seed input").fill("99999999999999")
    page.locator("#generate-button").click()
    expect(page.locator(".toast-body")).to_contain_text("Seed", timeout=PATIENCE)


def test_the_keyboard_reaches_tabs_and_generates(visit, web):
    page = visit(web[0])
    expect(page.locator("#generate-button")).to_be_visible(timeout=PATIENCE)
    assert focus_with_tab(page, "[role=tab]")
    assert focus_with_tab(page, "#generate-prompt textarea")
    set_number(page, "generate-steps", 1)
    assert focus_with_tab(page, "#generate-button")
    page.keyboard.press("Enter")
    expect(page.locator("#generate-status")).to_contain_text("done in", timeout=PATIENCE)


@pytest.fixture(scope="module")
def seen():
    """Findings in Gradio's own components that occurred, of all tabs, widths and schemes."""
    return set()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_tab_fits_and_is_accessible(visit, web, seen, width, scheme):
    allowed = {(entry["rule"], entry["selector"]) for entry in _allowed()}
    page = visit(web[0], width=width, scheme=scheme)
    expect(page.locator("#generate-button")).to_be_visible(timeout=PATIENCE)
    findings = {}
    for tab in TABS:
        _open_tab(page, tab)
        expect(page.get_by_role("tab", name=tab)).to_have_attribute("aria-selected", "true")
        assert overflow(page) == 0, tab
        found = set(axe_findings(page))
        seen |= found
        findings |= {tab: found - allowed} if found - allowed else {}
    assert not findings


def _open_tab(page, name):
    """Gradio moves tabs that do not fit into a menu."""
    tab = page.get_by_role("tab", name=name)
    if tab.count() and tab.first.is_visible():
        tab.first.click()
    else:
        page.locator(".overflow-menu > button").first.click()
        page.locator(".overflow-dropdown button", has_text=name).click()


def test_every_allowed_finding_still_occurs(seen):
    """Runs after the tests above; an entry that no longer occurs has to be removed from the list."""
    assert seen, "run the whole file: this test compares the list with what the others saw"
    gone = [entry for entry in _allowed() if (entry["rule"], entry["selector"]) not in seen]
    assert not gone, f"no longer found, remove from {ALLOWED.name}: {gone}"


def _allowed():
    return tomllib.loads(ALLOWED.read_text("utf-8"))["finding"]
