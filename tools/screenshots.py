"""Makes the pictures of the pages for README and docs, from a finished run of the embedded model.

    g2rpo train tiny sample_every=3 num_sample_prompts=8
    python tools/screenshots.py runs/tiny

It writes docs/images/page_*.png: the report, and each tab of the web page after it was used. It needs the
extra `dev`, and a Chromium as the browser tests do ($CHROMIUM, or chromium or google-chrome on the PATH).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import FLAGS, chromium  # noqa: E402

WIDTH, HEIGHT, WEB_HEIGHT = 1280, 900, 1150
REPORT_WIDTH = 1000
"""Pixels of the picture in the README, where it is about as wide: its text stays readable."""
GROUP_PROMPT = "four red circles on gray"
PATIENCE = 300_000
"""Milliseconds for work of a model on a busy machine."""
COLOURS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the pictures of the pages from a finished run.")
    parser.add_argument("run", type=Path, help="folder of a finished run of the embedded model")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder of the pictures")
    given = parser.parse_args()
    if not (given.run / "finished").is_file():
        parser.error(f"{given.run} is not a finished run; train one, see the top of this file")
    given.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        report_pictures(browser, given.run, given.out)
        with served(given.run) as url:
            web_pictures(browser, url, given.run.resolve().name, given.out)
        browser.close()


def report_pictures(browser: Browser, run: Path, out: Path) -> None:
    """The verdict with the first row of pairs, the slider in the middle of the training, and the groups."""
    subprocess.run([sys.executable, "-m", "g2rpo", "report", str(run)], check=True)
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.goto((run / "report.html").resolve().as_uri())
    page.set_viewport_size({"width": REPORT_WIDTH, "height": HEIGHT})
    bottom = page.locator("#verdict figure.pair").evaluate_all(
        """pairs => Math.max(...pairs.map(pair => pair.getBoundingClientRect())
            .filter((box, _, boxes) => box.top === boxes[0].top).map(box => box.bottom))"""
    )
    page.set_viewport_size({"width": REPORT_WIDTH, "height": int(bottom) + 16})
    save(page, out / "page_report.png")
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    slider = page.locator("#iteration")
    for _ in range(int(slider.get_attribute("max") or 0) // 2):
        slider.press("ArrowLeft")
    for part in ("training", "groups"):
        save(page, out / f"page_report_{part}.png", f"#{part}")
    page.close()


@contextmanager
def served(run: Path) -> Iterator[str]:
    """Runs `g2rpo demo` with the embedded models and the run; gives its URL."""
    command = [sys.executable, "-u", "-m", "g2rpo", "demo", "tiny", "tiny@g2rpo", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            yield next(match[0] for line in lines if (match := re.match(r"http://\S+", line)))
        finally:
            process.terminate()


def web_pictures(browser: Browser, url: str, run: str, out: Path) -> None:
    """Every tab, after it was used."""
    page = browser.new_page(viewport={"width": WIDTH, "height": WEB_HEIGHT})
    page.goto(url)
    page.locator("#generate-button").click(timeout=PATIENCE)
    expect(page.locator("#generate-status")).to_contain_text("done in", timeout=PATIENCE)
    save(page, out / "page_web_generate.png")

    page.get_by_role("tab", name="Explore a group").click()
    page.locator("#explore-run").click()
    expect(page.locator("#explore-status")).to_contain_text("explored in", timeout=PATIENCE)
    save(page, out / "page_web_explore.png")
    page.locator("#explore-prompt textarea").fill(GROUP_PROMPT)
    page.locator("#explore-run").click()
    expect(page.locator("#explore-group h3").first).to_have_text(GROUP_PROMPT, timeout=PATIENCE)
    save(page, out / "page_web_group.png", "#explore-group table.group")

    page.get_by_role("tab", name="Runs").click()
    expect(page.locator(f'#runs-table tr[data-run="{run}"]')).to_be_visible(timeout=PATIENCE)
    save(page, out / "page_web_runs.png")

    page.get_by_role("tab", name="Vote").click()
    page.locator("#vote-start").click()
    expect(page.locator("#vote-left")).to_be_enabled(timeout=PATIENCE)
    save(page, out / "page_web_vote.png")
    page.close()


def save(page: Page, path: Path, selector: str = "") -> None:
    """Writes the window, or an element, as a PNG with a palette, which has about a third of the bytes."""
    page.wait_for_timeout(500)  # images are decoded, animations have ended
    if selector:
        page.locator(selector).screenshot(path=path, animations="disabled")
    else:
        page.evaluate("window.scrollTo(0, 0)")
        page.screenshot(path=path, animations="disabled")
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
