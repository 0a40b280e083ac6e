"""The dtype of a precision, and the kernels that a process uses for it."""

from __future__ import annotations

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float64": torch.float64}
DTYPES |= dict.fromkeys(("float32", "tf32"), torch.float32)
"""Setting `precision` -> dtype of the forwards."""


def set_precision(precision: str, device: torch.device) -> None:
    """Selects the process's kernels for a precision, for networks and text encoders alike."""
    # Set in both cases: otherwise a float32 policy after a tf32 one would run in tf32.
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if device.type == "cuda":
        # cuDNN's attention backward crashes with few, small heads in bfloat16 (H100, torch 2.11).
        torch.backends.cuda.enable_cudnn_sdp(False)
