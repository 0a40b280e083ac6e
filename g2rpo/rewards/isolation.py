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
import locale
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import overrides
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from g2rpo.runtime.random import foreign_stream

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Reads a setting of the process, and writes what was read."""

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM")]

TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


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


def _umask() -> int:
    mask = os.umask(0o077)  # it can only be read by setting it
    os.umask(mask)
    return mask


def _timers() -> list[tuple[float, float]]:
    """Seconds until each timer of the process sends its signal, and its period; (0, 0): it is off."""
    return [signal.getitimer(timer) for timer in TIMERS]


def _set_timers(values: list[tuple[float, float]]) -> None:
    for timer, (seconds, period) in zip(TIMERS, values, strict=True):
        now, period_now = signal.getitimer(timer)
        if not (0 < now <= seconds and period_now == period):  # one that only runs on is left alone
            signal.setitimer(timer, seconds, period)


def _set_blocked(signals: set[int]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)


def _logs() -> dict[str, tuple[int, bool, bool]]:
    """Level, `disabled` and `propagate` of g2rpo's loggers and of the root."""
    loggers = {"": logging.root} | {
        name: logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.split(".")[0] == "g2rpo"
    }
    return {name: (log.level, log.disabled, log.propagate) for name, log in loggers.items()}


def _set_logs(values: dict[str, tuple[int, bool, bool]]) -> None:
    for name, (level, disabled, propagate) in values.items():
        log = logging.getLogger(name or None)
        log.setLevel(level)
        log.disabled, log.propagate = disabled, propagate


def _search_path() -> list[str]:
    return list(sys.path)


def _complete_search_path(before: list[str]) -> None:
    """Puts back what is missing; what was added stays, because the reward may import from it later."""
    sys.path.extend(entry for entry in before if entry not in sys.path)


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
    (_search_path, _complete_search_path),
    (sys.gettrace, sys.settrace),
    (sys.getprofile, sys.setprofile),
    _attribute(logging.root.manager, "disable"),
    _list(logging.root, "handlers"),
    (_logs, _set_logs),
    (_handlers, _set_handlers),
    (_timers, _set_timers),
    (lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()), _set_blocked),
    (_umask, os.umask),
    (socket.getdefaulttimeout, socket.setdefaulttimeout),
    (lambda: locale.setlocale(locale.LC_ALL), lambda value: locale.setlocale(locale.LC_ALL, value)),
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
            with _descriptors(), foreign_stream(reward), _own_environment(reward), _modes():
                yield
    finally:
        for read, write, value in before:
            if read() != value:
                write(value)
        torch.set_grad_enabled(gradient)


@contextmanager
def _descriptors() -> Iterator[None]:
    """Puts back the file descriptors 0, 1 and 2 on exit, where code has closed or redirected them.

    The next file that is opened, such as a checkpoint, would take the place of a closed one, and receive what
    is printed.
    """
    copies = {}
    for number in (0, 1, 2):
        with suppress(OSError):  # closed by the caller of the process
            copies[number] = os.dup(number)
    try:
        yield
    finally:
        for number, copy in copies.items():
            if not _same_file(number, copy):
                os.dup2(copy, number)
            os.close(copy)


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False


@contextmanager
def _modes() -> Iterator[None]:
    """Ends the modes of torch that the block opens and leaves open, such as `torch.device("meta")`."""
    functions, device = _get_current_function_mode_stack(), _device.CURRENT_DEVICE
    dispatches = {id(mode) for mode in _get_current_dispatch_mode_stack()}
    try:
        yield
    finally:
        if (now := _get_current_function_mode_stack()) != functions:
            for _ in now:  # a device that C++ entered has no __exit__ of its own
                overrides._pop_mode()
            for mode in functions:
                overrides._push_mode(mode)
        _device.CURRENT_DEVICE = device
        for mode in reversed(_get_current_dispatch_mode_stack()):
            if id(mode) not in dispatches:
                mode.__exit__(None, None, None)


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
