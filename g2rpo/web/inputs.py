"""Checks of what a visitor enters; a client that is not our page may send anything."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from g2rpo.data.prompts import SUFFIXES, checked_text, read_prompts
from g2rpo.runtime.text import shortened
from g2rpo.web.context import Limits


def checked_prompt(text: Any) -> str:
    """Returns a prompt without surrounding white space.

    Raises:
        ValueError: it is empty, longer than prompts may be, or has damaged characters.
    """
    return checked_text("" if text is None else text, "Prompt")


def checked_number(value: Any, name: str, low: float, high: float) -> float:
    """Returns a number between two limits.

    Args:
        value: what was entered.
        name: name of the input, for the message.
        low, high: smallest and largest value.

    Raises:
        ValueError: it is missing, not a number, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}: enter a number from {low:.12g} to {high:.12g}")
    if not low <= value <= high:
        raise ValueError(
            f"{name}: {value:.12g} is out of range; enter a number from {low:.12g} to {high:.12g}"
        )
    return float(value)


def checked_count(value: Any, name: str, low: int, high: int) -> int:
    """Returns a whole number between two limits; as `checked_number`."""
    number = checked_number(value, name, low, high)
    if number != int(number):
        raise ValueError(f"{name}: {value:.12g} is not a whole number")
    return int(number)


def prompt_list(text: Any, file: str | Path | None, limits: Limits) -> list[str]:
    """Returns the prompts of a text box, one per line, and of an uploaded file; each text once.

    Args:
        text: content of the text box.
        file: a prompt file as in `data.prompts`, with one of its suffixes; None: none was uploaded.
        limits: the largest number of prompts.

    Raises:
        ValueError: a prompt is too long or damaged, the file cannot be read, or there are no prompts or too
            many.
    """
    lines = (text or "").splitlines()
    prompts = [checked_text(line, f"Line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if file is not None:
        path = Path(file)
        if path.suffix.lower() not in SUFFIXES:
            raise ValueError(f"{shortened(path.name)}: give a file of prompts, one of {', '.join(SUFFIXES)}")
        try:
            prompts += [prompt.text for prompt in read_prompts(path)[0]]
        except ValueError as error:  # the visitor knows the name, not the folder of the upload
            raise ValueError(str(error).replace(str(path), path.name)) from error
    prompts = list(dict.fromkeys(prompts))
    if not prompts:
        raise ValueError("No prompts: enter at least one, one per line, or upload a file")
    if len(prompts) > limits.vote_prompts:
        raise ValueError(f"{len(prompts)} prompts; at most {limits.vote_prompts} are possible at once")
    return prompts
