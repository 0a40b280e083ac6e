"""Curves of a run's metrics as figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from g2rpo.runtime.files import atomic_path
from g2rpo.runtime.fonts import families
from g2rpo.runtime.style import LIGHT, make_figure, plain, save_figure, style_axes


def write_curves(path: Path, metrics: Sequence[Mapping[str, Any]]) -> None:
    """Plots the rewards of training and of evaluations over the iterations; without any, writes nothing.

    Args:
        path: the figure, PNG or SVG.
        metrics: lines of metrics.jsonl.
    """
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for prefix, label in (("reward/", "training"), ("eval/", "unseen prompts")):
        for name in dict.fromkeys(key for line in metrics for key in line if key.startswith(prefix)):
            points = [(line["step"], line[name]) for line in metrics if line.get(name) is not None]
            panel = panels.setdefault(name.removeprefix(prefix), {})
            panel[label] = ([float(x) for x, _ in points], [float(y) for _, y in points])
    if panels:
        save_curves(panels, path)


def save_curves(
    curves: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    path: Path,
    *,
    x_label: str = "iteration",
) -> None:
    """Plots one panel per key of `curves` and in it one line per name.

    Args:
        curves: {panel: {line: (x, y)}}; points whose y is not finite are left out of the line.
        path: the figure; its suffix decides between PNG and SVG.

    Raises:
        ValueError: no panels.
    """
    if not curves:
        raise ValueError("no curves to draw; give at least one panel")
    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    names = list(dict.fromkeys(name for lines in curves.values() for name in lines))
    figure = make_figure(4.2 * columns, 3.0 * rows)
    for i, (panel, lines) in enumerate(curves.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        for name, (x, y) in lines.items():
            colour, stroke = LIGHT.series_style(names.index(name))  # one name, one colour in all panels
            values = np.asarray(y, dtype=float)
            kept = np.isfinite(values)
            axes.plot(
                np.asarray(x, dtype=float)[kept],
                values[kept],
                stroke,
                color=colour,
                marker=".",
                markersize=3,
                label=plain(name),
            )
        style_axes(axes)
        axes.locator_params(axis="x", nbins=7, integer=True)
        axes.set_title(plain(panel), fontsize=11, color=LIGHT.text, family=families(panel))
        axes.set_xlabel(x_label, fontsize=10)
        if len(names) > 1:
            axes.legend(prop={"family": families("".join(lines)), "size": 9}, labelcolor=LIGHT.text)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        save_figure(figure, temporary, path.suffix[1:])
