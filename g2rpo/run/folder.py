"""The checkpoints of a run folder: which are intact, and which of them RUN/latest and RUN/best name.

    RUN/latest   "step_000050"            RUN/best   "step_000034 verifier": checkpoint and selecting reward

Both are pointer files of one line and are replaced atomically. An intact checkpoint has all of its files,
each with the size that was recorded when it was written.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from g2rpo.runtime.files import write_atomic
from g2rpo.runtime.processes import rank

LOG = logging.getLogger(__name__)

LATEST, BEST = "latest", "best"
STEP = re.compile(r"step_(\d{6,})")
"""Pattern of the name of a checkpoint's folder; the group is the iteration."""

ASIDE = ".old.tmp"
"""Suffix of a checkpoint that is about to be replaced or removed."""

INDEX = "tensors.json"
"""File of a checkpoint that lists the position of each tensor."""

PICKLED_INDEX = ".metadata"
"""The index of checkpoints of earlier versions."""

FILES = "files"
"""Key of state.json: file name -> size in bytes, for the other files of the checkpoint."""


def step_name(iteration: int) -> str:
    """Folder name of the checkpoint after `iteration` iterations, such as step_000050."""
    return f"step_{iteration:06d}"


def write_pointer(pointer: Path, name: str, reward: str = "") -> None:
    """Makes RUN/latest or RUN/best name a checkpoint; for RUN/best with the reward that selected it."""
    write_atomic(pointer, f"{name} {reward}".strip() + "\n")


def read_pointer(pointer: Path) -> str:
    """Name of the checkpoint in RUN/latest or RUN/best; "" if the file is missing or names none."""
    text = pointer.read_text(encoding="utf-8", errors="replace") if pointer.is_file() else ""
    name = text.strip().partition(" ")[0]
    return name if STEP.fullmatch(name) else ""


def read_best(out: str | Path) -> tuple[str, str]:
    """Names of the checkpoint and the reward in RUN/best; ("", "") if it is missing or names none."""
    pointer = Path(out) / BEST
    if not (name := read_pointer(pointer)):
        return "", ""
    return name, pointer.read_text(encoding="utf-8", errors="replace").strip().partition(" ")[2]


def latest_checkpoint(out: str | Path) -> Path | None:
    """The newest intact checkpoint of a run folder, or None if the run has not saved one yet.

    This is the checkpoint that `latest` names. If `latest` is missing or empty, or names a checkpoint that is
    missing or damaged, it is the newest intact one, and a warning in the log says so.

    Raises:
        ValueError: `latest` or checkpoints exist, but no checkpoint is intact.
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
        if not (problem := damage(path)):
            _warn_once(f"{why}; using the newest intact checkpoint, {path.name}")
            return path
        problems.append(f"{path.name}: {problem}")
    raise ValueError(
        f"{why}, and there is no intact checkpoint in {checkpoints}"
        + "".join(f"\n  {problem}" for problem in problems)
        + "\nNothing was changed. Restore the files from a copy, or start a new run in another out=FOLDER."
    )


def repair_latest(out: str | Path, checkpoint: Path) -> None:
    """Makes `latest` name the checkpoint from which a run is resumed. The first process writes."""
    latest = Path(out) / LATEST
    if rank() == 0 and STEP.fullmatch(checkpoint.name) and read_pointer(latest) != checkpoint.name:
        write_pointer(latest, checkpoint.name)


def damage(path: Path) -> str:
    """Description of what is wrong with a checkpoint's files; "" if it is intact.

    Compares sizes, not contents.
    """
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
        if (actual := file.stat().st_size) != size:
            return f"{name} has {actual} of its {size} bytes"
    return (
        ""
        if any((path / index).is_file() for index in (INDEX, PICKLED_INDEX))
        else "the index of its tensors is missing"
    )


def read_state(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint's state.json: `iteration` and all saved values that are not tensors.

    Raises:
        ValueError: not a checkpoint, or a damaged state.json.
    """
    file = Path(path) / "state.json"
    if not file.is_file():
        raise ValueError(f"{path} is not a checkpoint: it contains no state.json")
    try:
        state: Any = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(state, dict) or not isinstance(state.get("iteration"), int):
        raise ValueError(f"{file} is damaged: it does not say after which iteration it was written")
    return state


def named_checkpoints(checkpoints: Path) -> list[tuple[int, Path]]:
    """(iteration, path) of the checkpoints with a final name, oldest first; that name is given last."""
    matches = [(STEP.fullmatch(path.name), path) for path in checkpoints.glob("step_*")]
    return sorted((int(match[1]), path) for match, path in matches if match)


def _saved(checkpoints: Path) -> list[Path]:
    """Checkpoints, oldest first, including those that a killed run set aside and did not replace."""
    by_name = {path.name: (step, path) for step, path in named_checkpoints(checkpoints)}
    for path in checkpoints.glob(f"step_*{ASIDE}"):
        if match := STEP.fullmatch(path.name.removesuffix(ASIDE)):
            by_name.setdefault(match[0], (int(match[1]), path))
    return [path for _, path in sorted(by_name.values())]


def aside_path(path: Path) -> Path:
    """The path to which a checkpoint is renamed before it is replaced or removed."""
    return path.with_name(path.name + ASIDE)


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    """Logs a warning once per process: several parts of a command look up the newest checkpoint."""
    if rank() == 0 and message not in _warned:
        _warned.add(message)
        LOG.warning("%s", message)
