"""The page of `g2rpo compare`, made from committed runs, in a browser."""

from pathlib import Path

import pytest
from conftest import command
from support.browser import WIDTHS, axe_findings, overflow

JOINT = Path(__file__).parents[2] / "results" / "compare" / "joint"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("compared")
    given = [
        word
        for arm in ("G2RPO", "MixGRPO", "DanceGRPO")
        for seed in (0, 1, 2)
        for word in ("--run", f"{arm}={JOINT / arm / str(seed)}")
    ]
    command("compare", *given, "--out", out / "page")
    return out / "page" / "index.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [*WIDTHS, 1280])
def test_it_fits_and_is_accessible(visit, compared, width, scheme):
    page = visit(compared, width=width, scheme=scheme)
    assert overflow(page) == 0
    assert axe_findings(page) == []


def test_it_prints(visit, compared, tmp_path):
    page = visit(compared, scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.pdf(path=tmp_path / "page.pdf", format="A4")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF-")
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
