"""The checkpoints of a run folder: which are whole, and which of them RUN/latest and RUN/best name.

    RUN/latest   "step_000050"            RUN/best   "step_000034 verifier": it, and who judged it best

Both are files of one line, replaced in one step.
"""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from g2rpo.runtime.files import sync_folder, write_synced
from g2rpo.runtime.processes import rank

LOG = logging.getLogger(__name__)

LATEST, BEST = "latest", "best"
STEP = re.compile(r"step_(\d{6,})")
"""The name of a checkpoint's folder."""

ASIDE = ".old.tmp"
"""Ends the name of a checkpoint that is about to be replaced or removed."""

INDEX = "tensors.json"
"""Where a checkpoint's tensors are in its files."""

PICKLED_INDEX = ".metadata"
"""The same in checkpoints of earlier versions."""

FILES = "files"
"""Key of state.json: the sizes of the files beside it."""


def step_name(iteration: int) -> str:
    """Of the checkpoint after so many iterations."""
    return f"step_{iteration:06d}"


def write_pointer(pointer: Path, name: str, judge: str = "") -> None:
    """Lets RUN/latest or RUN/best name a checkpoint."""
    unfinished = pointer.with_name(f"{pointer.name}.tmp")
    write_synced(unfinished, f"{name} {judge}".strip() + "\n")
    os.replace(unfinished, pointer)
    sync_folder(pointer.parent)


def read_pointer(pointer: Path) -> str:
    """The checkpoint that RUN/latest or RUN/best names; empty where it is missing or names none."""
    text = pointer.read_text(encoding="utf-8", errors="replace") if pointer.is_file() else ""
    name = text.strip().partition(" ")[0]
    return name if STEP.fullmatch(name) else ""


def read_best(out: str | Path) -> tuple[str, str]:
    """The checkpoint's name and the judge in RUN/best; two empty ones where there is none, or rubbish."""
    pointer = Path(out) / BEST
    if not (name := read_pointer(pointer)):
        return "", ""
    return name, pointer.read_text(encoding="utf-8", errors="replace").strip().partition(" ")[2]


def latest_checkpoint(out: str | Path) -> Path | None:
    """The newest whole checkpoint of a run folder, or None where the run has not saved one yet.

    That is the one that `latest` names. Where `latest` is missing, empty, or names a checkpoint that is
    missing or damaged, it is the newest of those that are whole, and a warning in the log says so.

    Raises:
        ValueError: there are checkpoints, or `latest` says so, but none is whole.
    """
    latest, checkpoints = Path(out) / LATEST, Path(out) / "checkpoints"
    name = read_pointer(latest)
    problem = damage(checkpoints / name) if name else "no checkpoint"
    if name and not problem:
        return checkpoints / name
    saved = _saved(checkpoints)
    if not saved and not latest.exists():
        return None
    why = f"{latest} names {name or 'none'} ({problem})" if latest.exists() else f"{latest} is missing"
    problems = []
    for path in reversed(saved):
        if not (found := damage(path)):
            _warn_once(f"{why}; using the newest whole checkpoint, {path.name}")
            return path
        problems.append(f"{path.name}: {found}")
    raise ValueError(
        f"{why}, and there is no whole checkpoint in {checkpoints}"
        + "".join(f"\n  {each}" for each in problems)
        + "\nNothing was changed. Restore the files from a copy, or start a new run in another out=FOLDER."
    )


def repair_latest(out: str | Path, checkpoint: Path) -> None:
    """Lets `latest` name the checkpoint from which a run goes on. The first process writes."""
    latest = Path(out) / LATEST
    if rank() == 0 and STEP.fullmatch(checkpoint.name) and read_pointer(latest) != checkpoint.name:
        write_pointer(latest, checkpoint.name)


def damage(path: Path) -> str:
    """What is wrong with a checkpoint's files, in words; empty for a whole one. Reads sizes, not contents."""
    if not STEP.fullmatch(path.name.removesuffix(ASIDE)) or not path.is_dir():
        return "no such checkpoint"
    try:
        sizes = read_state(path).get(FILES, {})
    except ValueError as error:
        return str(error)
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if (there := file.stat().st_size) != size:
            return f"{name} has {there} of its {size} bytes"
    return (
        ""
        if any((path / index).is_file() for index in (INDEX, PICKLED_INDEX))
        else "the index of its tensors is missing"
    )


def read_state(path: str | Path) -> dict[str, Any]:
    """The plain part of a checkpoint: `iteration` and everything saved that was no tensor.

    Raises:
        ValueError: not a checkpoint.
    """
    file = Path(path) / "state.json"
    if not file.is_file():
        raise ValueError(f"{path} is not a checkpoint: it holds no state.json")
    try:
        state: Any = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(state, dict) or not isinstance(state.get("iteration"), int):
        raise ValueError(f"{file} is damaged: it does not say after which iteration it was written")
    return state


def named_checkpoints(checkpoints: Path) -> list[tuple[int, Path]]:
    """Checkpoints, oldest first: a name without .tmp was given when all was written."""
    found = [(STEP.fullmatch(path.name), path) for path in checkpoints.glob("step_*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def _saved(checkpoints: Path) -> list[Path]:
    """Checkpoints, oldest first, with those that a killed run had set aside and not replaced."""
    found = {path.name: (step, path) for step, path in named_checkpoints(checkpoints)}
    for path in checkpoints.glob(f"step_*{ASIDE}"):
        if match := STEP.fullmatch(path.name.removesuffix(ASIDE)):
            found.setdefault(match[0], (int(match[1]), path))
    return [path for _, path in sorted(found.values())]


def aside_path(path: Path) -> Path:
    """The name of a checkpoint that is about to be replaced or removed."""
    return path.with_name(path.name + ASIDE)


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    """Several parts of a command ask for the newest checkpoint; the user needs to read this once."""
    if rank() == 0 and message not in _warned:
        _warned.add(message)
        LOG.warning("%s", message)
