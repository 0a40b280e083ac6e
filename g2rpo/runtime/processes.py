"""Many processes as one run: the process group, FSDP2, and randomness that depends on no process.

    torchrun --nproc-per-node 4 -m g2rpo train RECIPE

Groups of an iteration are divided evenly; each lives on one process. Trained parameters are sharded by
fully_shard (FSDP2, arXiv:2304.11277), a block of the network at a time, in float32; compute runs in the
compute dtype, gradients are reduced in float32. During a rollout the whole network is `resident` on every
process in the compute dtype, so its forwards communicate nothing, and processes may run apart.

Every random tensor has a key, such as (seed, iteration, prompt, step, member). The key is hashed to a
seed of its own and drawn on the CPU in float32, so one process or eight, and any kind of GPU, see the
same noise, and any part of a run can be drawn again by itself. Code from outside, such as a reward, draws
from the process's generators: `seed_everything` sets those.
"""

from __future__ import annotations

import hashlib
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

T = TypeVar("T")


def start_processes(device: torch.device) -> None:
    """Joins the process group that torchrun started; nothing to do in a process of its own.

    Objects and CPU tensors go by gloo, GPU tensors by NCCL.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", device_id=torch.device("cuda", torch.cuda.current_device())
        )
    else:
        dist.init_process_group("gloo")


def end_processes() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """This process's number, 0 where there is one."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes of the run."""
    return dist.get_world_size() if dist.is_initialized() else 1


class StopTogether(ValueError):
    """A reason for which all processes of a run stop: raised on one, it is raised on all (`raise_together`).

    It is made of its message alone, so that it can be sent.
    """


def raise_together(error: StopTogether | None) -> None:
    """Raises the error of this process, or else the first of another one; all processes must call."""
    raised = [other for other in gathered(error) if other is not None]
    if raised:
        raise error or raised[0]


def agreed(work: Callable[[], T]) -> T:
    """What `work`, in which the processes do not communicate, gives here; all processes must call.

    Raises:
        StopTogether: on every process, if `work` raised it on any.
    """
    result: list[T] = []
    error: StopTogether | None = None
    try:
        result.append(work())
    except StopTogether as raised:
        error = raised
    raise_together(error)
    return result[0]


def barrier() -> None:
    """Waits for all processes."""
    if dist.is_initialized():
        dist.barrier()


def gathered(value: T) -> list[T]:
    """The value of every process, in the order of their numbers; tensors should be on the CPU."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def any_process(flag: bool) -> bool:
    """Whether the flag is set on any process; all of them must ask."""
    return any(gathered(flag))


def sharding_mesh(device: torch.device, shard_size: int | None = None) -> DeviceMesh | None:
    """The mesh that parameters are sharded over; None for one process.

    Args:
        shard_size: processes that hold one copy of the parameters together, such as those of one node
            (HSDP: the copies' gradients are all-reduced); None: all of them.

    Raises:
        ValueError: a shard_size that does not divide the number of processes.
    """
    size = world_size()
    if size == 1:
        return None
    if shard_size is None or shard_size == size:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    if shard_size > size or size % shard_size:
        raise ValueError(f"shard_size={shard_size} does not divide the {size} processes of this run")
    names = ("replicate", "shard")
    return init_device_mesh(device.type, (size // shard_size, shard_size), mesh_dim_names=names)


def shard(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    ignored: set[nn.Parameter] | None = None,
) -> None:
    """Shards `module`: each block by itself, the rest together. Parameters become DTensors, in place.

    Args:
        param_dtype: of the gathered parameters; None: as they are.
        reduce_dtype: of the gradients' reduction.
        ignored: parameters that stay whole on every process, such as a frozen base.
    """
    # FLUX's blocks return views, and nothing writes into them: the warning's case does not arise.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # Inputs keep their dtype: sigma must reach the network in float32.
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    for part in (*blocks, module):
        trained = any(p.requires_grad and p not in (ignored or ()) for p in part.parameters())
        if trained:
            fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=ignored)


@contextmanager
def resident(module: nn.Module) -> Iterator[None]:
    """Holds all sharded parameters gathered while it lasts: forwards without gradient communicate nothing.

    Parameters must not change meanwhile. A module that is not sharded is left as it is.
    """
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    if not parts:
        yield
        return
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: its shard of a DTensor, else all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered where it is sharded (then every process must call)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def keyed_generator(seed: int, *key: int | str) -> torch.Generator:
    """CPU generator of one key. Different keys, or keys of different length, are different streams.

    torch's generator takes 32 of the seed's bits: of N keys about N^2 / 2^33 pairs share their stream.
    """
    return torch.Generator().manual_seed(key_seed(seed, *key))


def keyed_noise(shape: Sequence[int], seed: int, *key: int | str) -> Tensor:
    """Standard normal float32 noise of one key, on the CPU."""
    return torch.randn(tuple(shape), generator=keyed_generator(seed, *key), dtype=torch.float32)


def key_seed(seed: int, *key: int | str) -> int:
    """63-bit hash of a key: neighbouring seeds or members share nothing, as sums of the parts would."""
    text = "/".join(f"{type(part).__name__}:{part}" for part in (int(seed), *key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int) -> None:
    """Seeds the process's own generators: torch's (CPU and GPUs), Python's and numpy's."""
    # Hashed, because torch's CPU generator and numpy's heed 32 bits of a seed only.
    hashed = key_seed(seed, "process")
    torch.manual_seed(hashed)
    random.seed(hashed)
    np.random.seed(hashed % 2**32)


def random_state() -> dict[str, Any]:
    """The process's own generators, as plain JSON values."""
    # The run's own noise is keyed and needs none of this; a reward or a model's dropout may draw from them.
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"cpu": _to_hex(torch.get_rng_state()), "python": [version, list(numbers), gauss]}
    kind, words, *rest = np.random.get_state(legacy=True)
    state["numpy"] = [kind, [int(word) for word in words], *rest]
    if torch.cuda.is_available():
        state["cuda"] = _to_hex(torch.cuda.get_rng_state())
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Sets the process's own generators to what `random_state` gave."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(_from_hex(state["cpu"]))
    if "numpy" in state:  # a checkpoint of an earlier version has none
        np.random.set_state(tuple(state["numpy"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_hex(state["cuda"]))


def _to_hex(tensor: Tensor) -> str:
    return bytes(tensor.tolist()).hex()


def _from_hex(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
