"""Checkpoints: torch.distributed.checkpoint under a temporary name, renamed when whole, then `latest`.

    RUN/checkpoints/step_000050/   .metadata, *.distcp (tensors, sharded as the run is), state.json (the rest)
    RUN/latest                     "step_000050": the newest whole checkpoint, replaced in one step
    RUN/best                       likewise the one after the best evaluation, where that is kept (best.py)

A write that is killed leaves a `.tmp` folder, which the next write removes, and `latest` as it was. The sizes
of the files are noted, so that one that a full or broken disk tore is seen: then the newest whole one counts.
Weights that no gradient trains (the base under adapters) are not stored: they come with the model.

Optimizer settings are pickled by torch: load only checkpoints that you trust.
"""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from g2rpo.distributed import barrier, gathered, local, random_state, rank, set_random_state
from g2rpo.pointers import BEST, LATEST, STEP, point, read_best, step_name, sync_folder, write_synced

FILES = "files"  # in state.json: the sizes of the files beside it
LOG = logging.getLogger(__name__)
HEADROOM_BYTES = 64 * 2**20
TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True)


@runtime_checkable
class Stateful(Protocol):
    """What has a small state of plain numbers, such as a learning-rate schedule."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


def save_checkpoint(
    out: str | Path, iteration: int, state: Mapping[str, Any], *,
    keep_last: int = 2, keep_every: int = 0, best: str | None = None,
) -> Path:  # fmt: skip
    """Writes RUN/checkpoints/step_<iteration>, points `latest` at it and removes what need not stay.

    Args:
        out: run folder. With several processes all of them call, with the same folder on a shared disk.
        iteration: optimizer iterations done.
        state: `module` (nn.Module), `optimizer` (of that module), mappings of tensors (an EMA), objects with
            a state_dict of plain numbers (a schedule), and plain JSON values (position, settings); `random`,
            of `random_state`, in place of the generators as they are.
        keep_last: newest checkpoints that stay, >= 1.
        keep_every: those at multiples of this stay as well; 0 = none.
        best: the judge by whom it is the best: RUN/best names it, and it stays until another is better.

    Raises:
        ValueError: keep_last < 1, too little free space, or a value that is none of the above.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last}: at least the newest checkpoint must stay")
    checkpoints = Path(out) / "checkpoints"
    final = checkpoints / step_name(iteration)
    unfinished = checkpoints / f"{final.name}.tmp"
    tensors = {name: _tensors(value, state) for name, value in state.items() if _is_tensors(value)}
    rest = {name: _plain(name, value) for name, value in state.items() if not _is_tensors(value)}
    rest = {"iteration": iteration, "random": random_state(), **rest}

    if rank() == 0:
        checkpoints.mkdir(parents=True, exist_ok=True)
        for leftover in checkpoints.glob("step_*.tmp"):
            shutil.rmtree(leftover)
    barrier()
    _check_space(checkpoints, _bytes(tensors))
    try:
        with _single_process_is_meant():
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(unfinished, thread_count=_writers()))
    except dcp.CheckpointException as error:
        if any(isinstance(cause, KeyboardInterrupt) for cause, _ in error.failures.values()):
            raise KeyboardInterrupt from error
        raise
    if rank() == 0:
        sizes = {file.name: file.stat().st_size for file in sorted(unfinished.iterdir())}
        write_synced(unfinished / "state.json", json.dumps(rest | {FILES: sizes}, ensure_ascii=False))
        if final.exists():  # a run that went on from an earlier checkpoint comes by here again
            replaced = final.with_name(f"{final.name}.old.tmp")
            os.replace(final, replaced)
            shutil.rmtree(replaced)
        os.replace(unfinished, final)
        sync_folder(checkpoints)
        point(Path(out) / LATEST, final.name)
        if best is not None:
            point(Path(out) / BEST, final.name, best)
        _prune(checkpoints, iteration, keep_last, keep_every)
    barrier()
    return final


def _writers() -> int:
    """Threads that write files, for one alone is slower than a disk; the processes here share the cores."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, (os.cpu_count() or 1) // here))


def latest_checkpoint(out: str | Path) -> Path | None:
    """The newest whole checkpoint of a run folder, or None where there is none yet.

    Where the one that `latest` names is damaged, the newest whole one before it, with a warning in the log.

    Raises:
        ValueError: the checkpoint that `latest` names is damaged, and none before it is whole.
    """
    latest = Path(out) / LATEST
    if not latest.exists():
        return None
    name = latest.read_text(encoding="utf-8").strip()
    path = Path(out) / "checkpoints" / name
    problem = damage(path)
    if not problem:
        return path
    newest = int(match[1]) if (match := STEP.fullmatch(name)) else None
    for step, found in reversed(_named(path.parent)):
        if (newest is None or step < newest) and not damage(found):
            LOG.warning("%s names %s: %s; going on from %s", latest, name, problem, found.name)
            return found
    raise ValueError(
        f"{latest} names {name!r}: {problem}, and there is no whole checkpoint before it; restore the files, "
        f"or remove {latest} and {path.parent} to start anew"
    )


def damage(path: Path) -> str:
    """What is wrong with a checkpoint's files, in words; empty for a whole one. Reads sizes, not contents."""
    if not STEP.fullmatch(path.name) or not path.is_dir():
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
    return "" if (path / ".metadata").is_file() else ".metadata is missing"


def read_state(path: str | Path) -> dict[str, Any]:
    """The plain part of a checkpoint: `iteration` and everything saved that was no tensor.

    Raises:
        ValueError: not a checkpoint.
    """
    file = Path(path) / "state.json"
    if not file.is_file():
        raise ValueError(f"{path} is not a checkpoint: it holds no state.json")
    try:
        state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    return state


def load_checkpoint(
    path: str | Path, state: Mapping[str, Any], *, restore_random: bool = True
) -> dict[str, Any]:
    """Puts a checkpoint's tensors into the given objects and returns its plain part.

    Args:
        path: a checkpoint folder.
        state: what to load, under the names of save_checkpoint: modules, the optimizer, mappings of tensors
            and schedules are filled in place. A name may be left out (an export needs only `module`); what
            is given must match the checkpoint entry by entry. Plain values are not compared.
        restore_random: set torch's, Python's and numpy's generators too.

    Raises:
        ValueError: not a checkpoint; or a name, an entry or a shape that differs, with what differs.
    """
    path = Path(path)
    rest = read_state(path)
    tensors = {name: _tensors(value, state) for name, value in state.items() if _is_tensors(value)}
    _check_match(path, tensors)
    if tensors:
        with _single_process_is_meant():
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(path))
    for name, value in state.items():
        if isinstance(value, nn.Module):
            # strict=False only because frozen weights are not in a checkpoint; _check_match was strict.
            set_model_state_dict(value, tensors[name], options=StateDictOptions(strict=False))
        elif isinstance(value, torch.optim.Optimizer):
            set_optimizer_state_dict(state["module"], value, tensors[name], options=TRAINED_ONLY)
        elif isinstance(value, Stateful):
            if name not in rest:
                raise ValueError(f"{path} holds no {name}; it holds {', '.join(rest)}")
            value.load_state_dict(rest[name])
    if restore_random:
        set_random_state(rest["random"])
    return rest


def _is_tensors(value: Any) -> bool:
    if isinstance(value, nn.Module | torch.optim.Optimizer | Tensor):
        return True
    return isinstance(value, Mapping) and any(isinstance(item, Tensor) for item in value.values())


def _tensors(value: Any, state: Mapping[str, Any]) -> Any:
    if isinstance(value, nn.Module):
        return get_model_state_dict(value, options=TRAINED_ONLY)
    if isinstance(value, torch.optim.Optimizer):
        if "module" not in state:
            raise ValueError("an optimizer is stored by its module's names: give `module` with it")
        return _optimizer_state(state["module"], value)
    return dict(value) if isinstance(value, Mapping) else value


def _optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    fresh = not optimizer.state
    state = get_optimizer_state_dict(module, optimizer, options=TRAINED_ONLY)
    if fresh:
        # torch fills an empty state by taking a step of size 0, which counts: AdamW's bias correction would
        # be one step ahead ever after. All zeros is what AdamW starts from.
        for tensor in _flat(state).values():
            held = local(tensor)
            held.copy_(torch.zeros(held.shape, dtype=held.dtype))  # zero_ is not for 8-bit moments
    groups: Any = state["param_groups"]
    for group in groups:
        group["lr"] = float(group["lr"])  # torchao keeps it in a tensor; the run sets it at each step anyway
    return state


def _plain(name: str, value: Any) -> Any:
    value = value.state_dict() if isinstance(value, Stateful) else value
    try:
        json.dumps(value)
    except TypeError as error:
        raise ValueError(f"state {name!r} is neither tensors nor plain JSON values: {error}") from error
    return value


def _check_match(path: Path, tensors: Mapping[str, Any]) -> None:
    metadata = dcp.FileSystemReader(path).read_metadata()
    there = {
        key: value
        for key, value in metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata) and key.split(".")[0] in tensors
    }
    given = _flat(tensors)
    wrong = [f"{key}: not in the checkpoint" for key in given if key not in there]
    wrong += [f"{key}: only in the checkpoint" for key in there if key not in given]
    wrong += [
        f"{key}: shape {list(there[key].size)} in the checkpoint, {list(value.shape)} here"
        for key, value in given.items()
        if key in there and there[key].size != value.shape
    ]
    if wrong:
        more = f"\n  … and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(f"{path} does not fit this run:\n  " + "\n  ".join(wrong[:8]) + more)


def _flat(value: Any, prefix: str = "") -> dict[str, Tensor]:
    """Tensors under the dotted names that torch.distributed.checkpoint gives them."""
    if isinstance(value, Tensor):
        return {prefix: value}
    if not isinstance(value, Mapping):
        return {}  # an optimizer's settings: torch compares those itself
    flat: dict[str, Tensor] = {}
    for name, item in value.items():
        flat |= _flat(item, f"{prefix}.{name}" if prefix else str(name))
    return flat


def _bytes(tensors: Mapping[str, Any]) -> int:
    # A shard of an FSDP parameter counts with what this process holds of it.
    held = (local(value) for value in _flat(tensors).values())
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def check_room(out: Path, trained: Mapping[str, Tensor], ema: Mapping[str, Tensor], to_go: int) -> None:
    """Looks before the loop whether its next checkpoint will fit, not when hours were spent on it.

    Args:
        out: run folder, there or not. trained: name -> parameter that is trained; AdamW adds two moments of
            the same size. ema: their averages, or nothing. to_go: iterations to come; with none no
            checkpoint is to come either.

    Raises:
        ValueError: too little free space, on all processes or on none.
    """
    if to_go > 0:
        there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
        _check_space(there, 3 * _bytes(trained) + _bytes(ema))


def _check_space(folder: Path, bytes_here: int) -> None:
    """Every rank sums what all will write, so that all of them raise or none does."""
    parts = gathered((bytes_here, shutil.disk_usage(folder).free))
    needed, free = sum(part[0] for part in parts), min(part[1] for part in parts)
    if free < needed + HEADROOM_BYTES:
        raise ValueError(
            f"a checkpoint needs {needed / 1e9:.2f} GB and {folder} has {free / 1e9:.2f} GB free; "
            "free some space, or lower keep_last; nothing was written and the last checkpoint is whole"
        )


def _named(checkpoints: Path) -> list[tuple[int, Path]]:
    """Checkpoints, oldest first: a name without .tmp was given when all was written."""
    found = [(STEP.fullmatch(path.name), path) for path in checkpoints.glob("step_*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def _prune(checkpoints: Path, newest: int, keep_last: int, keep_every: int) -> None:
    steps = [(step, path) for step, path in _named(checkpoints) if step <= newest]
    best, _ = read_best(checkpoints.parent)
    for step, path in steps[:-keep_last]:
        if path.name != best and (not keep_every or step % keep_every):
            # Renamed first: a removal that is killed half-way must not look like a checkpoint.
            removed = path.with_name(f"{path.name}.old.tmp")
            os.replace(path, removed)
            shutil.rmtree(removed)


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """Silences torch's notice that there is no process group; it comes even where one asks for that."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        yield
