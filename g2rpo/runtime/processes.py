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

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What each of several processes needs besides WORLD_SIZE."""


def environment_number(name: str, default: int) -> int:
    """The value of one of torchrun's environment variables; an empty one counts as not set.

    Raises:
        ValueError: it is not a whole number from 0.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal():
        raise ValueError(
            f"the environment variable {name}={text!r} is not a whole number from 0; torchrun sets it for "
            f"several processes, so unset it for a run of one (unset {name})"
        )
    return int(text)


def is_first_process() -> bool:
    """Whether this process prints for the whole run; known also where there is no process group (yet)."""
    return environment_number("RANK", 0) == 0


def start_processes(device: torch.device) -> None:
    """Joins the process group that torchrun started; does nothing in a run of one process.

    Objects and CPU tensors are communicated by gloo, GPU tensors by NCCL.

    Raises:
        ValueError: several processes, but a variable that torchrun sets for them is missing.
    """
    if environment_number("WORLD_SIZE", 1) <= 1 or dist.is_initialized():
        return
    if missing := [name for name in TORCHRUN_VARIABLES if not os.environ.get(name, "").strip()]:
        raise ValueError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that this is one of several processes, but "
            f"{', '.join(missing)} is not set; start them with torchrun, or unset WORLD_SIZE for a run of one"
        )
    if device.type == "cuda":
        torch.cuda.set_device(environment_number("LOCAL_RANK", 0))
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


def copied_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor to the device; from the CPU to a GPU without blocking the host, from pinned memory."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


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
