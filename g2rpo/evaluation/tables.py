"""An evaluation as text: tables as in papers, one row per model and one column per reward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from g2rpo.evaluation.stats import FEW_PROMPTS, Difference, Mean

Key = tuple[int, str, str]  # steps, label, reward


def markdown(means: Mapping[Key, Mean], differences: Mapping[Key, Difference], conditions: str) -> str:
    """Formats an evaluation as Markdown, with one table per number of denoising steps.

    Args:
        means: of every model.
        differences: of every model but the first.
        conditions: how the images were sampled, as text.
    """
    labels = list(dict.fromkeys(label for _, label, _ in means))
    names = list(dict.fromkeys(name for _, _, name in means))
    lines = ["# Evaluation", "", conditions + ".", "", "Mean ± standard error over prompts."]
    if differences:
        lines[-1] += (
            f" In brackets: the paired difference to {labels[0]} (same prompts, same seeds) with its 95 % "
            "bootstrap interval."
        )
    lines += [line for note in notes(means, differences) for line in ("", f"Note: {note}.")]
    for steps in dict.fromkeys(n for n, _, _ in means):
        lines += ["", f"## {steps} steps", "", "| model | " + " | ".join(names) + " |"]
        lines.append("| --- |" + " --- |" * len(names))
        for label in labels:
            cells = [cell(means[steps, label, name], differences.get((steps, label, name))) for name in names]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cell(mean: Mean, difference: Difference | None) -> str:
    """Formats a cell, such as `0.7341 ± 0.0034 (+0.0110 [+0.0061, +0.0158])`."""
    own, change = split(mean, difference)
    return f"{own} ({change})" if change else own


def split(mean: Mean, difference: Difference | None) -> tuple[str, str]:
    """Formats the two parts of a cell: mean and difference; the latter is empty for the first model."""
    own = f"{number(mean.mean)} ± {number(mean.standard_error)}"
    if difference is None:
        return own, ""
    low, high = (number(edge, "+") for edge in (difference.low, difference.high))
    return own, f"{number(difference.mean, '+')} [{low}, {high}]"


def number(value: float, sign: str = "", decimals: int = 4) -> str:
    """Formats a number with so many decimals; NaN and infinities become a dash."""
    return f"{value:{sign}.{decimals}f}" if math.isfinite(value) else "–"


def notes(means: Mapping[Key, Mean], differences: Mapping[Key, Difference]) -> Iterator[str]:
    """Yields warnings about few prompts and missing scores."""
    fewest = min(mean.prompts for mean in (*means.values(), *differences.values()))
    if fewest < FEW_PROMPTS:
        yield f"fewer than {FEW_PROMPTS} prompts: errors are rough, and bootstrap intervals too narrow"
    for (steps, label, name), mean in means.items():
        if mean.invalid:
            yield (
                f"{mean.invalid} images of {label} in {steps} steps have no score by {name} and are excluded "
                f"({mean.prompts} prompts remain)"
            )
