"""Many processes as one run: the process group, and what all of them must know or do together.

    torchrun --nproc-per-node 4 -m g2rpo train RECIPE

Groups of an iteration are divided evenly; each lives on one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    pass


import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

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


def resolve_device(device: str | torch.device) -> torch.device:
    """`"auto"` -> cuda where there is a GPU, else cpu; anything else as torch reads it.

    Raises:
        ValueError: cuda asked for on a machine without.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch sees no GPU here; use device=auto or device=cpu")
    return device
