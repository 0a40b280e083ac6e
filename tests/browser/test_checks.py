"""The checks of the other files find what they look for, on a page that has every mistake."""

import pytest
from support.browser import axe_findings, chromium, focus_with_tab, opened, overflow, stable_selector

BAD = """<!doctype html><html><head><title>bad</title></head><body>
<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw="><button id="nameless"></button>
<p style="width: 3000px; color: #aaa; background: #fff">wide and pale</p>
<div id="mouse" onclick="1">only clicked</div>
<script>console.error("loud"); fetch("http://192.0.2.1/").catch(() => 0); nothing();</script></body></html>"""


def test_a_bad_page_is_found(browser, tmp_path):
    file = tmp_path / "bad.html"
    file.write_text(BAD)
    visited = opened(browser, file)
    page = visited.page
    assert overflow(page) > 1000
    assert {"button-name", "color-contrast", "html-has-lang", "image-alt"} <= {
        r for r, _ in axe_findings(page)
    }
    assert focus_with_tab(page, "#nameless", 5) and not focus_with_tab(page, "#mouse", 5)
    said = "\n".join(visited.errors)
    assert (
        "console: loud" in said and "nothing is not defined" in said and "request: http://192.0.2.1/" in said
    )
    page.context.close()


def test_selectors_without_generated_names():
    given = "#component-12 > .wrap.svelte-1abc2d:nth-child(3) > .selected"
    assert stable_selector(given) == "#component-N > .wrap > .selected"


def test_a_missing_browser_is_an_error(monkeypatch, tmp_path):
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="no browser: set CHROMIUM"):
        chromium()
    monkeypatch.setenv("CHROMIUM", str(tmp_path / "none"))
    with pytest.raises(RuntimeError, match="is not an executable file"):
        chromium()
