"""Figures and page of a comparison: curves with bands as PNG and SVG, and a self-contained index.html."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g2rpo.comparison.curves import AXES, SMOOTHED, Band, band
from g2rpo.comparison.tables import UNITS, Compared, Table, how_to_read, title_of, warning
from g2rpo.runtime.files import atomic_path, write_atomic
from g2rpo.runtime.style import make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can distinguish; then the same with other strokes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")
STROKES = ("-", "--", ":", "-.")
X_LABELS = {**UNITS, "seconds": "seconds of iterations"}


def bands_of(compared: Compared, metric: str) -> dict[str, Band]:
    """Computes each arm's mean over seeds with its band; arms without the metric are left out."""
    return {arm: band(list(runs.values())) for arm, runs in compared.curves(metric).items()}


def meaning(bands: Mapping[str, Band]) -> str:
    """Explains what the bands show."""
    seeds = {band.seeds for band in bands.values()}
    parts = []
    if any(n >= 3 for n in seeds):
        parts.append("band: ± 1 standard error over seeds")
    if 2 in seeds:
        parts.append("band of two seeds: smallest to largest")
    if 1 in seeds:
        parts.append("one seed: no band")
    return "; ".join(parts)


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # no mathematics in names


def _draw(axes: Axes, bands: Mapping[str, Band], styles: Mapping[str, tuple[str, str]], axis: str) -> None:
    from matplotlib.ticker import EngFormatter

    for arm, mean_curve in bands.items():
        colour, stroke = styles[arm]
        marker = "o" if len(mean_curve.mean) <= 25 else ""
        axes.plot(
            mean_curve.x[axis],
            mean_curve.mean,
            stroke,
            color=colour,
            linewidth=1.6,
            marker=marker,
            markersize=2.5,
            label=_plain(f"{arm} ({_seeds(mean_curve)})"),
        )
        if mean_curve.seeds > 1:
            low, high = mean_curve.low, mean_curve.high
            axes.fill_between(mean_curve.x[axis], low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xlabel(X_LABELS[axis], fontsize=9)
    axes.locator_params(axis="x", nbins=7, integer=axis != "seconds")
    if axes.get_xlim()[1] >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _seeds(mean_curve: Band) -> str:
    return f"{mean_curve.seeds} seed{'s' * (mean_curve.seeds > 1)}"


def _styles(compared: Compared) -> dict[str, tuple[str, str]]:
    return {
        arm: (COLOURS[i % len(COLOURS)], STROKES[i // len(COLOURS) % len(STROKES)])
        for i, arm in enumerate(compared.arms)
    }


def _save(figure: Figure, target: Path | io.BytesIO, kind: str) -> None:
    import matplotlib

    # The same numbers give the same bytes: no date, and fixed identifiers inside the SVG.
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "g2rpo"}):
        figure.savefig(target, format=kind, dpi=130, metadata=metadata)


def write_curves(folder: Path, compared: Compared) -> None:
    """Writes FOLDER/curves.png and .svg, one row per metric and one column per axis."""
    metrics, styles = compared.metrics(), _styles(compared)
    lines = -(-len(compared.arms) // 3)
    figure = make_figure(15.0, 2.9 * len(metrics) + 0.25 * lines + 0.4)
    handles: dict[str, Any] = {}
    for row, metric in enumerate(metrics):
        bands = bands_of(compared, metric)
        for column, axis in enumerate(AXES):
            axes = figure.add_subplot(len(metrics), len(AXES), row * len(AXES) + column + 1)
            _draw(axes, bands, styles, axis)
            handles |= {label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
            if column == 0:
                axes.set_ylabel(_plain(title_of(metric).replace(", ", "\n")), fontsize=9)
                axes.set_title(meaning(bands), fontsize=7, color="#555555", loc="left")
    figure.legend(
        list(handles.values()), list(handles), loc="outside upper left", ncols=3, fontsize=9, frameon=False
    )
    for kind in ("png", "svg"):
        with atomic_path(folder / f"curves.{kind}") as temporary:
            _save(figure, temporary, kind)


def _panel(compared: Compared, metric: str, axis: str) -> str:
    """One panel as an <img> with the SVG inside."""
    figure = make_figure(4.4, 3.0)
    bands = bands_of(compared, metric)
    _draw(figure.add_subplot(), bands, _styles(compared), axis)
    buffer = io.BytesIO()
    _save(figure, buffer, "svg")
    text = f"{title_of(metric)} against {X_LABELS[axis]}: {', '.join(bands)}"
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(text)}" src="data:image/svg+xml;base64,{data}">'


def _legend(compared: Compared, metric: str) -> str:
    bands = bands_of(compared, metric)
    keys = []
    for arm, (colour, stroke) in _styles(compared).items():
        style = {"-": "solid", "--": "dashed", ":": "dotted", "-.": "double"}[stroke]
        n = _seeds(bands[arm]) if arm in bands else "not measured"
        key = f'<i style="border-top:3px {style} {colour}"></i>'
        keys.append(f"<span>{key}{html.escape(arm)} <small>({n})</small></span>")
    return f'<p class="legend">{"".join(keys)}</p>'


def _table(table: Table) -> str:
    def row(cells: Sequence[str], kind: str) -> str:
        first, *others = (html.escape(cell) for cell in cells)
        scope = "row" if kind == "td" else "col"
        rest = "".join(f"<{kind}>{cell}</{kind}>" for cell in others)
        return f'<tr><th scope="{scope}">{first}</th>{rest}</tr>'

    body = "".join(row(cells, "td") for cells in table.rows)
    note = f"<p><small>{html.escape(table.note)}</small></p>" if table.note else ""
    head = row(table.heads, "th")
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>{note}'


STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: #1c2530;
  margin: 0 auto; max-width: 76rem; padding: 1rem; background: #fff; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid #d8dee6; padding-bottom: .25rem; }
h3 { font-size: .95rem; margin: 1.2rem 0 .3rem; color: #4a5665; }
p { max-width: 52rem; } small { color: #5b6775; }
.warning { background: #fff4e0; border-left: 4px solid #e69f00; padding: .5rem .8rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .3rem 0; }
.legend i { display: inline-block; width: 1.6rem; margin: 0 .4rem .25rem 0; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(16rem, 100%), 1fr)); gap: .5rem; }
.panels img { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #e3e8ee; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } tbody th { font-weight: 600; }
thead th { background: #f3f6f9; font-weight: 600; white-space: normal; vertical-align: bottom; }
details { margin: .6rem 0; } summary { cursor: pointer; color: #2b5f8f; }
pre { background: #f3f6f9; padding: .7rem; overflow-x: auto; font-size: .82rem; }
""".strip()


def write_page(
    path: Path, compared: Compared, values: Sequence[Table], reached: Sequence[Table], others: Sequence[Table]
) -> None:
    """Writes index.html with all figures and tables inside.

    Args:
        values, reached: tables with one entry per metric; `reached` is empty for a single arm.
        others: further tables.
    """
    names = " · ".join(compared.arms)
    parts = [f"<h1>{html.escape(names)}</h1>"]
    count = sum(len(runs) for runs in compared.arms.values())
    parts.append(f"<p><small>g2rpo compare: {len(compared.arms)} arms, {count} runs.</small></p>")
    if text := warning(compared):
        parts.append(f'<p class="warning">{html.escape(text)}</p>')
    parts.append("<details><summary>How to read this</summary>")
    parts += [f"<p>{html.escape(text)}</p>" for text in how_to_read(compared)]
    parts.append("</details>")
    for i, metric in enumerate(compared.metrics()):
        parts.append(f"<section><h2>{html.escape(values[i].title)}</h2>{_legend(compared, metric)}")
        panels = "".join(f"<div>{_panel(compared, metric, axis)}</div>" for axis in AXES)
        note = meaning(bands_of(compared, metric))
        if metric.startswith(SMOOTHED):
            note += f"; trailing mean of {compared.window} iterations"
        parts.append(f'<div class="panels">{panels}</div><p><small>{html.escape(note)}.</small></p>')
        parts.append(_table(values[i]))
        if reached:
            parts.append(f"<h3>Who reaches whose best</h3>{_table(reached[i])}")
        parts.append("</section>")
    parts += [f"<section><h2>{html.escape(t.title)}</h2>{_table(t)}</section>" for t in others]
    commands = html.escape("\n".join(compared.commands))
    parts.append(f"<section><h2>Commands</h2><pre>{commands}</pre></section>")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(names)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(parts)
    write_atomic(
        path, f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
    )
