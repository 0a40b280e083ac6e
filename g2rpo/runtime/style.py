"""Colours and strokes of every figure and page, in light and in dark.

The colours of series start from Okabe and Ito's palette: blue and vermilion are theirs, the others have its
hues. Lightness is changed so that each has a contrast of at least 3:1 with page and panel (WCAG 2.1, 1.4.11)
and any two can be told apart with protanopia, deuteranopia and tritanopia. Simulated by Machado, Oliveira and
Fernandes (2009) at full severity, the smallest distance of two colours is 0.11 in OKLab; of Okabe and Ito's
own seven it is 0.076, with less contrast. Text has at least 4.5:1. tests/runtime/test_style.py repeats the
simulation. From the eighth series on, colours repeat with another stroke.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SYSTEM_FONTS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif'
"""Fonts of pages, as the value of CSS's font-family."""

STROKES = ("-", "--", ":", "-.")
"""Strokes of lines in matplotlib's notation."""


@dataclass(frozen=True)
class Theme:
    """Colours of a page or figure, as #rrggbb.

    Attributes:
        background: of the page.
        panel: background of table heads, code and controls.
        text: of headings and body.
        quiet: text of secondary importance, such as notes and labels of axes.
        line: rules and grids.
        link: text that can be clicked.
        warning: text of warnings and problems.
        heat: the colour that cells of a heat map approach with their value.
        series: of lines, bars and bands, in order of use.
    """

    background: str
    panel: str
    text: str
    quiet: str
    line: str
    link: str
    warning: str
    heat: str
    series: tuple[str, ...]

    def css(self) -> str:
        """Declares the colours as CSS variables: --bg, --panel, --text, …, --s0, --s1, …"""
        names = {
            "bg": self.background,
            "panel": self.panel,
            "text": self.text,
            "quiet": self.quiet,
            "line": self.line,
            "link": self.link,
            "warn": self.warning,
            "heat": self.heat,
        }
        names |= {f"s{i}": colour for i, colour in enumerate(self.series)}
        return " ".join(f"--{name}: {colour};" for name, colour in names.items())

    def series_style(self, index: int) -> tuple[str, str]:
        """Returns colour and stroke of series `index`, counted from 0."""
        return self.series[index % len(self.series)], STROKES[index // len(self.series) % len(STROKES)]


LIGHT = Theme(
    background="#ffffff",
    panel="#f4f6f9",
    text="#1b2430",
    quiet="#55606e",
    line="#d5dce4",
    link="#0b5c97",
    warning="#8a4b00",
    heat="#0072b2",
    series=("#0072b2", "#d55e00", "#123913", "#6c0172", "#008dff", "#8d490c", "#878787"),
)
DARK = Theme(
    background="#14181d",
    panel="#1d232a",
    text="#e6eaef",
    quiet="#a3aebb",
    line="#38414c",
    link="#7cc4f5",
    warning="#f0b357",
    heat="#56b4e9",
    series=("#4ea6e6", "#e8702a", "#267a73", "#be14cb", "#1edcfe", "#ead061", "#979797"),
)


def css_variables() -> str:
    """Style sheet with the variables of `Theme.css`: light, dark where the reader prefers it, light in print.

    It is the first part of a page's style sheet, whose rules then use `var(--text)` and so on.
    """
    return (
        f":root {{ color-scheme: light dark; {LIGHT.css()} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {DARK.css()} }} }}\n"
    )


def import_matplotlib() -> ModuleType:
    """Imports matplotlib without pyplot, which keeps global state and may look for a display.

    MPLBACKEND, which a notebook or a shell may have set to a backend that is not installed here, is hidden
    while matplotlib is imported.
    """
    inherited = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
        import matplotlib.backends.backend_agg
        import matplotlib.figure
    finally:
        if inherited is not None:
            os.environ["MPLBACKEND"] = inherited
    return matplotlib


def make_figure(width: float, height: float) -> Figure:
    """A matplotlib figure of that size in inches, drawn by Agg."""
    matplotlib = import_matplotlib()
    figure: Figure = matplotlib.figure.Figure(figsize=(width, height), layout="constrained")
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    return figure


def plain(text: str) -> str:
    """A text as matplotlib draws it unchanged: without formulas."""
    return text.replace("$", r"\$")


def style_axes(axes: Axes, theme: Theme = LIGHT) -> None:
    """Gives axes the colours of a theme, a pale grid, and no frame at the top and the right."""
    axes.set_facecolor(theme.background)
    axes.tick_params(colors=theme.quiet, labelcolor=theme.quiet)
    axes.grid(color=theme.line, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme.quiet)
    for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
        label.set_color(theme.text)


def save_figure(
    figure: Figure, target: Path | io.BytesIO, kind: str, theme: Theme = LIGHT, *, salt: str = "g2rpo"
) -> None:
    """Writes a figure as "png" or "svg"; the same numbers give the same bytes.

    Args:
        theme: its background is the figure's.
        salt: of the identifiers inside an SVG.
    """
    matplotlib = import_matplotlib()
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(target, format=kind, dpi=130, metadata=metadata, facecolor=theme.background)
