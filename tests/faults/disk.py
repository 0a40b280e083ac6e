"""A disk that is full from one write on, of each kind that a command does.

The disk is a tmpfs that shrinks to its content (where this process may mount one), or a folder below which
writes fail (disk_full.c); the cases alternate between both where both exist.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.jobs import Case, Job, Result
from faults.outcomes import (
    HANG,
    LOST,
    MESSAGE,
    NOT_REACHED,
    OK,
    SILENT,
    TRACEBACK,
    Expected,
    Outcome,
    refusal,
)
from faults.runs import ITERATIONS, Cases, World, difference, fingerprint, prepare, run_words, tree_hash
from faults.tracing import Trigger, fill_by_shim, fill_tmpfs

ROOMY, SMALL = 256 * 2**20, 16 * 2**20
# Kind of write -> when the disk is full: a file by its path, or a function that writes.
WRITES: dict[str, dict[str, Any]] = {
    "settings": {"path": r"run/\S*config\.toml"},
    "embeddings": {"function": ("data/embeddings.py", "_write")},
    "first images": {"path": r"comparison/before_\S*png"},
    "sample grid": {"path": r"samples/\S*png"},
    "metrics": {"function": ("run/metrics.py", "write")},
    "TensorBoard": {"path": r"events\.out"},
    "tensors": {"path": r"checkpoints/\S*distcp"},
    "index": {"path": r"checkpoints/\S*tensors\.json"},
    "state": {"path": r"checkpoints/\S*state\.json"},
    "latest": {"path": r"run/\S*latest"},
    "best": {"path": r"run/\S*best"},
    "evaluation": {"path": r"evaluations/\S*json"},
    "curve": {"path": r"run/\S*curve\.png"},
    "last images": {"path": r"comparison/after_\S*png"},
    "export": {"function": ("exporters/export.py", "export_policy")},
    "sample": {"path": r"images/\S*png"},
}
SMALL_DISK = "16 MB from the start"
KINDS = (*WRITES, SMALL_DISK)


def disk_cases(world: World, count: int) -> Cases:
    """Each kind of write in turn, on each kind of disk that this machine offers."""
    disks = available(world.folder)
    if not disks:
        raise SystemExit("no tmpfs can be mounted and there is no C compiler: the disk cannot be filled")
    for number in range(count):
        kind, disk = KINDS[number % len(KINDS)], disks[number // len(KINDS) % len(disks)]
        yield f"disk:{number}", _of(world, f"disk:{number}", kind, disk)


def available(folder: Path) -> list[str]:
    """Returns the kinds of disk that can be filled here."""
    disks = []
    mounted = folder / "trial"
    mounted.mkdir()
    if mount(mounted, SMALL):
        unmount(mounted)
        disks.append("tmpfs")
    mounted.rmdir()
    return disks + (["shim"] if os.environ.get("FAULTS_SHIM") else [])


def mount(folder: Path, size: int, again: bool = False) -> bool:
    """Mounts a tmpfs, or changes its size; returns whether that is possible."""
    options = f"remount,size={size}" if again else f"size={size}"
    if shutil.which("mount") is None:
        return False
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _of(world: World, name: str, kind: str, disk: str) -> Callable[[Path], Case]:
    return lambda folder: _full(folder, world, name, kind, disk)


def _full(folder: Path, world: World, name: str, kind: str, disk: str) -> Case:
    place = folder / "disk"
    place.mkdir()
    if disk == "tmpfs" and not mount(place, ROOMY):
        return Outcome(name, kind, NOT_REACHED, "the tmpfs cannot be mounted")
    try:
        prepare(place)
        work = {"export": _full_command, "sample": _full_command, SMALL_DISK: _small}.get(kind, _full_run)
        verdict, detail = yield from work(place, world, name, kind, disk)
    finally:
        if disk == "tmpfs":
            unmount(place)
    return Outcome(name, f"{kind} ({disk})", verdict, detail)


def _filler(place: Path, disk: str) -> Any:
    return fill_tmpfs(str(place)) if disk == "tmpfs" else fill_by_shim(str(place))


def _trigger(world: World, name: str, kind: str) -> Trigger:
    draw, write = world.random(name), WRITES[kind]
    left = draw.choice([0, 0, draw.randrange(4096), 8192])
    if "function" in write:
        return Trigger(
            f"disk:{left}", calls=draw.randint(1, 3) if kind == "metrics" else 1, function=write["function"]
        )
    return Trigger(f"disk:{left}", files=draw.randint(1, 2), path=write["path"])


def _full_run(place: Path, world: World, name: str, kind: str, disk: str) -> Any:
    trigger = _trigger(world, name, kind)
    full: Result = yield Job(run_words(), place, trigger=trigger, disk=_filler(place, disk))
    where = (
        f"full at {full.trace.get('fired') or 'no moment'} but for {trigger.action.partition(':')[2]} bytes"
    )
    if full.timed_out:
        return HANG, where
    if full.traceback:
        return TRACEBACK, f"{where}: {full.traceback}"
    if not full.trace.get("fired"):
        return NOT_REACHED, f"exit code {full.code}: {full.text[-300:]}"
    if disk == "tmpfs":
        mount(place, ROOMY, again=True)
    if full.code == 0:  # the rest fitted, or the write did not matter
        unequal = difference(world.references[1], fingerprint(place / "run"))
        return (SILENT, f"{where}: exit code 0, and {unequal}") if unequal else (OK, where)
    expected = Expected(
        file=r"disk/\S+|run/\S+|cache/\S+", found="space|full|free", allowed=r"\d+(\.\d+)? ?([kMG]i?B|bytes)"
    )
    verdict, detail = refusal(full, expected)
    if verdict == MESSAGE and detail.startswith("only after"):
        verdict, detail = OK, ""
    if verdict == OK and full.code != 2:
        verdict, detail = MESSAGE, f"exit code {full.code} instead of 2"
    if verdict != OK:
        return verdict, f"{where}: {detail}"
    last: Result = yield Job(run_words(), place)
    if last.traceback:
        return TRACEBACK, f"{where}; with space again: {last.traceback}"
    if last.code:
        return LOST, f"{where}; with space again the command ends with {last.code}: {last.text[-300:]}"
    if last.trace["updated"] > ITERATIONS - max(full.trace["saved"], 0):
        return LOST, f"{where}; saved iterations were done again"
    unequal = difference(world.references[1], fingerprint(place / "run"))
    return (SILENT, f"{where}; resumed: {unequal}") if unequal else (OK, where)


def _full_command(place: Path, world: World, name: str, kind: str, disk: str) -> Any:
    """`export` and `sample`: one message, and the same command works when there is space."""
    world.copy("finished 1", place)
    words, out = {
        "export": (["export", "run", "--out", "exported"], "exported"),
        "sample": (
            ["sample", "tiny", "--prompts", "prompts.txt", "--steps", "1", "--out", "images"],
            "images",
        ),
    }[kind]
    whole: Result = yield Job(words, place)
    expected = tree_hash(place / out)
    shutil.rmtree(place / out)
    full: Result = yield Job(words, place, trigger=_trigger(world, name, kind), disk=_filler(place, disk))
    where = f"full at {full.trace.get('fired') or 'no moment'}"
    if disk == "tmpfs":
        mount(place, ROOMY, again=True)
    if whole.code or full.code == 0:
        equal = whole.code == 0 and tree_hash(place / out) == expected
        return (
            (OK, where) if equal else (SILENT, f"{where}: exit code 0, but files differ: {full.text[-300:]}")
        )
    verdict, detail = refusal(
        full, Expected(file=out, found="space|full|free", allowed=r"\d ?([kMG]i?B|bytes)")
    )
    if verdict == MESSAGE and detail.startswith("only after"):
        verdict, detail = OK, ""
    if verdict != OK:
        return verdict, f"{where}: {detail}"
    last: Result = yield Job(words, place)
    if last.code or tree_hash(place / out) != expected:
        return LOST, f"{where}; with space again: exit code {last.code}, {last.text[-300:]}"
    return OK, where


def _small(place: Path, world: World, name: str, kind: str, disk: str) -> Any:
    """A disk that is too small is refused before the model is loaded, or the run fits."""
    function: Callable[[], None] | None = None
    if disk == "tmpfs":
        mount(place, SMALL, again=True)
    else:

        def function() -> None:
            ctypes.CDLL(None).faults_disk_full(str(place).encode(), ctypes.c_long(SMALL))
            import sys

            sys.argv = ["g2rpo", *run_words()]
            from g2rpo.__main__ import app

            app(prog_name="g2rpo")

    result: Result = yield Job(run_words(), place, function=function)
    if result.code == 0:
        unequal = difference(world.references[1], fingerprint(place / "run"))
        return (SILENT, unequal) if unequal else (OK, "it fits")
    return refusal(result, Expected(file="disk|run", found="free", allowed=r"\d ?([kMG]i?B|bytes)"))
