"""Curves of a run's metrics as figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from g2rpo.runtime.files import atomic_path
from g2rpo.runtime.fonts import families
from g2rpo.runtime.style import LIGHT, make_figure, plain, save_figure, style_axes

SMOOTHING = 0.15
"""Window of the trailing mean of training rewards, as a share of the iterations."""


class PlottedLine(NamedTuple):
    """One line of a panel.

    Attributes:
        x, y: the points; those whose y is not finite are left out.
        error: standard error of each y, shown as a bar; NaN or None: not known.
        window: number of points of a trailing mean, which is drawn over the pale line of the points; 1: none.
    """

    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None
    window: int = 1


def write_curves(path: Path, metrics: Sequence[Mapping[str, Any]]) -> None:
    """Plots the rewards of training and of evaluations over the iterations; without any, writes nothing.

    Training rewards are of other prompts in each iteration, so their trailing mean is drawn over them.

    Args:
        path: the figure, PNG or SVG.
        metrics: lines of metrics.jsonl.
    """
    panels: dict[str, dict[str, PlottedLine]] = {}
    for prefix, label in (("reward/", "training"), ("eval/", "unseen prompts")):
        for name in dict.fromkeys(key for line in metrics for key in line if key.startswith(prefix)):
            lines = [line for line in metrics if line.get(name) is not None]
            reward = name.removeprefix(prefix)
            errors = [line.get(f"eval_se/{reward}") for line in lines]
            panels.setdefault(reward, {})[label] = PlottedLine(
                [float(line["step"]) for line in lines],
                [float(line[name]) for line in lines],
                [float("nan" if error is None else error) for error in errors] if prefix == "eval/" else None,
                max(round(SMOOTHING * len(lines)), 1) if prefix == "reward/" else 1,
            )
    if panels:
        save_curves(panels, path)


def save_curves(
    curves: Mapping[str, Mapping[str, PlottedLine]],
    path: Path,
    *,
    x_label: str = "iteration",
) -> None:
    """Plots one panel per key of `curves` and in it one line per name.

    Args:
        curves: panel -> name -> line.
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
        for name, curve in lines.items():
            colour, stroke = LIGHT.series_style(names.index(name))  # one name, one colour in all panels
            _draw(axes, curve, plain(name), colour, stroke)
        style_axes(axes)
        axes.locator_params(axis="x", nbins=7, integer=True)
        axes.set_title(plain(panel), fontsize=11, color=LIGHT.text, family=families(panel))
        axes.set_xlabel(x_label, fontsize=10)
        if len(names) > 1:
            axes.legend(prop={"family": families("".join(lines)), "size": 9}, labelcolor=LIGHT.text)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        save_figure(figure, temporary, path.suffix[1:])


def _draw(axes: Any, curve: PlottedLine, label: str, colour: str, stroke: Any) -> None:
    values = np.asarray(curve.y, dtype=float)
    kept = np.isfinite(values)
    x, values = np.asarray(curve.x, dtype=float)[kept], values[kept]
    window = min(curve.window, len(values))
    if window > 1:
        axes.plot(x, values, color=colour, linewidth=0.8, alpha=0.3)
        sums = np.cumsum(np.concatenate([[0.0], values]))
        x, values = x[window - 1 :], (sums[window:] - sums[:-window]) / window
        label = f"{label}, mean of {window}"
    axes.plot(x, values, stroke, color=colour, marker=".", markersize=3, label=label)
    if curve.error is not None:
        error = np.asarray(curve.error, dtype=float)[kept]
        axes.errorbar(x, values, error, fmt="none", ecolor=colour, capsize=2, elinewidth=1)
