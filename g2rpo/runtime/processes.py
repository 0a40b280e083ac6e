"""The process group of a run, and the collective operations on plain Python values.

    torchrun --nproc-per-node 4 -m g2rpo train RECIPE

The groups of an iteration are divided evenly among the processes; each group lives on one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def start_processes(device: torch.device) -> None:
    """Joins the process group that torchrun started; does nothing in a run of one process.

    Objects and CPU tensors are communicated by gloo, GPU tensors by NCCL.
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
    """Leaves the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """Returns the number of this process, from 0; it is 0 in a run of one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Returns the number of processes of the run."""
    return dist.get_world_size() if dist.is_initialized() else 1


class StopTogether(ValueError):
    """An error that stops all processes of a run: `raise_together` raises it on every process.

    Its only argument is the message, so that it can be pickled and sent to the other processes.
    """


def raise_together(error: StopTogether | None) -> None:
    """Raises this process's error, or else the first error of another process; every process must call this.

    Args:
        error: the error of this process; None: it has none.
    """
    raised = [other for other in gathered(error) if other is not None]
    if raised:
        raise error or raised[0]


def run_together(work: Callable[[], T]) -> T:
    """Runs `work`, in which the processes do not communicate; every process must call this.

    Returns:
        The result of `work` on this process.

    Raises:
        StopTogether: on every process, if `work` raised it on any of them.
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
    """Waits until every process has called this."""
    if dist.is_initialized():
        dist.barrier()


def gathered(value: T) -> list[T]:
    """Returns the values of all processes, ordered by rank; every process must call this.

    Values are pickled, so tensors should be on the CPU.
    """
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def any_process(flag: bool) -> bool:
    """Returns whether `flag` is true on any process; every process must call this."""
    return any(gathered(flag))


def resolve_device(device: str | torch.device) -> torch.device:
    """Converts a device setting: "auto" becomes cuda where there is a GPU, else cpu.

    Raises:
        ValueError: cuda is requested on a machine without a GPU.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device}, but torch finds no GPU here; use device=auto or device=cpu")
    return device
