"""Which checkpoint RUN/latest and RUN/best name: files of one line, replaced in one step.

RUN/latest   "step_000050"                RUN/best   "step_000034 verifier": it, and who judged it best
"""

from __future__ import annotations

import os
import re
from pathlib import Path

LATEST, BEST = "latest", "best"
STEP = re.compile(r"step_(\d{6,})")
"""The name of a checkpoint's folder."""


def step_name(iteration: int) -> str:
    """Of the checkpoint after so many iterations."""
    return f"step_{iteration:06d}"


def point(pointer: Path, name: str, judge: str = "") -> None:
    """Lets RUN/latest or RUN/best name a checkpoint."""
    unfinished = pointer.with_name(f"{pointer.name}.tmp")
    write_synced(unfinished, f"{name} {judge}".strip() + "\n")
    os.replace(unfinished, pointer)
    sync_folder(pointer.parent)


def read_best(out: str | Path) -> tuple[str, str]:
    """The checkpoint's name and the judge in RUN/best; two empty ones where there is none, or rubbish."""
    pointer = Path(out) / BEST
    text = pointer.read_text(encoding="utf-8", errors="replace") if pointer.is_file() else ""
    name, _, judge = text.strip().partition(" ")
    return (name, judge) if STEP.fullmatch(name) else ("", "")


def write_synced(path: Path, text: str) -> None:
    """Writes a file that is on the disk when this returns."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """New names in it are on the disk when this returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
