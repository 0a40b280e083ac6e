"""The report of a real run in a browser: what moves, what it says, and whether everyone can use it."""

import itertools
import json
import re

import numpy as np
import pytest
from playwright.sync_api import expect
from support.browser import WIDTHS, axe_findings, focus_with_tab, overflow

from g2rpo.evaluation.stats import interval
from g2rpo.report.charts import number, signed


def sources(page):
    return page.eval_on_selector_all("img[data-cell]", "images => images.map(image => image.src)")


def test_the_slider_moves_every_image(visit, report):
    page = visit(report)
    slider, shown = page.locator("#iteration"), page.locator("#iteration-value")
    assert shown.text_content() == "3" and len(sources(page)) == 4
    seen = []
    for iteration in (2, 1, 0):
        slider.press("ArrowLeft")
        assert shown.text_content() == str(iteration)
        assert slider.get_attribute("aria-valuetext") == f"iteration {iteration}"
        seen.append(sources(page))
    for before, after in itertools.pairwise(seen):
        assert all(x != y for x, y in zip(before, after, strict=True))
    slider.press("End")
    last = sources(page)
    slider.press("Home")
    assert sources(page) == seen[-1] and all(x != y for x, y in zip(last, seen[-1], strict=True))
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")


def test_the_images_of_the_slider_are_those_of_the_run(visit, runs, report):
    """The page's pixels against the PNGs, at the size at which both are stored; WebP loses a little."""
    from PIL import Image

    page = visit(report)
    page.locator("#iteration").press("Home")
    script = """image => {
        const canvas = document.createElement("canvas");
        canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
        const drawing = canvas.getContext("2d"); drawing.drawImage(image, 0, 0);
        return [...drawing.getImageData(0, 0, canvas.width, canvas.height).data];
    }"""
    files = sorted((runs / "mine" / "samples" / "step_000000").glob("[0-9]*.png"))
    for cell, file in enumerate(files):
        expected = np.asarray(Image.open(file).convert("RGB"), float)
        pixels = np.array(page.locator(f'img[data-cell="{cell}"]').evaluate(script)).reshape(-1, 4)[:, :3]
        assert np.abs(pixels.reshape(expected.shape) - expected).mean() < 8


def test_play_runs_to_the_end_and_stops(visit, report):
    page = visit(report)
    page.locator("#iteration").press("Home")
    page.locator("#play").click()
    expect(page.locator("#play")).to_have_text("Stop")
    expect(page.locator("#play")).to_have_text("Play", timeout=20_000)
    assert page.locator("#iteration-value").text_content() == "3"


def test_the_verdict_has_the_numbers_of_the_evaluation_records(visit, runs, report):
    """Computed here again from the scores before and after, prompt by prompt."""
    page = visit(report)
    before = json.loads((runs / "mine" / "comparison" / "before.json").read_text())["sets"]
    after = json.loads((runs / "mine" / "comparison" / "after.json").read_text())["scores"]
    headline = page.locator(".headline").text_content()
    for number_of_set, entry in enumerate(before):
        table = page.locator("#verdict table").nth(number_of_set)
        for name, scores in entry["scores"].items():
            prompts = np.array(entry["prompts"])
            pairs = np.array([scores, after[number_of_set][name]], float)
            scored = np.isfinite(pairs).all(0)  # the verifier cannot read every prompt
            of_prompt = [pairs[:, scored & (prompts == p)].mean(1) for p in dict.fromkeys(prompts[scored])]
            first, last = np.array(of_prompt).T
            low, high = interval(last - first)
            row = table.locator(f'tr[data-reward="{name}"]')
            result = "rose" if low > 0 else "fell" if high < 0 else "no measurable change"
            assert row.locator("td").all_text_contents() == [
                number(float(first.mean())),
                number(float(last.mean())),
                signed(float((last - first).mean())),
                f"{signed(low)} to {signed(high)}",
                str(len(of_prompt)),
                result,
            ]
            if number_of_set == len(before) - 1:  # the verdict is on the unseen prompts
                said = "did not change measurably" if result == "no measurable change" else result
                assert re.search(rf"(Trained|Held out): [^.]*{name}[^.]*{said}", headline)


def test_text_of_a_prompt_stays_text(visit, report):
    page = visit(report)
    assert page.title() == "mine: report of a g2rpo run"
    assert page.locator(".prompt, figcaption").filter(has_text='<img src=x onerror="').count() >= 1
    assert page.locator("img[src=x]").count() == 0


def test_every_control_is_reached_with_the_keyboard(visit, report):
    page = visit(report)
    for selector in ("nav a", "#iteration", "#play", "summary"):
        assert focus_with_tab(page, selector), selector
    page.locator("summary", has_text="All settings").press("Enter")
    assert page.locator("th", has_text="prompts_per_iteration").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_and_is_accessible(visit, report, width, scheme):
    page = visit(report, width=width, scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert overflow(page) == 0
    assert axe_findings(page) == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) > 382) == (scheme == "light")


def test_it_prints_in_light_colours_with_everything_open(visit, report, tmp_path):
    page = visit(report, scheme="dark")
    page.emulate_media(media="print")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(255, 255, 255)" and not page.locator("#play").is_visible()
    page.pdf(path=tmp_path / "report.pdf", format="A4", print_background=True)
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF-")
    assert page.evaluate("[...document.querySelectorAll('details')].every(part => part.open)")
    assert (tmp_path / "report.pdf").stat().st_size > 20_000


def test_it_works_offline_from_another_folder(visit, report, tmp_path):
    copy = tmp_path / "elsewhere.html"
    copy.write_bytes(report.read_bytes())
    page = visit(copy)
    page.context.set_offline(True)
    page.reload()
    page.locator("#iteration").press("Home")
    assert page.locator("#iteration-value").text_content() == "0"
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
