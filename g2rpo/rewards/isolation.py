"""What code of a reward may change in the process, and is put back after each import, construction and call.

A reward is somebody else's code. A default dtype, a switched-off gradient, another seed or another working
directory that it leaves behind would change the numbers of the run, or spread its files over two folders.

Two kinds of change stay with the reward that made them. Its random numbers continue where its last call ends,
in a stream of its own (`runtime.random.foreign_stream`), which a checkpoint stores. Environment variables
that its module sets, such as a key for its client, are set again for its next call. Not put back are changes
of objects that it can reach, such as a function of torch that it replaces.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from g2rpo.runtime.random import foreign_stream

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Reads a setting of the process, and writes what was read."""

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM")]


def _attribute(owner: Any, name: str) -> Setting:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _list(owner: Any, name: str) -> Setting:
    """A list whose content is put back: other code may hold the list itself."""

    def write(value: tuple[list[Any], list[Any]]) -> None:
        kept, content = value
        kept[:] = content
        setattr(owner, name, kept)

    return lambda: (getattr(owner, name), list(getattr(owner, name))), write


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _gpu() -> int | None:
    """The current GPU; None if this process does not use one."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _set_gpu(number: int | None) -> None:
    if number is not None:
        torch.cuda.set_device(number)


def _set_deterministic(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


def _set_autocast(states: list[tuple[str, bool, torch.dtype]]) -> None:
    for device, enabled, dtype in states:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _set_filters(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]  # a list, which typeshed declares as a sequence
    warnings._filters_mutated()  # type: ignore[attr-defined]  # what catch_warnings does: forgets cached matches


def _working_directory() -> str | None:
    """None where it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _set_working_directory(folder: str | None) -> None:
    if folder is not None:
        os.chdir(folder)


def _handlers() -> list[Any]:
    return [signal.getsignal(number) for number in SIGNALS]


def _set_handlers(handlers: list[Any]) -> None:
    if threading.current_thread() is threading.main_thread():  # no other thread can set them
        for number, handler in zip(SIGNALS, handlers, strict=True):
            if handler is not None:  # None: installed by code in C
                signal.signal(number, handler)


SETTINGS: tuple[Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, _set_device),
    (_gpu, _set_gpu),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
    ),
    (
        lambda: [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ],
        _set_autocast,
    ),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_num_threads, torch.set_num_threads),
    *(
        _attribute(torch.backends.cudnn, name)
        for name in ("allow_tf32", "benchmark", "deterministic", "enabled")
    ),
    (np.geterr, lambda errors: np.seterr(**errors)),
    (lambda: list(warnings.filters), _set_filters),
    _list(sys, "argv"),
    *(_attribute(sys, name) for name in ("stdout", "stderr", "excepthook")),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    _attribute(logging.root.manager, "disable"),
    (_handlers, _set_handlers),
    (_working_directory, _set_working_directory),
)
"""Settings of the process that are put back, besides gradient mode, generators and environment."""

_environments: dict[str, dict[str, str | None]] = {}
"""Module of a reward -> environment variables that it changed; None: it removed the variable."""

_active: list[str] = []
"""Modules of the blocks that are open."""


@contextmanager
def restored_state(reward: str | None = None) -> Iterator[None]:
    """Puts back the settings of the process, its random generators and its environment on exit.

    Args:
        reward: name of the reward whose code runs in the block. Its random numbers and its environment
            variables then continue where its last block ended; None: they are only put back.
    """
    before = [(read, write, read()) for read, write in SETTINGS]
    gradient = torch.is_grad_enabled()
    try:
        # A guard that the reward opens and leaves open ends with the guard around it; it also sets the
        # gradient mode, which is set again on either side.
        with torch.inference_mode(torch.is_inference_mode_enabled()):
            torch.set_grad_enabled(gradient)
            with foreign_stream(reward), _own_environment(reward):
                yield
    finally:
        for read, write, value in before:
            if read() != value:
                write(value)
        torch.set_grad_enabled(gradient)


@contextmanager
def _own_environment(reward: str | None) -> Iterator[None]:
    """Puts back environment variables on exit; a reward finds those that its module changed before."""
    module = "" if reward is None else reward.partition(":")[0]
    if module in _active:  # the block around this one puts them back
        yield
        return
    before = dict(os.environ)
    _set_environment(_environments.get(module, {}))
    _active.append(module)
    try:
        yield
    finally:
        _active.remove(module)
        now = dict(os.environ)
        changed = {key: now.get(key) for key in now | before if now.get(key) != before.get(key)}
        _set_environment({key: before.get(key) for key in changed})
        if reward is not None:
            _environments[module] = changed


def _set_environment(values: dict[str, str | None]) -> None:
    for key, value in values.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
