"""The process group of a run, and the collective operations on plain Python values.

    torchrun --nproc-per-node 4 -m g2rpo train RECIPE

The groups of an iteration are divided evenly among the processes; each group lives on one process.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
LOG = logging.getLogger(__name__)

WAITING_SECONDS = 30.0
"""Time after which a process says that it waits for the others to start."""

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
            f"the environment variable {name}={text!r} is not a whole number >= 0; torchrun sets it for "
            f"several processes, so unset it for a run of one process (unset {name})"
        )
    return int(text)


def is_first_process() -> bool:
    """Whether this process prints for the whole run; known also where there is no process group (yet)."""
    return environment_number("RANK", 0) == 0


def check_environment(*, communicates: bool = True) -> None:
    """Checks torchrun's environment variables against each other, without waiting for another process.

    Args:
        communicates: the processes will meet at MASTER_ADDR; otherwise each needs its RANK alone.

    Raises:
        ValueError: one is missing, is no number, or contradicts another.
    """
    size = environment_number("WORLD_SIZE", 1)
    numbers = {name: environment_number(name, 0) for name in ("RANK", "LOCAL_RANK")}
    local_size = environment_number("LOCAL_WORLD_SIZE", 0)
    needed = TORCHRUN_VARIABLES if communicates else ("RANK",)
    if size > 1 and (missing := [n for n in needed if not os.environ.get(n, "").strip()]):
        raise ValueError(
            f"WORLD_SIZE={size} says that this is one of several processes, but {', '.join(missing)} is not "
            f"set; {_START}"
        )
    given = " ".join(
        f"{name}={os.environ[name]}" for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if os.environ.get(name)
    )
    for name, number in numbers.items():
        if number >= max(size, 1):
            all_of = f"WORLD_SIZE={size}" if os.environ.get("WORLD_SIZE", "").strip() else "no WORLD_SIZE"
            raise ValueError(
                f"{given}: with {all_of} the processes have the numbers 0 to {max(size, 1) - 1}, so {name} "
                f"cannot be {number}; {_START}"
            )
    if size <= 1:
        return
    if numbers["LOCAL_RANK"] > numbers["RANK"]:
        raise ValueError(f"{given}: LOCAL_RANK, counted on this host, cannot be above RANK; {_START}")
    if local_size and not numbers["LOCAL_RANK"] < local_size <= size:
        raise ValueError(
            f"{given} LOCAL_WORLD_SIZE={local_size}: the number of processes on this host must be above "
            f"LOCAL_RANK and at most WORLD_SIZE; {_START}"
        )
    if communicates:
        _check_meeting_point()


_START = "start them with torchrun, or unset WORLD_SIZE, RANK and LOCAL_RANK for a run of one process"


def _check_meeting_point() -> None:
    address, port = os.environ["MASTER_ADDR"].strip(), environment_number("MASTER_PORT", 0)
    if not 0 < port < 65536:
        raise ValueError(f"MASTER_PORT={port} is not a port, 1 to 65535; {_START}")
    try:
        socket.getaddrinfo(address, port)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"MASTER_ADDR={address} is not the name of a reachable host: {error}; {_START}"
        ) from error


def start_processes(device: torch.device) -> None:
    """Joins the process group that torchrun started; does nothing in a run of one process.

    Objects and CPU tensors are communicated by gloo, GPU tensors by NCCL.

    Raises:
        ValueError: torchrun's variables are incomplete or contradict each other, this host has too few GPUs
            for its processes, or the processes do not find each other.
    """
    check_environment()
    if environment_number("WORLD_SIZE", 1) <= 1 or dist.is_initialized():
        return
    local_rank = environment_number("LOCAL_RANK", 0)
    if device.type == "cuda":
        if local_rank >= (count := torch.cuda.device_count()):
            raise ValueError(
                f"LOCAL_RANK={local_rank}, but torch finds {count} GPU(s) on this host, one per process; "
                f"start at most {count} processes here, or use device=cpu"
            )
        torch.cuda.set_device(local_rank)
    meeting = f"{os.environ['MASTER_ADDR'].strip()}:{os.environ['MASTER_PORT'].strip()}"
    who = f"process {os.environ['RANK'].strip()} of {os.environ['WORLD_SIZE'].strip()}"
    waiting = threading.Timer(
        WAITING_SECONDS, LOG.warning, [f"{who} is still waiting for the others at {meeting}; {_START}"]
    )
    waiting.daemon = True
    waiting.start()
    try:
        if device.type == "cuda":
            dist.init_process_group(
                "cpu:gloo,cuda:nccl", device_id=torch.device("cuda", torch.cuda.current_device())
            )
        else:
            dist.init_process_group("gloo")
    except (dist.DistError, RuntimeError) as error:
        raise ValueError(f"{who} did not find the others at {meeting}: {error}; {_START}") from error
    finally:
        waiting.cancel()


def end_processes() -> None:
    """Leaves the process group, if this process is in one and no `one_group` block is active."""
    if dist.is_initialized() and not _kept_groups:
        dist.destroy_process_group()


_kept_groups: list[torch.device] = []


@contextmanager
def one_group(device: torch.device) -> Iterator[None]:
    """Joins the process group for the block and keeps it for all work in it, which may end processes itself.

    A group is not joined twice: its second meeting would find what the first one left at the meeting point.

    Raises:
        ValueError: as `start_processes`.
    """
    start_processes(device)
    _kept_groups.append(device)
    try:
        yield
    finally:
        _kept_groups.pop()
        end_processes()


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
