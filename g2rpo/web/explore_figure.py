"""An explored group as one figure for documents: anchor path, sorted branches, what the update favours."""

from __future__ import annotations

import io
import math
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from g2rpo.inference.images import from_pil, save_png
from g2rpo.report.charts import number
from g2rpo.runtime.style import LIGHT, make_figure, save_figure
from g2rpo.web.explore_data import Cell, ExploredGroup
from g2rpo.web.explore_html import summary, two_decimals

CELL_INCHES = 1.15
RAISED, LOWERED = LIGHT.series[0], LIGHT.series[1]


def write_figure(group: ExploredGroup, path: Path) -> Path:
    """Writes the figure of a group as PNG, whose text fields carry the prompt and the settings."""
    buffer = io.BytesIO()
    save_figure(draw(group), buffer, "png")
    with Image.open(buffer) as image:
        save_png(from_pil(image), path, group.request.prompt, asdict(group.request))
    return path


def draw(group: ExploredGroup) -> Any:
    """Draws the figure of a group: a matplotlib Figure, light."""
    request = group.request
    columns = max(request.num_steps + 1, request.group_size, 6)
    ratios = [1.0, 1.0]
    for cell in group.cells:
        ratios += [0.75, *(1.0 for _ in cell.granularities), 1.0]
    figure = make_figure(
        1.2 + CELL_INCHES * columns, 0.9 + sum(CELL_INCHES * 1.28 * ratio for ratio in ratios)
    )
    grid = figure.add_gridspec(len(ratios), columns, height_ratios=ratios)
    prompt = textwrap.shorten(request.prompt, 160, placeholder=" …")
    figure.suptitle(
        "\n".join([*textwrap.wrap(prompt, 14 * columns), *textwrap.wrap(summary(request), 16 * columns)]),
        color=LIGHT.text,
        fontsize=10,
    )
    noisy = {k for cell in group.cells for k in cell.noise_steps}
    for row, (name, images) in enumerate(
        (("state", group.anchor.states), ("prediction", group.anchor.predictions))
    ):
        for i, sigma in enumerate(request.sigmas.tolist()):
            axes = _show(figure.add_subplot(grid[row, i]), images[i], framed=row == 0 and i in noisy)
            if row == 0:
                name_of_state = "image" if i == request.num_steps else f"k = {i}"
                axes.set_title(f"{name_of_state}, σ {sigma:.2f}", fontsize=8, color=LIGHT.text)
            if i == 0:
                _label(axes, f"anchor:\n{name}")
    row = 2
    for cell in group.cells:
        row = _draw_cell(figure, grid, row, columns, group, cell)
    return figure


def _draw_cell(figure: Any, grid: Any, row: int, columns: int, group: ExploredGroup, cell: Cell) -> int:
    """Draws the rows of one cell from `row` on; returns the row after them."""
    request = group.request
    order = cell.order
    advantages = cell.advantages[order].tolist()
    bars = figure.add_subplot(grid[row, : len(order)])
    bars.bar(range(len(order)), advantages, 0.6, color=[RAISED if a > 0 else LOWERED for a in advantages])
    bars.axhline(0, color=LIGHT.quiet, linewidth=0.8)
    bars.set_xlim(-0.5, len(order) - 0.5)
    reach = 1.6 * max((abs(a) for a in advantages), default=1.0) or 1.0
    bars.set_ylim(-reach, reach)
    for n, advantage in enumerate(advantages):
        bars.annotate(
            f"{'▲' if advantage > 0 else '▼' if advantage < 0 else '='} {two_decimals(advantage)}",
            (n, advantage),
            (0, 3 if advantage >= 0 else -3),
            textcoords="offset points",
            ha="center",
            va="bottom" if advantage >= 0 else "top",
            fontsize=8,
            color=LIGHT.text,
        )
    bars.set_xticks([])
    bars.set_yticks([])
    bars.spines[["top", "right", "bottom", "left"]].set_visible(False)
    bars.set_ylabel(
        "advantage,\nall steps" if request.sampling == "path" else f"advantage,\nk = {cell.noise_steps[0]}",
        fontsize=8,
        color=LIGHT.text,
        rotation=0,
        ha="right",
        va="center",
    )
    for j, stride in enumerate(cell.granularities):
        row += 1
        for column, member in enumerate(order):
            axes = _show(figure.add_subplot(grid[row, column]), cell.images[j, member])
            scores = ", ".join(_number(float(score)) for score in cell.rewards[:, j, member])
            axes.set_xlabel(scores, fontsize=8, color=LIGHT.text, labelpad=2)
            if column == 0:
                name = "image" if request.sampling == "path" else f"granularity {stride}"
                _label(axes, f"{name},\n{', '.join(request.rewards)}")
    row += 1
    for column, (image, caption) in enumerate(_favoured(cell)[:columns]):
        axes = _show(figure.add_subplot(grid[row, column]), image)
        axes.set_xlabel(caption, fontsize=7.5, color=LIGHT.text, labelpad=2)
        if column == 0:
            _label(axes, "the update\nfavours")
    return row + 1


def _favoured(cell: Cell) -> list[tuple[Tensor, str]]:
    """Images and captions of the row about the update."""
    shown: list[tuple[Tensor, str]] = []
    favoured, other = cell.mean_image(True), cell.mean_image(False)
    if favoured is not None and other is not None:
        gap = favoured - other
        shown = [
            (_bytes(favoured), "▲ favoured"),
            (_bytes(other), "▼ disfavoured"),
            (_bytes(0.5 + 0.5 * gap / (float(gap.abs().max()) or 1.0)), "difference"),
        ]
    if cell.push is not None:
        captions = ("▼ against", "mean of step", "▲ along")
        for n, caption in enumerate(captions):
            scores = ", ".join(_number(float(score)) for score in cell.push.rewards[:, n])
            shown.append((cell.push.images[n], f"{caption}\n{scores}"))
    return shown


def _show(axes: Any, pixels: Tensor, framed: bool = False) -> Any:
    axes.imshow(pixels.permute(1, 2, 0).numpy(), interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(framed)
        spine.set_color(LOWERED)
        spine.set_linewidth(2.5)
    return axes


def _label(axes: Any, text: str) -> None:
    axes.set_ylabel(text, rotation=0, ha="right", va="center", fontsize=8, color=LIGHT.text)


def _bytes(image: Tensor) -> Tensor:
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)


def _number(value: float) -> str:
    return number(value) if math.isfinite(value) else "no score"
