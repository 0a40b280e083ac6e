"""Checkpoints: written by torch.distributed.checkpoint under a temporary name and renamed when complete.

    RUN/checkpoints/step_000050/   *.distcp (tensors, sharded as the run is), tensors.json (their index),
                                   state.json (all values that are not tensors)
    RUN/latest                     "step_000050": the newest complete checkpoint, replaced atomically
    RUN/best                       the checkpoint after the best evaluation, if `keep_best` is set (best.py)

A killed write leaves a `.tmp` folder, which the next write removes, and `latest` as it was. File sizes and
checksums of each stored chunk, of the index and of state.json are recorded, so that damage is detected, such
as that of a full or broken disk; then the newest intact checkpoint is used (folder.load_newest). Frozen
weights (the base under adapters) are not stored, because they come with the model.

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
    LATEST,
    aside_path,
    headroom,
    named_checkpoints,
    read_best,
    read_state,
    step_name,
    write_pointer,
    write_state,
)
from g2rpo.runtime.files import DiskFull, disk_full, nearest_folder, sync_file, sync_folder
from g2rpo.runtime.processes import barrier, environment_number, gathered, rank
from g2rpo.runtime.random import random_state, set_random_state
from g2rpo.runtime.sharding import local

GROUPS = "param_groups"
TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True)


@runtime_checkable
class Stateful(Protocol):
    """An object with a small state of plain JSON values, such as the curriculum."""

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
    """Writes RUN/checkpoints/step_<iteration>, makes `latest` name it and removes older checkpoints.

    Args:
        out: run folder. All processes call with the same folder on a shared disk.
        iteration: iterations completed.
        state: `module` (nn.Module), `optimizer` (of that module), mappings of tensors (an EMA), objects with
            a state_dict of plain JSON values (the curriculum), and plain JSON values. `random`, a value of
            `random_state`, replaces the current state of the generators.
        keep_last: number of newest checkpoints to keep, >= 1.
        keep_every: checkpoints at multiples of this are kept as well; 0 = none.
        best: the reward by which this is the best checkpoint: RUN/best names it, and it is kept until there
            is a better one. None = it is not the best.

    Returns:
        The checkpoint's folder.

    Raises:
        DiskFull: too little free space; raised on all processes. Earlier checkpoints are as before.
        ValueError: keep_last < 1, or a value of another type.
    """
    if keep_last < 1:
        raise ValueError(
            f"keep_last={keep_last} must be at least 1, because the newest checkpoint is always kept"
        )
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
        _write_tensors(unfinished, tensors)
    except DiskFull:
        _remove_everywhere(unfinished)
        raise
    problem: DiskFull | None = None
    if rank() == 0:
        try:
            _complete(unfinished, final, rest)
            write_pointer(Path(out) / LATEST, final.name)
            if best is not None:
                write_pointer(Path(out) / BEST, final.name, best)
        except DiskFull as error:
            problem = error
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            _prune(checkpoints, iteration, keep_last, keep_every)
            for leftover in checkpoints.glob("step_*.tmp"):  # last: one may have been the only intact one
                shutil.rmtree(leftover)
    if full := next(filter(None, gathered(problem)), None):  # on all processes, and after all have finished
        raise full
    return final


def _write_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    try:
        with without_process_group_warning():
            dcp.save(tensors, storage_writer=TensorWriter(folder, thread_count=_writers()))
    except dcp.CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
            raise KeyboardInterrupt from error
        if full := next((full for cause in causes if (full := disk_full(folder, cause))), None):
            raise full from error
        raise


def _remove_everywhere(unfinished: Path) -> None:
    """Removes what was written of a checkpoint, so that the space is free for other files."""
    barrier()  # no process writes there any more
    if rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)


def _complete(unfinished: Path, final: Path, rest: dict[str, Any]) -> None:
    """Writes state.json and gives the checkpoint its name."""
    write_state(unfinished, rest)
    if (metrics := final.parent.parent / "metrics.jsonl").is_file():
        sync_file(metrics)  # the checkpoint must not survive a power failure that its metrics do not
    if final.exists():  # the run was resumed from an earlier checkpoint
        shutil.rmtree(aside_path(final), ignore_errors=True)
        os.replace(final, aside_path(final))
    os.replace(unfinished, final)
    sync_folder(final.parent)


def _writers() -> int:
    """Threads that write files: one thread is slower than a disk, and the local processes share the cores."""
    local_processes = max(1, environment_number("LOCAL_WORLD_SIZE", 1))
    return max(1, min(8, (os.cpu_count() or 1) // local_processes))


def load_checkpoint(
    path: str | Path, state: Mapping[str, Any], *, restore_random: bool = True
) -> dict[str, Any]:
    """Loads a checkpoint's tensors into the given objects and returns its plain values.

    Args:
        path: a checkpoint folder.
        state: objects to fill in place, under the names given to save_checkpoint: modules, the optimizer,
            mappings of tensors and Stateful objects. Names may be omitted (an export needs only `module`);
            those given must match the checkpoint entry by entry. Plain values are not compared.
        restore_random: also restore torch's, Python's and numpy's generators.

    Returns:
        The content of state.json: `iteration`, `random` and all values that are not tensors.

    Raises:
        DamagedFile: not a checkpoint, or one of its files is not as it was written. Tensors may have been
            replaced in part: load another checkpoint into all of them, or do not use them.
        ValueError: a name, entry or shape differs; the message lists the differences.
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
            full_state = {**tensors[name], GROUPS: groups[name]}
            set_optimizer_state_dict(state["module"], value, full_state, options=TRAINED_ONLY)
        elif isinstance(value, Stateful):
            if name not in rest:
                raise ValueError(f"{path} contains no {name}; it contains {', '.join(rest)}")
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
            raise ValueError("an optimizer is stored by its module's parameter names: give `module` with it")
        return _optimizer_state(state["module"], value)
    return dict(value) if isinstance(value, Mapping) else value


def _optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    fresh = not optimizer.state
    state = get_optimizer_state_dict(module, optimizer, options=TRAINED_ONLY)
    if fresh:
        # torch fills an empty state by a step of size 0 and counts it, so that AdamW's bias correction would
        # stay one step ahead. AdamW starts from zeros.
        for tensor in _flat(state).values():
            shard = local(tensor)
            shard.copy_(torch.zeros(shard.shape, dtype=shard.dtype))  # 8-bit moments do not support zero_
    groups: Any = state["param_groups"]
    for group in groups:
        group["lr"] = float(group["lr"])  # torchao stores a tensor; the run sets the rate at each step anyway
    return state


def _optimizers(state: Mapping[str, Any]) -> list[str]:
    return [name for name, value in state.items() if isinstance(value, torch.optim.Optimizer)]


def _groups(path: Path, name: str, rest: Mapping[str, Any], current: list[dict[str, Any]]) -> Any:
    """The optimizer's settings in a checkpoint, one mapping per parameter group.

    Args:
        current: settings of the optimizer to load into; they tell which values are tuples, which JSON lacks.
    """
    if name in rest:
        stored = rest[name][GROUPS]
    else:  # written by an earlier version, beside the tensors
        values = pickled_values(path)
        stored = [
            {key: values[f"{name}.{GROUPS}.{i}.{key}"] for key in group} for i, group in enumerate(current)
        ]
    tuples = [{key for key, value in group.items() if isinstance(value, tuple)} for group in current]
    return [
        {key: tuple(value) if key in tuple_keys else value for key, value in group.items()}
        for group, tuple_keys in zip(stored, tuples, strict=True)
    ]


def _plain(name: str, value: Any) -> Any:
    value = value.state_dict() if isinstance(value, Stateful) else value
    try:
        json.dumps(value)
    except TypeError as error:
        raise ValueError(f"state {name!r} is neither tensors nor plain JSON values: {error}") from error
    return value


def _check_match(path: Path, tensors: Mapping[str, Any]) -> None:
    saved = {
        key: value
        for key, value in read_index(path).state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata) and key.split(".")[0] in tensors
    }
    given = _flat(tensors)
    differences = [f"{key}: not in the checkpoint" for key in given if key not in saved]
    differences += [f"{key}: only in the checkpoint" for key in saved if key not in given]
    differences += [
        f"{key}: shape {list(saved[key].size)} in the checkpoint, {list(value.shape)} here"
        for key, value in given.items()
        if key in saved and saved[key].size != value.shape
    ]
    if differences:
        more = f"\n  … and {len(differences) - 8} more" if len(differences) > 8 else ""
        raise ValueError(f"{path} does not fit this run:\n  " + "\n  ".join(differences[:8]) + more)


def _flat(value: Any, prefix: str = "") -> dict[str, Tensor]:
    """Tensors by the dotted names that torch.distributed.checkpoint gives them."""
    if isinstance(value, Tensor):
        return {prefix: value}
    if not isinstance(value, Mapping):
        return {}  # an optimizer's settings, which torch compares itself
    flat: dict[str, Tensor] = {}
    for name, item in value.items():
        flat |= _flat(item, f"{prefix}.{name}" if prefix else str(name))
    return flat


def _bytes(tensors: Mapping[str, Any]) -> int:
    # Of an FSDP parameter only this process's shard counts.
    shards = (local(value) for value in _flat(tensors).values())
    return sum(shard.numel() * shard.element_size() for shard in shards)


def check_checkpoint_space(
    out: Path, trained: Mapping[str, Tensor], copies: Mapping[str, Any], iterations_left: int
) -> None:
    """Checks before the training loop that its next checkpoint will fit on the disk.

    Args:
        out: run folder, which need not exist yet.
        trained: name -> trained parameter; AdamW adds two moments of the same size.
        copies: other tensors in a checkpoint, such as averages of the weights, by name; may be nested.
        iterations_left: iterations still to run; with 0 no checkpoint will be written and nothing is checked.

    Raises:
        DiskFull: too little free space; raised on all processes or on none.
    """
    if iterations_left > 0:
        _check_space(nearest_folder(out), 3 * _bytes(trained) + _bytes(copies))


def _check_space(folder: Path, bytes_here: int) -> None:
    """Compares the bytes of all processes with the free space; raises on all of them or on none."""
    parts = gathered((bytes_here, shutil.disk_usage(folder).free))
    needed, free = sum(part[0] for part in parts), min(part[1] for part in parts)
    if free < needed + (spare := headroom(needed)):
        raise DiskFull(
            f"a checkpoint needs {needed / 1e9:.2f} GB and {folder} has {free / 1e9:.2f} GB free; free some "
            f"space, at least {(needed + spare - free) / 1e9:.2f} GB; nothing was written, the last "
            "checkpoint is intact, and the same command continues from it"
        )


def _prune(checkpoints: Path, newest: int, keep_last: int, keep_every: int) -> None:
    steps = [(step, path) for step, path in named_checkpoints(checkpoints) if step <= newest]
    best, _ = read_best(checkpoints.parent)
    for step, path in steps[:-keep_last]:
        if path.name != best and (not keep_every or step % keep_every):
            # Renamed first, because a removal that is killed half-way must not look like a checkpoint.
            os.replace(path, aside_path(path))
