"""Figures and page of a comparison: curves with bands as PNG and SVG, and a self-contained index.html.

The page begins with what a reader came for: the verdict, then evaluations, then training rewards, settings
and runs. It is light or dark as the reader's system is, and on a narrow screen each row of a table is a card.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g2rpo.comparison.curves import AXES, SMOOTHED, Band, band
from g2rpo.comparison.tables import (
    TRAINING_REWARDS,
    UNITS,
    Compared,
    MetricTables,
    Table,
    how_to_read,
    title_of,
    warning,
)
from g2rpo.runtime.files import atomic_path, write_atomic
from g2rpo.runtime.fonts import families
from g2rpo.runtime.style import (
    DARK,
    LIGHT,
    SYSTEM_FONTS,
    Theme,
    css_variables,
    make_figure,
    plain,
    save_figure,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DENSE_COLUMNS, MANY_COLUMNS = 7, 9
"""To fit the page, a table of more columns has smaller letters, and of still more breaks words anywhere."""
X_LABELS = {**UNITS, "seconds": "seconds of iterations"}


def bands_of(compared: Compared, metric: str, axis: str) -> dict[str, Band]:
    """Computes each arm's mean over seeds with its band; arms without the metric are left out."""
    return {arm: band(list(runs.values())) for arm, runs in compared.curves(metric, axis).items()}


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


def _note(compared: Compared, metric: str, bands: Mapping[str, Band]) -> str:
    note = meaning(bands)
    if metric.startswith(SMOOTHED):
        note += f"; trailing mean over {compared.smoothing:.0%} of the axis"
    return note


def _draw(
    axes: Axes, bands: Mapping[str, Band], arms: Sequence[str], axis: str, theme: Theme, size: float
) -> None:
    """Draws the bands of one panel.

    Args:
        arms: all arms, whose order decides colours.
        size: of the letters of labels, in points.
    """
    from matplotlib.ticker import EngFormatter

    for arm, mean_curve in bands.items():
        colour, stroke = theme.series_style(arms.index(arm))
        marker = "o" if len(mean_curve.mean) <= 25 else ""
        axes.plot(
            mean_curve.x[axis],
            mean_curve.mean,
            stroke,
            color=colour,
            linewidth=1.8,
            marker=marker,
            markersize=3,
            label=plain(f"{arm} ({_seeds(mean_curve)})"),
        )
        if mean_curve.seeds > 1:
            low, high = mean_curve.low, mean_curve.high
            axes.fill_between(mean_curve.x[axis], low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xlabel(X_LABELS[axis], fontsize=size)
    axes.locator_params(axis="x", nbins=5, integer=axis != "seconds")
    axes.locator_params(axis="y", nbins=6)
    if axes.get_xlim()[1] >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k
    axes.tick_params(labelsize=size - 1)
    style_axes(axes, theme)


def _seeds(mean_curve: Band) -> str:
    return f"{mean_curve.seeds} seed{'s' * (mean_curve.seeds > 1)}"


def write_curves(folder: Path, compared: Compared) -> None:
    """Writes FOLDER/curves.png and .svg, one row per metric and one column per axis."""
    metrics, arms = compared.metrics(), list(compared.arms)
    lines = -(-len(arms) // 3)
    figure = make_figure(15.0, 3.3 * len(metrics) + 0.32 * lines + 0.4)
    handles: dict[str, Any] = {}
    for row, metric in enumerate(metrics):
        for column, axis in enumerate(AXES):
            bands = bands_of(compared, metric, axis)
            axes = figure.add_subplot(len(metrics), len(AXES), row * len(AXES) + column + 1)
            _draw(axes, bands, arms, axis, LIGHT, 13)
            handles |= {label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
            if column == 0:
                title = plain(title_of(metric).replace(", ", "\n"))
                axes.set_ylabel(title, fontsize=13, family=families(title), color=LIGHT.text)
                note = _note(compared, metric, bands)
                axes.set_title(note, fontsize=10, color=LIGHT.quiet, loc="left")
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside upper left",
        ncols=3,
        prop={"family": families("".join(handles)), "size": 13},
        labelcolor=LIGHT.text,
        frameon=False,
    )
    for kind in ("png", "svg"):
        with atomic_path(folder / f"curves.{kind}") as temporary:
            save_figure(figure, temporary, kind)


def _panel(compared: Compared, metric: str, axis: str) -> str:
    """One panel as an image in light and dark, with the SVGs inside."""
    bands = bands_of(compared, metric, axis)
    sources = {}
    for name, theme in (("light", LIGHT), ("dark", DARK)):
        figure = make_figure(4.8, 3.0)
        _draw(figure.add_subplot(), bands, list(compared.arms), axis, theme, 10)
        buffer = io.BytesIO()
        save_figure(figure, buffer, "svg", theme)
        sources[name] = f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    text = f"{title_of(metric)} against {X_LABELS[axis]}: {', '.join(map(_last, bands.items()))}"
    return (
        f'<picture><source media="screen and (prefers-color-scheme: dark)" srcset="{sources["dark"]}">'
        f'<img alt="{html.escape(text)}" src="{sources["light"]}"></picture>'
    )


def _last(arm: tuple[str, Band]) -> str:
    name, mean_curve = arm
    return f"{name} ends at {mean_curve.mean[-1]:.4f}" if len(mean_curve.mean) else f"{name} has no points"


def _legend(compared: Compared, bands: Mapping[str, Band]) -> str:
    keys = []
    for index, arm in enumerate(compared.arms):
        colour, stroke = LIGHT.series_style(index)
        style = {"-": "solid", "--": "dashed", ":": "dotted", "-.": "double"}[stroke]
        n = _seeds(bands[arm]) if arm in bands else "not measured"
        variable = f"var(--s{LIGHT.series.index(colour)})"
        key = f'<i style="border-top:3px {style} {variable}"></i>'
        keys.append(f"<span>{key}{html.escape(arm)} <small>({n})</small></span>")
    return f'<p class="legend">{"".join(keys)}</p>'


def _table(table: Table) -> str:
    """A table whose cells know the head of their column, which a narrow screen shows beside each value.

    The roles are said explicitly: browsers forget them where a table is not laid out as one.
    """
    heads = [html.escape(head) for head in table.heads]

    def row(cells: Sequence[str]) -> str:
        # A mean and its error stay on one line.
        first, *others = (html.escape(cell).replace(" ± ", "&nbsp;±&nbsp;") for cell in cells)
        rest = "".join(
            f'<td role="cell" data-head="{head}">{cell}</td>'
            for head, cell in zip(heads[1:], others, strict=True)
        )
        return f'<tr role="row"><th scope="row" role="rowheader">{first}</th>{rest}</tr>'

    body = "".join(map(row, table.rows))
    head = "".join(f'<th scope="col" role="columnheader">{text}</th>' for text in heads)
    note = f'<p class="quiet">{html.escape(table.note)}</p>' if table.note else ""
    title, count = html.escape(table.title), len(heads)
    kind = "wide" + " dense" * (count > DENSE_COLUMNS) + " many" * (count > MANY_COLUMNS)
    return (
        f'<div class="{kind}" role="region" aria-label="Table: {title}" tabindex="0"><table role="table">'
        f'<thead role="rowgroup"><tr role="row">{head}</tr></thead>'
        f'<tbody role="rowgroup">{body}</tbody></table></div>{note}'
    )


STYLE = f"""
{css_variables()}
* {{ box-sizing: border-box; }}
body {{ font: 16px/1.5 {SYSTEM_FONTS}; color: var(--text); background: var(--bg); margin: 0 auto;
  max-width: 76rem; padding: 1rem; }}
h1 {{ font-size: 1.5rem; line-height: 1.25; margin: .5rem 0 .25rem; }}
h2 {{ font-size: 1.3rem; margin: 2.4rem 0 .5rem; border-bottom: 1px solid var(--line); }}
h3 {{ font-size: 1.1rem; margin: 2rem 0 .4rem; }} h4 {{ font-size: .95rem; margin: 1.2rem 0 .3rem; }}
h1, h2, h3, h4, p, .many th, .many td {{ overflow-wrap: anywhere; }} th, td {{ overflow-wrap: break-word; }}
p {{ max-width: 56rem; }} .quiet, small {{ color: var(--quiet); }} p.quiet {{ font-size: .9rem; }}
.verdict {{ font-size: 1.1rem; font-weight: 600; border-left: 4px solid var(--s0); padding-left: .8rem; }}
.warning {{ color: var(--warn); border-left: 4px solid var(--warn); padding-left: .8rem; }}
.legend {{ display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .8rem 0 .3rem; max-width: none; }}
.legend i {{ display: inline-block; width: 1.6rem; margin: 0 .4rem .25rem 0; }}
.panels {{ display: grid; gap: .8rem;
  grid-template-columns: repeat(auto-fit, minmax(min(28rem, 100%), 1fr)); }}
.panels img {{ width: 100%; height: auto; display: block; }}
.wide {{ overflow-x: auto; margin: .4rem 0; }}
:focus-visible {{ outline: 3px solid var(--s1); outline-offset: 2px; }}
table {{ border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; min-width: 4.5rem; }}
th:first-child {{ text-align: left; min-width: 6rem; }} tbody th {{ font-weight: 600; }}
.dense table {{ font-size: .8rem; }} .dense th, .dense td {{ padding: .3rem .4rem; }}
.many th, .many td {{ min-width: 3rem; }} .many th:first-child {{ min-width: 7.5rem; }}
thead th {{ background: var(--panel); font-weight: 600; vertical-align: bottom; }}
details {{ margin: 1rem 0; }} summary {{ cursor: pointer; color: var(--link); }}
pre {{ background: var(--panel); padding: .7rem; overflow-x: auto; font-size: .82rem; }}
@media (max-width: 46rem) {{
  table, tbody, tr, td, tbody th {{ display: block; width: 100%; overflow-wrap: anywhere; }}
  thead {{ position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }}
  tr {{ border: 1px solid var(--line); border-radius: 4px; margin: 0 0 .6rem; }}
  tbody th {{ background: var(--panel); }}
  td {{ display: flex; justify-content: space-between; gap: 1rem; }}
  tr > :last-child {{ border-bottom: none; }}
  td::before {{ content: attr(data-head); color: var(--quiet); text-align: left; flex: 0 1 45%; }}
}}
@media print {{
  body {{ max-width: none; }} tr, picture {{ break-inside: avoid; }} h2, h3, h4 {{ break-after: avoid; }}
}}
""".strip()


def _metric(compared: Compared, metric: str, tables: MetricTables) -> str:
    """The part of one metric: differences, curves, values, and who reaches whose best."""
    bands = bands_of(compared, metric, AXES[0])
    panels = "".join(f"<div>{_panel(compared, metric, axis)}</div>" for axis in AXES)
    parts = [f"<h3>{html.escape(tables.values.title)}</h3>"]
    if tables.differences:
        parts.append(_table(tables.differences))
    parts += [_legend(compared, bands), f'<div class="panels">{panels}</div>']
    parts.append(f'<p class="quiet">{html.escape(_note(compared, metric, bands))}.</p>')
    parts += ["<h4>Values</h4>", _table(tables.values)]
    if tables.reached:
        parts += ["<h4>Cost to reach the best value of another arm</h4>", _table(tables.reached)]
    return "\n".join(parts)


def _section(name: str, title: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<section id="{name}" aria-labelledby="h-{name}"><h2 id="h-{name}">{title}</h2>\n{body}\n</section>'
    )


def _evaluations(compared: Compared, tables: Mapping[str, MetricTables]) -> str:
    means = [name for name in tables if name.startswith("eval/")]
    gains = [name for name in tables if name.startswith("eval_gain/")]
    if not means and not gains:
        return '<p class="quiet">No run was evaluated.</p>'
    parts = [
        '<p class="quiet">Images of fixed prompts and seeds, drawn as the model will be used. Methods are '
        "compared by these numbers.</p>"
    ]
    parts += [_metric(compared, name, tables[name]) for name in means]
    if gains:
        inside = "\n".join(_metric(compared, name, tables[name]) for name in gains)
        parts.append(f"<details><summary>Gains since the start of each run</summary>\n{inside}\n</details>")
    return "\n".join(parts)


def write_page(
    path: Path,
    compared: Compared,
    verdict: str,
    tables: Mapping[str, MetricTables],
    others: Sequence[Table],
) -> None:
    """Writes index.html with all figures and tables inside.

    Args:
        verdict: the first sentence of the page.
        tables: metric -> its tables.
        others: further tables.
    """
    names = html.escape(" · ".join(compared.arms))
    count = sum(len(runs) for runs in compared.arms.values())
    opening = [f'<p class="verdict">{html.escape(verdict)}</p>']
    if text := warning(compared):
        opening.append(f'<p class="warning">{html.escape(text)}</p>')
    training = [name for name in tables if name.startswith(SMOOTHED)]
    sections = [
        _section("verdict", "Verdict", opening),
        _section("evaluations", "Evaluations", [_evaluations(compared, tables)]),
    ]
    if training:
        explanation = f"<p>{html.escape(TRAINING_REWARDS)}</p>"
        parts = [_metric(compared, name, tables[name]) for name in training]
        sections.append(_section("training", "Training rewards", [explanation, *parts]))
    for number, table in enumerate(others):
        sections.append(_section(f"table-{number}", html.escape(table.title), [_table(table)]))
    reading = [f"<p>{html.escape(text)}</p>" for text in how_to_read(compared)]
    sections.append(_section("reading", "How to read this", reading))
    commands = html.escape("\n".join(compared.commands))
    block = f'<pre tabindex="0" role="region" aria-label="Lines of commands">{commands}</pre>'
    sections.append(_section("commands", "Commands", [block]))
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{names}</title><style>{STYLE}</style>'
    )
    summary = f"g2rpo compare: {len(compared.arms)} arms, {count} runs."
    header = f'<header><h1>{names}</h1><p class="quiet">{summary}</p></header>'
    body = "\n".join(sections)
    write_atomic(
        path,
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{header}\n<main>\n{body}\n</main>\n'
        "</body></html>\n",
    )
