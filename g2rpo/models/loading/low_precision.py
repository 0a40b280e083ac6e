"""Float8 for what only a reward sees: the linears of a network's blocks in 8 bits for a while (torchao).

Weights are scaled by row and stored as e4m3, activations are scaled by row at each use, products run on the
tensor cores' 8-bit path at twice the rate of bfloat16 and come out in bfloat16. Modulations and norms,
embedders and adapters stay as they are: a few per cent of the work and the most sensitive part.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def float8_linears(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """While it lasts, the blocks' linears multiply in 8 bits; their weights come back untouched.

    Without gradient, on bfloat16 weights. The 8-bit copies are made here, from the weights as they are now.
    """
    linears = {module: module._parameters["weight"] for block in blocks for module in float8_able(block)}
    try:
        for module, weight in linears.items():
            assert weight is not None
            module._parameters["weight"] = nn.Parameter(_quantised(weight.detach()), requires_grad=False)
        yield
    finally:
        for module, weight in linears.items():
            module._parameters["weight"] = weight


def check_float8(precision: str, base_dtype: str) -> None:
    """Can tails run in 8 bits under these settings?

    Raises:
        ValueError: other settings in the way, or no torchao.
    """
    if precision != "bfloat16" or base_dtype != "compute":
        raise ValueError(
            f"tails_precision=float8 multiplies bfloat16 weights in 8 bits: it needs precision=bfloat16 and "
            f"base_dtype=compute, got precision={precision} and base_dtype={base_dtype}"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ValueError("tails_precision=float8 needs torchao, which is not installed: pip install torchao")


def float8_able(block: nn.Module) -> list[nn.Linear]:
    """The linears of a block that work in 8 bits: not its modulations, nor adapters; sizes of 16 only."""
    return [
        module
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
        and "norm" not in name
        and "lora_" not in name
        and module.in_features % 16 == module.out_features % 16 == 0
    ]


def _quantised(weight: torch.Tensor) -> torch.Tensor:
    from torchao.quantization import Float8MMConfig, Float8Tensor, PerRow
    from torchao.quantization.quantize_.common import KernelPreference
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    how = {
        "granularity": PerRow(),
        "mm_config": Float8MMConfig(use_fast_accum=True),
        "kernel_preference": KernelPreference.TORCH,  # not another package's kernels where one is installed
    }
    activations = QuantizeTensorToFloat8Kwargs(**how)
    return Float8Tensor.from_hp(weight.to(torch.bfloat16), **how, act_quant_kwargs=activations)
