"""Checkpoints: torch.distributed.checkpoint under a temporary name, renamed when whole, then `latest`.

    RUN/checkpoints/step_000050/   *.distcp (tensors, sharded as the run is), tensors.json (their index),
                                   state.json (all that is no tensor)
    RUN/latest                     "step_000050": the newest whole checkpoint, replaced in one step
    RUN/best                       likewise the one after the best evaluation, where that is kept (best.py)

A write that is killed leaves a `.tmp` folder, which the next write removes, and `latest` as it was. The sizes
of the files are noted, so that one that a full or broken disk tore is seen: then the newest whole one counts.
Weights that no gradient trains (the base under adapters) are not stored: they come with the model.

Reading a checkpoint runs no code from it (checkpoint_index.py).
"""

import json
import os
import shutil
from collections.abc import Mapping
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

from g2rpo.run.checkpoint_index import (
    TensorWriter,
    load_tensors,
    pickled_values,
    read_index,
    without_process_group_warning,
)
from g2rpo.run.folder import (
    BEST,
    FILES,
    LATEST,
    aside_path,
    named_checkpoints,
    read_best,
    read_state,
    step_name,
    write_pointer,
)
from g2rpo.runtime.files import sync_folder, write_synced
from g2rpo.runtime.processes import barrier, gathered, rank
from g2rpo.runtime.random import random_state, set_random_state
from g2rpo.runtime.sharding import local

GROUPS = "param_groups"
HEADROOM_BYTES = 64 * 2**20
TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True)


@runtime_checkable
class Stateful(Protocol):
    """What has a small state of plain numbers, such as a learning-rate schedule."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


def save_checkpoint(
    out: str | Path,
    iteration: int,
    state: Mapping[str, Any],
    *,
    keep_last: int = 2,
    keep_every: int = 0,
    best: str | None = None,
) -> Path:
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
    rest |= {name: {GROUPS: tensors[name].pop(GROUPS)} for name in _optimizers(state)}
    rest = {"iteration": iteration, "random": random_state(), **rest}

    if rank() == 0:
        checkpoints.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unfinished, ignore_errors=True)
    barrier()
    _check_space(checkpoints, _bytes(tensors))
    try:
        with without_process_group_warning():
            dcp.save(tensors, storage_writer=TensorWriter(unfinished, thread_count=_writers()))
    except dcp.CheckpointException as error:
        if any(isinstance(cause, KeyboardInterrupt) for cause, _ in error.failures.values()):
            raise KeyboardInterrupt from error
        raise
    if rank() == 0:
        sizes = {file.name: file.stat().st_size for file in sorted(unfinished.iterdir())}
        write_synced(unfinished / "state.json", json.dumps(rest | {FILES: sizes}, ensure_ascii=False))
        if final.exists():  # a run that went on from an earlier checkpoint comes by here again
            shutil.rmtree(aside_path(final), ignore_errors=True)
            os.replace(final, aside_path(final))
        os.replace(unfinished, final)
        sync_folder(checkpoints)
        write_pointer(Path(out) / LATEST, final.name)
        if best is not None:
            write_pointer(Path(out) / BEST, final.name, best)
        _prune(checkpoints, iteration, keep_last, keep_every)
        for leftover in checkpoints.glob("step_*.tmp"):  # last: one of them may have been the only whole one
            shutil.rmtree(leftover)
    barrier()
    return final


def _writers() -> int:
    """Threads that write files, for one alone is slower than a disk; the processes here share the cores."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, (os.cpu_count() or 1) // here))


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
    groups = {name: _groups(path, name, rest, tensors[name].pop(GROUPS)) for name in _optimizers(state)}
    _check_match(path, tensors)
    if tensors:
        load_tensors(path, tensors)
    for name, value in state.items():
        if isinstance(value, nn.Module):
            # strict=False only because frozen weights are not in a checkpoint; _check_match was strict.
            set_model_state_dict(value, tensors[name], options=StateDictOptions(strict=False))
        elif isinstance(value, torch.optim.Optimizer):
            whole = {**tensors[name], GROUPS: groups[name]}
            set_optimizer_state_dict(state["module"], value, whole, options=TRAINED_ONLY)
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


def _optimizers(state: Mapping[str, Any]) -> list[str]:
    return [name for name, value in state.items() if isinstance(value, torch.optim.Optimizer)]


def _groups(path: Path, name: str, rest: Mapping[str, Any], current: list[dict[str, Any]]) -> Any:
    """The optimizer's settings of a checkpoint, one mapping for each parameter group.

    Args:
        current: those of the optimizer that is loaded into; they say which of them are tuples.
    """
    if name in rest:
        stored = rest[name][GROUPS]
    else:  # written by an earlier version, beside the tensors
        values = pickled_values(path)
        stored = [{key: values[f"{name}.{GROUPS}.{i}.{key}"] for key in own} for i, own in enumerate(current)]
    tuples = [{key for key, value in own.items() if isinstance(value, tuple)} for own in current]
    return [
        {key: tuple(value) if key in these else value for key, value in group.items()}
        for group, these in zip(stored, tuples, strict=True)
    ]


def _plain(name: str, value: Any) -> Any:
    value = value.state_dict() if isinstance(value, Stateful) else value
    try:
        json.dumps(value)
    except TypeError as error:
        raise ValueError(f"state {name!r} is neither tensors nor plain JSON values: {error}") from error
    return value


def _check_match(path: Path, tensors: Mapping[str, Any]) -> None:
    there = {
        key: value
        for key, value in read_index(path).state_dict_metadata.items()
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


def check_checkpoint_space(
    out: Path, trained: Mapping[str, Tensor], ema: Mapping[str, Tensor], iterations_left: int
) -> None:
    """Checks before the training loop that its next checkpoint will fit on the disk.

    Args:
        out: run folder, which need not exist yet.
        trained: name -> trained parameter; AdamW adds two moments of the same size.
        ema: name -> average, or empty.
        iterations_left: iterations still to run; with 0 no checkpoint will be written and nothing is checked.

    Raises:
        ValueError: too little free space; raised on all processes or on none.
    """
    if iterations_left > 0:
        existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
        _check_space(existing, 3 * _bytes(trained) + _bytes(ema))


def _check_space(folder: Path, bytes_here: int) -> None:
    """Every rank sums what all will write, so that all of them raise or none does."""
    parts = gathered((bytes_here, shutil.disk_usage(folder).free))
    needed, free = sum(part[0] for part in parts), min(part[1] for part in parts)
    if free < needed + HEADROOM_BYTES:
        raise ValueError(
            f"a checkpoint needs {needed / 1e9:.2f} GB and {folder} has {free / 1e9:.2f} GB free; "
            "free some space, or lower keep_last; nothing was written and the last checkpoint is whole"
        )


def _prune(checkpoints: Path, newest: int, keep_last: int, keep_every: int) -> None:
    steps = [(step, path) for step, path in named_checkpoints(checkpoints) if step <= newest]
    best, _ = read_best(checkpoints.parent)
    for step, path in steps[:-keep_last]:
        if path.name != best and (not keep_every or step % keep_every):
            # Renamed first: a removal that is killed half-way must not look like a checkpoint.
            os.replace(path, aside_path(path))
