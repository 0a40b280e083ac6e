"""The disk space of a run, and whether it is there before anything is loaded.

    peak    checkpoints that are kept, the best one, the one that is being written, and some headroom
            + the embeddings that the cache lacks, if it is on the same disk

What the run folder already holds counts as used by the run. A run that does not fit is refused with the
settings under which it would fit; an export, which is a command of its own, only causes a note.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from g2rpo.config.settings import Settings
from g2rpo.costs.memory import shape_of_run, trained_params
from g2rpo.models.family import ModelShape
from g2rpo.run.folder import headroom
from g2rpo.runtime.files import DiskFull, nearest_folder
from g2rpo.runtime.processes import gathered, rank

GB = 1e9


def disk_of(settings: Settings, shape: ModelShape, trained: int, num_texts: int) -> dict[str, int]:
    """Part of the run -> bytes on the disk, at its peak.

    Args:
        trained: number of trained parameters.
        num_texts: number of prompts to embed.
    """
    checkpoint, kept = checkpoint_bytes(settings, trained), checkpoints_kept(settings)
    return {
        "one checkpoint": checkpoint,
        f"checkpoints ({kept} kept, 1 being written)": (kept + 1) * checkpoint,
        f"embeddings of {num_texts:,} prompts": num_texts * embedding_bytes(settings, shape),
        "export": 4 * trained,
    }


def checkpoint_bytes(settings: Settings, trained: int) -> int:
    """Bytes of one checkpoint: weights, two moments, and copies of the weights."""
    master = 8 if settings.precision == "float64" else 4
    moments = 2 * master  # moments in 8 bits are counted in full, too
    copies = bool(settings.ema_decay) + (settings.make_algorithm().objective().lag is not None)
    return trained * (master + moments + master * copies)


def checkpoints_kept(settings: Settings) -> int:
    """Number of checkpoints that remain when another one is written, the best one included."""
    evaluated = settings.eval_every if settings.keep_best is not None else 0  # each may be the best so far
    written = settings.iterations // math.gcd(settings.checkpoint_every, evaluated)
    kept = min(settings.keep_last, max(written, 1))
    if settings.keep_every:
        kept += settings.iterations // settings.keep_every
    return kept + (settings.keep_best is not None)


def embedding_bytes(settings: Settings, shape: ModelShape) -> int:
    """Bytes of one prompt's embeddings in the cache."""
    return shape.embedding_numbers * (2 if settings.precision == "bfloat16" else 4)


def disk_problem(settings: Settings, missing_texts: int = 0) -> str:
    """The error message for a run that does not fit on its disks, or "".

    Args:
        settings: settings of the run, with the folders `out` and `cache`.
        missing_texts: number of prompts that the embedding cache lacks.

    Raises:
        ValueError: an unknown model, or settings that do not fit it.
    """
    shape = shape_of_run(settings)
    trained = trained_params(settings, shape)
    out, cache = Path(settings.out).expanduser(), Path(settings.cache).expanduser()
    embeddings = missing_texts * embedding_bytes(settings, shape)
    same_disk = _device(out) == _device(cache)
    if not same_disk and (missing := embeddings - _free(cache)) > 0:
        return (
            f"the embeddings of {missing_texts:,} prompts need {size_text(embeddings)} and "
            f"{nearest_folder(cache)} has {size_text(_free(cache))} free; free {size_text(missing)} there, "
            "or give cache=FOLDER on another disk"
        )
    beside = embeddings if same_disk else 0
    needed, free = _needed(settings, trained, out) + beside, _free(out)
    if needed <= free:
        return ""
    checkpoint, kept = checkpoint_bytes(settings, trained), checkpoints_kept(settings)
    parts = f"{kept} checkpoints kept and 1 being written take {size_text((kept + 1) * checkpoint)}"
    if stored := _stored(out):
        parts += f", of which {size_text(stored)} exist already"
    if beside:
        parts += f", and the embeddings of {missing_texts:,} prompts {size_text(beside)}"
    ways = [f"free {size_text(needed - free)}", "give out=FOLDER on another disk"]
    if beside and needed - beside <= free <= _free(cache) + needed:
        ways.append("give cache=FOLDER on another disk")
    for changes in _smaller(settings):
        changed = settings.model_copy(update=changes)
        if (smaller := _needed(changed, trained, out) + beside) <= free:
            words = " ".join(f"{key}={value}" for key, value in changes.items())
            ways.insert(0, f"keep fewer checkpoints: {words} (then {size_text(smaller)} are needed)")
            break
    return (
        f"a checkpoint needs {checkpoint / GB:.2f} GB and {nearest_folder(out)} has {free / GB:.2f} GB free, "
        f"but the run needs {size_text(needed)} more at its peak: {parts}; " + ", or ".join(ways)
    )


def check_disk(settings: Settings, missing_texts: int = 0, *, needed: bool = True) -> None:
    """Raises DiskFull on all processes if the run does not fit on its disks; see `disk_problem`.

    Args:
        needed: False: the run writes no more checkpoints, or their size is not known; nothing is checked.
    """
    problem = disk_problem(settings, missing_texts) if needed and rank() == 0 else ""
    if problem := gathered(problem)[0]:
        raise DiskFull(f"{problem}. Nothing was loaded, and no file was changed")


def export_note(settings: Settings) -> str:
    """A note for a run that fits, but whose export would not fit beside it; else ""."""
    trained, out = trained_params(settings, shape_of_run(settings)), Path(settings.out).expanduser()
    needed, free = _needed(settings, trained, out), _free(out)
    if needed + 4 * trained <= free:
        return ""
    return (
        f"{nearest_folder(out)} has {size_text(free)} free: enough for this run, but not for its export of "
        f"{size_text(4 * trained)}; give g2rpo export another disk with --out FOLDER"
    )


def _needed(settings: Settings, trained: int, out: Path) -> int:
    """Bytes that must be free for all further checkpoints of the run."""
    checkpoint = checkpoint_bytes(settings, trained)
    peak = (checkpoints_kept(settings) + 1) * checkpoint
    # With fewer to keep than there are, old ones go only after the next one is written.
    return max(peak - _stored(out), checkpoint) + headroom(checkpoint)


def _smaller(settings: Settings) -> Iterator[dict[str, Any]]:
    """Changes that keep fewer checkpoints, the least one first; they change no number of the run."""
    last: dict[str, Any] = {"keep_last": 1} if settings.keep_last > 1 else {}
    every: dict[str, Any] = {"keep_every": 0} if settings.keep_every else {}
    for changes in (last, every, last | every):
        if changes:
            yield changes


def _stored(out: Path) -> int:
    """Bytes of the checkpoints in a run folder that the run counts among its own."""
    checkpoints = out / "checkpoints"
    return sum(
        file.stat().st_size
        for folder in (checkpoints.glob("step_*") if checkpoints.is_dir() else ())
        if folder.is_dir()
        for file in folder.iterdir()
    )


def _free(path: Path) -> int:
    return shutil.disk_usage(nearest_folder(path)).free


def _device(path: Path) -> int:
    return os.stat(nearest_folder(path)).st_dev


def size_text(num_bytes: float) -> str:
    """A size for the user, in MB or GB."""
    return f"{num_bytes / GB:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.2f} MB"
