"""Pages in a headless Chromium: how the tests open them, and what every page has to fulfil."""

import os
import re
import shutil
from importlib.resources import files
from pathlib import Path

NAMES = ("chromium", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-dev-shm-usage")
"""Containers run as root, and have little shared memory: a page that needs more crashes the browser."""
WIDTHS = (390, 1440)
"""Widths of a phone and of a desktop, in CSS pixels."""
SERIOUS = ("serious", "critical")


def chromium():
    """Path of the browser: $CHROMIUM, otherwise chromium or google-chrome of the PATH.

    Raises:
        RuntimeError: there is none. Tests fail then; they are not skipped.
    """
    given = os.environ.get("CHROMIUM")
    if given:
        if not os.access(given, os.X_OK):
            raise RuntimeError(f"CHROMIUM={given} is not an executable file")
        return given
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise RuntimeError(f"no browser: set CHROMIUM, or install one of {', '.join(NAMES)} (.ci/browser)")
    return found


class Opened:
    """A page with the errors that its console showed.

    Attributes:
        page: Playwright's page.
        errors: messages of the console at level error, exceptions, and requests to other hosts.
    """

    def __init__(self, page):
        self.page, self.errors = page, []
        page.on("console", lambda m: self.errors.append(f"console: {m.text}") if m.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(f"exception: {error}"))
        page.on("request", self._request)

    def _request(self, request):
        if not re.match(r"(data:|blob:|file:|about:|(http|ws)://127\.0\.0\.1[:/])", request.url):
            self.errors.append(f"request: {request.url}")


def opened(browser, url, *, width=1440, scheme="light", height=900):
    """Opens a file or a URL."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, accept_downloads=True
    )
    result = Opened(context.new_page())
    result.page.goto(url.as_uri() if isinstance(url, Path) else url)
    return result


def overflow(page):
    """CSS pixels by which the page is wider than the window; 0: it does not scroll horizontally."""
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


def axe_findings(page):
    """Serious and critical findings of axe-core: sorted pairs (rule, selector), without generated names."""
    if not page.evaluate("typeof window.axe !== 'undefined'"):
        page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return sorted(
        {
            (violation["id"], stable_selector(" ".join(map(str, node["target"]))))
            for violation in result["violations"]
            if violation["impact"] in SERIOUS
            for node in violation["nodes"]
        }
    )


def stable_selector(selector):
    """A selector of axe without names that Gradio generates and without positions."""
    selector = re.sub(r"\.svelte-\w+", "", selector)
    selector = re.sub(r"#(component|range_id|range)[-_]\w+", r"#\1-N", selector)
    return re.sub(r":nth-child\(\d+\)", "", selector).strip()


def focus_with_tab(page, selector, limit=200):
    """Presses Tab until the element has the focus; whether it was reached."""
    for _ in range(limit):
        page.keyboard.press("Tab")
        if page.evaluate("s => document.activeElement?.matches(s) ?? false", selector):
            return True
    return False
