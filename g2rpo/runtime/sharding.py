"""Sharding of a network's parameters over several processes, by FSDP2 (fully_shard, arXiv:2304.11277).

Trained parameters are sharded block by block, in float32; forwards run in the compute dtype and gradients
are reduced in float32. During a rollout the complete network is `resident` on every process in the compute
dtype, so its forwards do not communicate, and the processes need not run in step.

torch's modules for sharding are imported where they are needed, because they take longer to import than the
rest of torch, and most commands shard nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from g2rpo.runtime.processes import world_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_sharded(parameters: Mapping[str, Tensor]) -> None:
    """Checks that the processes train one model together, and not one each.

    Args:
        parameters: name -> trained parameter.

    Raises:
        ValueError: there are several processes, and a parameter is not sharded over them.
    """
    plain = [name for name, parameter in parameters.items() if not hasattr(parameter, "to_local")]
    if world_size() > 1 and plain:
        raise ValueError(
            f"{len(plain)} trained parameters ({plain[0]}, …) are not sharded over the {world_size()} "
            "processes, so each process would train a model of its own: start one process, or let the policy "
            "or the `load` of its family shard them over the device mesh (runtime/sharding.py)"
        )


def sharding_mesh(device: torch.device, shard_size: int | None = None) -> DeviceMesh | None:
    """Returns the device mesh over which parameters are sharded; None for a run of one process.

    Args:
        device: its type selects the backend.
        shard_size: number of processes that together hold one copy of the parameters, such as those of one
            node (HSDP: the gradients of the copies are all-reduced); None: all processes.

    Raises:
        ValueError: shard_size does not divide the number of processes.
    """
    size = world_size()
    if size == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    if shard_size is None or shard_size == size:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    if shard_size > size or size % shard_size:
        raise ValueError(
            f"shard_size={shard_size} does not divide the {size} processes of this run; "
            f"use a divisor of {size}"
        )
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
    """Shards `module` in place, each block separately and the rest together; parameters become DTensors.

    Args:
        module: the network.
        blocks: its repeated blocks, in order; they are submodules of `module`.
        mesh: the result of `sharding_mesh`.
        param_dtype: dtype of the gathered parameters; None: that of the parameters.
        reduce_dtype: dtype in which gradients are reduced; None: `param_dtype`.
        ignored: parameters that every process keeps in full, such as a frozen base.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Transformer blocks may return views, but nothing writes into them, so the warning does not apply.
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
    """Keeps all sharded parameters gathered within the block.

    Forwards without gradient then do not communicate. Parameters must not change within the block. A module
    that is not sharded is left unchanged.
    """
    from torch.distributed.fsdp import FSDPModule

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
    """Returns this process's shard of a DTensor; any other tensor is returned unchanged."""
    # Only a DTensor has the method.
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the full tensor, gathered if it is a DTensor; then every process of its mesh must call this."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered
