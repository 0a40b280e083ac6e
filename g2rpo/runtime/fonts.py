"""Text in figures. A character comes from the first font that has it: DejaVu Sans, then the system's fonts.

DejaVu Sans is part of matplotlib and covers Latin, Greek, Cyrillic, Arabic and Hebrew letters and many
symbols. Chinese, Japanese, Korean and Indian scripts need a font of the system, such as Debian's
fonts-noto-cjk; without one, their characters are drawn as boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from PIL import ImageDraw, ImageFont

from g2rpo.runtime.style import import_matplotlib


class Lettering:
    """Draws and measures text of one size, in several fonts where one does not have all characters.

    Attributes:
        size_px: height of the letters' square.
        line_px: distance of two lines.
    """

    def __init__(self, size_px: int, *, bold: bool = False) -> None:
        self.size_px, self.line_px = size_px, round(size_px * 1.3)
        self._base = _base_font(bold)
        self._ascent = ImageFont.truetype(self._base, size_px).getmetrics()[0]

    def getlength(self, text: str) -> float:
        """Width of one line of text in pixels."""
        return sum(font.getlength(part) for font, part in self._runs(text))

    def draw(self, draw: ImageDraw.ImageDraw, xy: tuple[float, float], text: str, colour: str) -> None:
        """Draws lines of text whose first begins at the top left corner `xy`."""
        for number, line in enumerate(text.split("\n")):
            x, baseline = xy[0], xy[1] + self._ascent + number * self.line_px
            for font, part in self._runs(line):
                draw.text((x, baseline), part, colour, font, anchor="ls")
                x += font.getlength(part)

    def wrapped(self, text: str, width_px: float, max_lines: int) -> str:
        """Breaks text into at most `max_lines` lines of `width_px`, between words where possible.

        Truncated text ends with an ellipsis.
        """
        lines = [""]
        for word in " ".join(text.split()).split(" "):
            candidate = f"{lines[-1]} {word}".strip()
            if self.getlength(candidate) <= width_px:
                lines[-1] = candidate
                continue
            if lines[-1]:
                lines.append("")
            for letter in word:
                if lines[-1] and self.getlength(lines[-1] + letter) > width_px:
                    lines.append("")
                lines[-1] += letter
            if len(lines) > max_lines:
                break
        if len(lines) > max_lines:
            last = lines[max_lines - 1]
            while last and self.getlength(f"{last}…") > width_px:
                last = last[:-1]
            lines = [*lines[: max_lines - 1], f"{last}…"]
        return "\n".join(lines)

    def _runs(self, text: str) -> Iterator[tuple[ImageFont.FreeTypeFont, str]]:
        """Parts of a line that have one font each."""
        for file, letters in itertools.groupby(text, lambda letter: font_file(letter, self._base)):
            yield _loaded(file, self.size_px), "".join(letters)


def families(text: str) -> list[str]:
    """Names of the fonts that matplotlib needs for a text: its property `family`."""
    base = _base_font(False)
    import_matplotlib()
    from matplotlib.ft2font import FT2Font

    return [FT2Font(file).family_name for file in dict.fromkeys([base, *(font_file(c, base) for c in text)])]


def font_file(letter: str, base: str) -> str:
    """The first font that has a letter: `base`, then those of the system; `base` if none has it."""
    if letter.isascii() or letter.isspace() or ord(letter) in _letters(base):
        return base
    return _system_font(letter) or base


@cache
def _base_font(bold: bool) -> str:
    matplotlib = import_matplotlib()
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name)


@cache
def _system_font(letter: str) -> str | None:
    import_matplotlib()
    from matplotlib import font_manager

    def order(file: str) -> tuple[bool, bool, str]:
        name = Path(file).name.lower()
        return "sans" not in name, "bold" in name or "italic" in name or "oblique" in name, file

    files = sorted(font_manager.findSystemFonts(), key=order)
    return next((file for file in files if ord(letter) in _letters(file)), None)


@cache
def _letters(file: str) -> frozenset[int]:
    """Code points that a font can draw in any size; none for fonts of bitmaps and unreadable files."""
    import_matplotlib()
    from matplotlib.ft2font import FT2Font

    try:
        ImageFont.truetype(file, 16)
        return frozenset(FT2Font(file).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()


@cache
def _loaded(file: str, size_px: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(file, size_px)
