"""Sharding: the parameters of a network over several processes, by FSDP2 (fully_shard, arXiv:2304.11277).

Trained parameters are sharded a block of the network at a time, in float32; compute runs in the compute
dtype, gradients are reduced in float32. During a rollout the whole network is `resident` on every process in
the compute dtype, so its forwards communicate nothing, and processes may run apart.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from g2rpo.runtime.processes import world_size


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
