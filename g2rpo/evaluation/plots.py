"""Curves of a run's metrics as figures."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from g2rpo.runtime.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def make_figure(width: float, height: float) -> Figure:
    """A matplotlib figure of that size in inches, drawn by Agg.

    pyplot is not used: it keeps global state and may look for a display. MPLBACKEND, which a notebook or a
    shell may have set to a backend that is not installed here, is hidden while matplotlib is imported.
    """
    inherited = os.environ.pop("MPLBACKEND", None)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    finally:
        if inherited is not None:
            os.environ["MPLBACKEND"] = inherited
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


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
    figure = make_figure(4.2 * columns, 3.0 * rows)
    for i, (panel, lines) in enumerate(curves.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        for name, (x, y) in lines.items():
            values = np.asarray(y, dtype=float)
            kept = np.isfinite(values)
            axes.plot(np.asarray(x, dtype=float)[kept], values[kept], marker=".", markersize=3, label=name)
        axes.set_title(panel, fontsize=10)
        axes.set_xlabel(x_label, fontsize=8)
        axes.grid(alpha=0.3)
        if len(lines) > 1:
            axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120)
