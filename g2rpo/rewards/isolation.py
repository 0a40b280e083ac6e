"""What code of a reward may change in the process, and is put back after each import, construction and call.

A reward is somebody else's code. A default dtype, a switched-off gradient or another working directory that
it leaves behind would change the numbers of the run, or spread its files over two folders.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def restored_state() -> Iterator[None]:
    """Puts back torch's defaults (dtype, device, gradient, precision) and the working directory on exit."""
    dtype, device, gradient = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    deterministic = torch.are_deterministic_algorithms_enabled()
    folder = _working_directory()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        torch.set_grad_enabled(gradient)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            torch.use_deterministic_algorithms(deterministic)
        if folder is not None and _working_directory() != folder:
            os.chdir(folder)


def _working_directory() -> str | None:
    """None where it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
