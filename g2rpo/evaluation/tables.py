"""An evaluation as text: tables like those of papers, a row a model, a column a reward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from g2rpo.evaluation.stats import FEW_PROMPTS, Difference, Mean

Key = tuple[int, str, str]  # steps, label, reward


def markdown(means: Mapping[Key, Mean], differences: Mapping[Key, Difference], about: str) -> str:
    """One table a number of steps.

    Args:
        differences: of the models but the first. about: how the pictures were drawn.
    """
    labels = list(dict.fromkeys(label for _, label, _ in means))
    names = list(dict.fromkeys(name for _, _, name in means))
    lines = ["# Evaluation", "", about + ".", "", "Mean ± standard error over prompts."]
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
    """`0.7341 ± 0.0034 (+0.0110 [+0.0061, +0.0158])`."""
    own, change = split(mean, difference)
    return f"{own} ({change})" if change else own


def split(mean: Mean, difference: Difference | None) -> tuple[str, str]:
    """The two parts of a cell; the second is empty for the first model."""
    own = f"{number(mean.mean)} ± {number(mean.standard_error)}"
    if difference is None:
        return own, ""
    low, high = (number(edge, "+") for edge in (difference.low, difference.high))
    return own, f"{number(difference.mean, '+')} [{low}, {high}]"


def number(value: float, sign: str = "") -> str:
    """Four decimals, a dash for what is no number."""
    return f"{value:{sign}.4f}" if math.isfinite(value) else "–"


def notes(means: Mapping[Key, Mean], differences: Mapping[Key, Difference]) -> Iterator[str]:
    """What a reader of the numbers must know besides."""
    fewest = min(one.prompts for one in (*means.values(), *differences.values()))
    if fewest < FEW_PROMPTS:
        yield f"fewer than {FEW_PROMPTS} prompts: errors are rough, and bootstrap intervals too narrow"
    for (steps, label, name), one in means.items():
        if one.invalid:
            yield (
                f"{one.invalid} pictures of {label} in {steps} steps have no score by {name}, and are left "
                f"out ({one.prompts} prompts remain)"
            )
