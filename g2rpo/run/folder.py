"""The checkpoints of a run folder: which are intact, and which of them RUN/latest and RUN/best name.

    RUN/latest   "step_000050"            RUN/best   "step_000034 verifier": checkpoint and selecting reward

Both are pointer files of one line and are replaced atomically. An intact checkpoint has all of its files,
each with the size that was recorded when it was written, and state.json and tensors.json have the recorded
checksums. Those of the tensors are compared when they are loaded; a checkpoint in which one differs counts as
damaged from then on (`mark_damaged`), so that the newest one before it is used.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from g2rpo.runtime.files import write_atomic
from g2rpo.runtime.processes import rank
from g2rpo.runtime.records import DamagedFile, crc32

T = TypeVar("T")

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
"""Key of state.json: file name -> size in bytes, for the other files of the checkpoint, and CHECKSUMS."""

CHECKSUMS = "crc32"
"""Key in FILES: file name -> checksum of tensors.json, and of state.json itself with zeros in its place."""

_OWN, _ZEROS = '"state.json": "{}"', "0" * 8


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
            warn_once(f"{why}; using the newest intact checkpoint, {path.name}")
            return path
        problems.append(f"{path.name}: {problem}")
    raise ValueError(
        f"{why}, and there is no intact checkpoint in {checkpoints}"
        + "".join(f"\n  {problem}" for problem in problems)
        + "\nNothing was changed. Restore the files from a copy, or start a new run in another out=FOLDER."
    )


def load_newest(out: str | Path, load: Callable[[Path], T]) -> tuple[Path, T] | None:
    """Loads the newest checkpoint of a run whose content is as it was written; None: the run has none yet.

    A damaged one is passed over, and a warning names its file and what is wrong with it.

    Args:
        out: run folder.
        load: loads a checkpoint completely, and raises DamagedFile if it is damaged; with several processes
            on all of them.

    Raises:
        ValueError: checkpoints exist, but none is intact, or an error of `load`.
    """
    while (checkpoint := latest_checkpoint(out)) is not None:
        try:
            return checkpoint, load(checkpoint)
        except DamagedFile as error:
            if damage(checkpoint) == "no such checkpoint":  # a run in progress removes old ones
                raise
            mark_damaged(checkpoint, str(error))
    return None


def repair_latest(out: str | Path, checkpoint: Path) -> None:
    """Makes `latest` name the checkpoint from which a run is resumed. The first process writes."""
    latest = Path(out) / LATEST
    if rank() == 0 and STEP.fullmatch(checkpoint.name) and read_pointer(latest) != checkpoint.name:
        write_pointer(latest, checkpoint.name)


def damage(path: Path) -> str:
    """Description of what is wrong with a checkpoint's files; "" if it is intact.

    Compares the sizes of all files and the checksums of the JSON files, and knows of `mark_damaged`.
    """
    if not STEP.fullmatch(path.name.removesuffix(ASIDE)) or not path.is_dir():
        return "no such checkpoint"
    try:
        sizes = read_state(path).get(FILES, {})
    except ValueError as error:
        return str(error)
    if problem := _damaged.get(_identity(path), ""):
        return problem
    for name, size in sizes.items():
        if name == CHECKSUMS:
            continue
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if (actual := file.stat().st_size) != size:
            return f"{name} has {actual} of its {size} bytes"
    if (path / INDEX).is_file():
        return index_problem(path)
    return "" if (path / PICKLED_INDEX).is_file() else "the index of its tensors is missing"


def index_problem(path: Path) -> str:
    """What is wrong with the content of a checkpoint's tensors.json; "" if it is as it was written."""
    try:
        stored = read_state(path).get(FILES, {}).get(CHECKSUMS, {}).get(INDEX)
        if stored is not None and (found := crc32((path / INDEX).read_bytes())) != stored:
            return f"{path / INDEX} is damaged: its checksum is {found}, but {stored} was stored"
    except DamagedFile as error:
        return str(error)
    except OSError as error:
        return f"{path / INDEX} cannot be read: {error.strerror}"
    return ""


_damaged: dict[tuple[str, int], str] = {}


def mark_damaged(path: Path, problem: str) -> None:
    """Lets `damage` say `problem` of this checkpoint in this process, until another one replaces it."""
    _damaged[_identity(path)] = problem


def _identity(path: Path) -> tuple[str, int]:
    file = path / "state.json"
    return str(file.absolute()), file.stat().st_mtime_ns if file.is_file() else 0


def read_state(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint's state.json: `iteration` and all saved values that are not tensors.

    Raises:
        DamagedFile: not a checkpoint, or a damaged state.json.
    """
    file = Path(path) / "state.json"
    if not file.is_file():
        raise DamagedFile(f"{path} is not a checkpoint: it contains no state.json")
    try:
        text = file.read_text(encoding="utf-8")
        state: Any = json.loads(text)
    except OSError as error:
        raise DamagedFile(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise DamagedFile(f"{file} is damaged: {error}") from error
    if not isinstance(state, dict) or not isinstance(state.get("iteration"), int):
        raise DamagedFile(f"{file} is damaged: it does not say after which iteration it was written")
    files = state.get(FILES, {})
    if not isinstance(files, dict) or not isinstance(files.get(CHECKSUMS, {}), dict):
        raise DamagedFile(f"{file} is damaged: it does not list the checkpoint's files")
    if CHECKSUMS in files:
        stored = str(files[CHECKSUMS].get(file.name))
        found = crc32(text.replace(_OWN.format(stored), _OWN.format(_ZEROS)).encode("utf-8"))
        if found != stored:
            raise DamagedFile(f"{file} is damaged: its checksum is {found}, but {stored} was stored")
    return state


def write_state(folder: Path, values: Mapping[str, Any]) -> None:
    """Writes state.json, the last file of a checkpoint, with the sizes and checksums of the files.

    Raises:
        DiskFull: there is no space for it.
    """
    files: dict[str, Any] = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    checksums = {INDEX: crc32((folder / INDEX).read_bytes()), "state.json": _ZEROS}
    text = json.dumps({**values, FILES: files | {CHECKSUMS: checksums}}, ensure_ascii=False)
    own = _OWN.format(crc32(text.encode("utf-8")))
    write_atomic(folder / "state.json", text.replace(_OWN.format(_ZEROS), own))


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


def warn_once(message: str) -> None:
    """Logs a warning once per process: several parts of a command look up the newest checkpoint."""
    if rank() == 0 and message not in _warned:
        _warned.add(message)
        LOG.warning("%s", message)


HEADROOM_BYTES = 64 * 2**20


def headroom(checkpoint_bytes: int) -> int:
    """Bytes that must stay free beside checkpoints of this size, for images, metrics and records."""
    return min(HEADROOM_BYTES, 2**20 + 4 * checkpoint_bytes)
