"""Charts of the report: inline SVG that takes its colours from the page, so that it follows dark mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 30
COLOURS = 7
"""Number of series colours that the style sheet defines."""

ROUNDING = 1e-3
"""Relative range of the values of a heat map below which they count as equal."""


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        name: its name in the legend.
        points: (x, y, half width of the band or None), in ascending order of x. Points whose y is not finite
            are left out, such as the loss of an iteration without an update; a band that is not is None.
        dots: whether points are marked, for a few measured points.
    """

    name: str
    points: Sequence[tuple[float, float, float | None]]
    dots: bool = False

    def __post_init__(self) -> None:
        finite = [
            (x, y, band if band is not None and math.isfinite(band) else None)
            for x, y, band in self.points
            if math.isfinite(y)
        ]
        object.__setattr__(self, "points", finite)


def number(value: float, digits: int = 4) -> str:
    """Formats a number for people: four significant digits, and a real minus sign."""
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 10_000 or (0 < size < 1e-4):
        text = f"{value:.{digits - 2}e}"
        mantissa, exponent = text.split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        text = f"{mantissa}e{int(exponent)}"
    else:
        text = f"{value:.{digits}g}"
    return text.replace("-", "\N{MINUS SIGN}")


def signed(value: float, digits: int = 3) -> str:
    """Formats a difference, always with its sign."""
    text = number(value, digits)
    return text if value < 0 or not math.isfinite(value) else f"+{text}"


def line_chart(title: str, series: Sequence[Series], *, x_label: str = "iteration") -> Markup:
    """Returns a figure with a line chart; series without points are left out.

    Raises:
        ValueError: no series has points.
    """
    from matplotlib.ticker import MaxNLocator

    drawn = [one for one in series if one.points]
    if not drawn:
        raise ValueError(f"{title}: nothing to draw")
    xs = [x for one in drawn for x, _, _ in one.points]
    ys = [y + sign * (band or 0.0) for one in drawn for _, y, band in one.points for sign in (-1, 1)]
    (x0, x1), (y0, y1) = _range(xs, 0.0), _range(ys, 0.06)

    def px(x: float) -> float:
        return LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return TOP + (y1 - y) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for tick in MaxNLocator(nbins=5).tick_values(y0, y1):
        if y0 <= tick <= y1:
            parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(tick):.1f}" '
                f'y2="{py(tick):.1f}"/><text class="y" x="{LEFT - 6}" y="{py(tick) + 4:.1f}">'
                f"{number(float(tick))}</text>"
            )
    for tick in MaxNLocator(nbins=7, integer=True).tick_values(x0, x1):
        if x0 <= tick <= x1:
            parts.append(f'<text class="x" x="{px(tick):.1f}" y="{HEIGHT - 12}">{tick:.0f}</text>')
    for i, one in enumerate(drawn):
        colour = f"c{i % COLOURS}"
        bands = [(x, y, band) for x, y, band in one.points if band is not None]
        if bands:
            outline = [(x, y + band) for x, y, band in bands] + [(x, y - band) for x, y, band in bands[::-1]]
            parts.append(f'<path class="band {colour}" d="M{_path(outline, px, py)}Z"/>')
        path = _path([(x, y) for x, y, _ in one.points], px, py)
        parts.append(f'<path class="line {colour}" d="M{path}"/>')
        if one.dots or len(one.points) == 1:
            parts += [
                f'<circle class="{colour}" cx="{px(x):.1f}" cy="{py(y):.1f}" r="3"/>'
                for x, y, _ in one.points
            ]
    text = "; ".join(
        f"{one.name} from {number(one.points[0][1])} at {x_label} {one.points[0][0]:.0f} to "
        f"{number(one.points[-1][1])} at {one.points[-1][0]:.0f}"
        for one in drawn
    )
    legend = "".join(
        f'<span><i class="c{i % COLOURS}"></i>{escape(one.name)}</span>' for i, one in enumerate(drawn)
    )
    return Markup(
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{title}: {text}")}">'
        f"{''.join(parts)}</svg>"
        + (f'<p class="legend">{legend}</p>' if len(drawn) > 1 else "")
        + "</figure>"
    )


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Mapping[tuple[int, int], float],
    corner: str,
) -> Markup:
    """Returns a table whose cells are coloured by their value, which is also printed.

    Args:
        rows, columns: their labels.
        values: (row, column) -> value; missing cells stay empty.
        corner: what rows and columns are.
    """
    low, high = min(values.values()), max(values.values())
    if high - low <= ROUNDING * max(abs(low), abs(high)):
        low = high  # the same colour for all: equal values differ by rounding only
    body = []
    for i, row in enumerate(rows):
        cells = []
        for j in range(len(columns)):
            value = values.get((i, j))
            if value is None:
                cells.append("<td></td>")
                continue
            share = 8 + 47 * ((value - low) / (high - low) if high > low else 0.5)
            cells.append(f'<td style="--heat-share:{share:.0f}%">{number(value, 3)}</td>')
        body.append(f'<tr><th scope="row">{escape(row)}</th>{"".join(cells)}</tr>')
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    return Markup(
        f'<figure class="heat"><figcaption>{escape(title)}</figcaption>'
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(title)}">'
        f'<table><thead><tr><th scope="col">{escape(corner)}</th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div></figure>"
    )


def _range(values: Iterable[float], margin: float) -> tuple[float, float]:
    values = list(values)
    low, high = min(values), max(values)
    if low == high == 0:
        return 0.0, 1.0
    if low == high:
        spread = abs(low) * 0.1 or 1.0
        return low - spread, high + spread
    return low - margin * (high - low), high + margin * (high - low)


def _path(
    points: Sequence[tuple[float, float]], px: Callable[[float], float], py: Callable[[float], float]
) -> str:
    return "L".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points)
