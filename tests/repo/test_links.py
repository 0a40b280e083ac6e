"""Links of the documents: files, headings and images that they name exist."""

import re

import pytest
from support.documents import ROOT, anchors, documents, links

# docs/settings.md and docs/api.md get further headings when the site is built, which checks links to them.
GENERATED = {"docs/settings.md", "docs/api.md"}


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document):
    text = document.read_text(encoding="utf-8")
    broken = []
    for target in links(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or not path.is_relative_to(ROOT):
            broken.append(f"{target}: no such file")
            continue
        is_checked = anchor and str(path.relative_to(ROOT)) not in GENERATED
        if is_checked and anchor not in anchors(path.read_text(encoding="utf-8")):
            broken.append(f"{target}: no such heading")
    assert not broken, broken


def test_every_page_is_reached_from_another():
    pages = [path for path in documents() if path.parent != ROOT]
    reached = {
        (document.parent / target.partition("#")[0]).resolve()
        for document in documents()
        for target in links(document.read_text(encoding="utf-8"))
        if not target.startswith("#") and ":" not in target
    }
    assert len(pages) > 20
    assert not [str(page) for page in pages if page not in reached and page.name != "index.md"]


def test_every_image_is_shown_somewhere():
    shown = {
        (document.parent / target).resolve()
        for document in documents()
        for target in links(document.read_text(encoding="utf-8"))
    }
    images = sorted((ROOT / "docs" / "images").glob("*.png"))
    assert len(images) > 10 and not [str(image) for image in images if image not in shown]


def test_anchors_are_those_of_github():
    text = "# What to choose\n## Stage 4: rates, and `g2rpo compare`\n## Last: the script's\n"
    assert anchors(text + 2 * "## Twice\n" + "```\n# no heading\n```\n") == {
        "what-to-choose",
        "stage-4-rates-and-g2rpo-compare",
        "last-the-scripts",
        "twice",
        "twice-1",
    }
    assert links("[a](b.md#c) ![d](e.png) `[f](g)`\n```\n[h](i)\n```\n") == ["b.md#c", "e.png"]
