"""Temporary float8 computation in a network's linears (torchao), for images that are only scored.

Weights are scaled by row and stored as e4m3, activations are scaled by row at each use. Products use the
tensor cores' 8-bit path, at twice the rate of bfloat16, and are returned in bfloat16. Modulations, norms,
embedders and adapters are unchanged: they are the most sensitive part and only a few per cent of the work.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from g2rpo.runtime.quiet import quiet_packages

KEPT = ("norm", "_mod.", "lora_")
"""Parts of the names of modulations and adapters, which are not run in 8 bits."""


@contextmanager
def float8_linears(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Runs the linears of `blocks` in 8 bits within the block, and restores their weights on exit.

    Weights must be bfloat16, and no gradient is computed. The 8-bit copies are made on entry from the
    current weights.
    """
    linears = {module: module._parameters["weight"] for block in blocks for module in eligible_linears(block)}
    try:
        with quiet_packages():  # torchao is imported for the first weight
            for module, weight in linears.items():
                assert weight is not None
                module._parameters["weight"] = nn.Parameter(_quantised(weight.detach()), requires_grad=False)
        yield
    finally:
        for module, weight in linears.items():
            module._parameters["weight"] = weight


def check_float8(precision: str, base_dtype: str) -> None:
    """Checks that tails can run in 8 bits under these settings.

    Raises:
        ValueError: the settings do not allow it, or torchao is not installed.
    """
    if precision != "bfloat16" or base_dtype != "compute":
        raise ValueError(
            f"tails_precision=float8 multiplies bfloat16 weights in 8 bits: it needs precision=bfloat16 and "
            f"base_dtype=compute, got precision={precision} and base_dtype={base_dtype}"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ValueError("tails_precision=float8 needs torchao, which is not installed: pip install torchao")


def eligible_linears(block: nn.Module) -> list[nn.Linear]:
    """Returns the linears of a block that can run in 8 bits.

    These are the linears whose sizes are multiples of 16, without modulations and adapters.
    """
    return [
        module
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
        and not any(part in name for part in KEPT)
        and module.in_features % 16 == module.out_features % 16 == 0
    ]


def _quantised(weight: torch.Tensor) -> torch.Tensor:
    from torchao.quantization import Float8MMConfig, Float8Tensor, PerRow
    from torchao.quantization.quantize_.common import KernelPreference
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    options = {
        "granularity": PerRow(),
        "mm_config": Float8MMConfig(use_fast_accum=True),
        # Without this, kernels of another package would be used wherever it is installed.
        "kernel_preference": KernelPreference.TORCH,
    }
    activations = QuantizeTensorToFloat8Kwargs(**options)
    return Float8Tensor.from_hp(weight.to(torch.bfloat16), **options, act_quant_kwargs=activations)
