"""Letters of figures: from the first font that has them, and measured as they are drawn."""

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image, ImageDraw

from g2rpo.runtime import fonts
from g2rpo.runtime.fonts import Lettering, families


def drawn(text):
    page = Image.new("L", (200, 100), 255)
    Lettering(24).draw(ImageDraw.Draw(page), (10, 10), text, "#000000")
    return np.array(page) < 128


@pytest.fixture
def system_font(tmp_path, monkeypatch):
    """A font of the system whose only letter, U+65E5, is a full square."""
    builder = FontBuilder(1000)
    builder.setupGlyphOrder([".notdef", "square"])
    builder.setupCharacterMap({0x65E5: "square"})
    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for point in ((0, 1000), (1000, 1000), (1000, 0)):
        pen.lineTo(point)
    pen.closePath()
    builder.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "square": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (1000, 0), "square": (1000, 0)})
    builder.setupHorizontalHeader(ascent=1000, descent=0)
    builder.setupNameTable({"familyName": "One Square", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(tmp_path / "OneSquare.ttf")
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    files = [str(tmp_path / "broken.ttf"), str(tmp_path / "OneSquare.ttf")]
    monkeypatch.setattr("matplotlib.font_manager.findSystemFonts", lambda: files)
    fonts._system_font.cache_clear()
    yield
    fonts._system_font.cache_clear()


def test_a_letter_comes_from_the_font_that_has_it(system_font):
    ink = drawn("a日b")
    # The square is 24 px wide and high, between two letters of DejaVu Sans.
    full = [x for x in range(200) if ink[:, x].sum() == 24]
    assert len(full) == 24 and full[0] > 20 and ink[:, : full[0]].any() and ink[:, full[-1] + 1 :].any()
    assert Lettering(24).getlength("a日b") == Lettering(24).getlength("ab") + 24
    assert families("a日") == ["DejaVu Sans", "One Square"]


def test_a_letter_that_no_font_has_is_a_box(monkeypatch):
    monkeypatch.setattr("matplotlib.font_manager.findSystemFonts", lambda: [])
    fonts._system_font.cache_clear()
    assert drawn("日").any() and families("日") == ["DejaVu Sans"]
    fonts._system_font.cache_clear()


def test_letters_of_many_scripts_need_no_font_of_the_system(monkeypatch):
    def nothing():
        raise AssertionError("the system's fonts were looked for")

    monkeypatch.setattr("matplotlib.font_manager.findSystemFonts", nothing)
    fonts._system_font.cache_clear()
    for text in ("éß", "жя", "λΛ", "−→±", "مر"):
        assert drawn(text).any(), text


def test_lines_are_drawn_below_each_other():
    one, two = drawn("x"), drawn("x\nx")
    line_px = Lettering(24).line_px
    assert np.array_equal(two, one | np.roll(one, line_px, 0)) and two.sum() == 2 * one.sum()
