"""Damaged files of a run: the checkpoint before the damaged one is used, and what is damaged is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
from faults.runs import ITERATIONS, Cases, World, difference, fingerprint, prepare, run_words

STOPPED_AT = 2
# Kind -> files of the stopped run, of which one is damaged. The first group belongs to the newest checkpoint.
CHECKPOINT = {
    "tensors of the newest checkpoint": "run/checkpoints/step_000002/*.distcp",
    "index of the newest checkpoint": "run/checkpoints/step_000002/tensors.json",
    "state of the newest checkpoint": "run/checkpoints/step_000002/state.json",
}
SIDE = {
    "latest": "run/latest",
    "best": "run/best",
    "config.toml": "run/config.toml",
    "an evaluation": "run/evaluations/*.json",
    "the list of first images": "run/comparison/before.json",
    "a first image": "run/comparison/before_0/*.png",
    "an embedding shard": "cache/*/*.safetensors",
    "metrics.jsonl": "run/metrics.jsonl",
}
EVERY = "both checkpoints"
KINDS = (*CHECKPOINT, *SIDE, EVERY)
WAYS = ("a flipped bit", "cut off", "missing", "zeros", "empty")
# Text files without a checksum: a flipped bit may make another number of one, which nobody can see.
PLAIN = ("an evaluation", "metrics.jsonl", "the list of first images", "config.toml", "a first image")


def damage_cases(world: World, count: int) -> Cases:
    """Runs that were stopped after two iterations and damaged, and are then resumed."""
    yield "damage:stopped", _stopped(world)
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        yield f"damage:{number}", _of(world, f"damage:{number}", kind)


def _stopped(world: World) -> Callable[[Path], Case]:
    def case(folder: Path) -> Case:
        own = world.folder / "stopped"
        own.mkdir()
        prepare(own)
        result: Result = yield Job(run_words(f"stop_after={STOPPED_AT}"), own)
        world.folders["stopped"] = own
        verdict = OK if result.code == 0 else LOST
        return Outcome(
            "damage:stopped", "the run that is damaged", verdict, "" if verdict == OK else result.text
        )

    return case


def _of(world: World, name: str, kind: str) -> Callable[[Path], Case]:
    return lambda folder: _damaged(folder, world, name, kind)


def _damaged(folder: Path, world: World, name: str, kind: str) -> Case:
    draw = world.random(name)
    while "stopped" not in world.folders:  # made by the first case
        yield Job([], folder, function=lambda: None)
    world.copy("stopped", folder)
    way = draw.choice(WAYS[1:] if kind in PLAIN else WAYS)
    if kind == EVERY:
        files = [draw.choice(_files(step)) for step in sorted((folder / "run" / "checkpoints").iterdir())]
    else:
        there = sorted(folder.glob((CHECKPOINT | SIDE)[kind]))
        if not there:
            return Outcome(name, kind, NOT_REACHED, "the run has no such file")
        files = [draw.choice(there)]
    for file in files:
        spoil(file, way, draw)
    where = f"{way}: {', '.join(file.relative_to(folder).as_posix() for file in files)}"
    result: Result = yield Job(run_words(), folder)
    verdict, detail = _judged(world, folder, kind, way, files, result)
    return Outcome(name, kind, verdict, f"{where}: {detail}" if detail else where)


def _files(step: Path) -> list[Path]:
    return sorted(path for path in step.iterdir() if path.is_file())


def spoil(file: Path, way: str, draw: Any) -> None:
    """Damages a file as a disk or an interrupted copy does."""
    content = bytearray(file.read_bytes())
    if way == "missing":
        file.unlink()
    elif way == "empty" or not content:
        file.write_bytes(b"")
    elif way == "cut off":
        file.write_bytes(content[: draw.randrange(len(content))])
    elif way == "zeros":
        start = draw.randrange(len(content))
        stop = min(len(content), start + 512)
        content[start:stop] = bytes(stop - start)
        file.write_bytes(content)
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)


def _judged(
    world: World, folder: Path, kind: str, way: str, files: list[Path], result: Result
) -> tuple[str, str]:
    if result.timed_out:
        return HANG, ""
    if result.traceback:
        return TRACEBACK, result.traceback
    begun, named = (
        "updated" in result.trace,
        files[0].name in result.text or files[0].parent.name in result.text,
    )
    updates = result.trace.get("updated", 0)
    if kind == EVERY:
        if result.code == 0 and updates == ITERATIONS - STOPPED_AT:
            return _equal(world, folder)  # what was damaged held no number
        if result.code == 0 and updates < ITERATIONS:
            return _equal(world, folder) if named else (MESSAGE, "another checkpoint is used without a word")
        if result.code == 0:
            return LOST, "the run began again from nothing"
        return _refused(result, files)
    if result.code:
        refused = (
            refusal(result, Expected(file=files[0].name, allowed=".")) if begun else (MESSAGE, result.text)
        )
        if kind in CHECKPOINT:
            return LOST, f"an earlier checkpoint is intact, but the run ends: {result.text[-300:]}"
        return refused
    if updates == ITERATIONS:
        return LOST, "the run began again from nothing"
    if updates > ITERATIONS - STOPPED_AT and not named:
        return MESSAGE, "an earlier checkpoint is used without a word"
    if kind == "metrics.jsonl" and not named and way != "a flipped bit":
        equal = _equal(world, folder)
        return (
            equal
            if equal[0] == OK
            else (MESSAGE, f"metrics.jsonl is damaged, and nothing says so: {equal[1]}")
        )
    return _equal(world, folder, lost=_in_run(files[0], folder) if named else "")


def _refused(result: Result, files: list[Path]) -> tuple[str, str]:
    """Every checkpoint is damaged. Tensors are verified while they are read, after the model is made."""
    if any(file.suffix == ".distcp" for file in files):
        result = replace(result, trace={**result.trace, "counted": {}})
    return refusal(result, Expected(file="step_00000[12]", allowed="checkpoint"))


def _in_run(file: Path, folder: Path) -> str:
    """The file's name in the run folder; empty for one of the cache, whose damage must not show at all."""
    run = folder / "run"
    return file.relative_to(run).as_posix() if file.is_relative_to(run) else ""


def _equal(world: World, folder: Path, lost: str = "") -> tuple[str, str]:
    """Compares with the undisturbed run; a file that was lost and named may stay without its content."""
    expected, found = world.references[1], fingerprint(folder / "run")
    if lost:
        drop = (lost, "curve.png") if lost == "metrics.jsonl" else (lost,)
        expected = {name: value for name, value in expected.items() if not name.startswith(drop)}
        found = {name: value for name, value in found.items() if not name.startswith(drop)}
    unequal = difference(expected, found)
    return (SILENT, unequal) if unequal else (OK, "")
