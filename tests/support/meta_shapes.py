"""Parameters and operations of networks that are built on the meta device, to check closed formulas."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def params(module: nn.Module, name_has: str = "") -> int:
    return sum(value.numel() for name, value in module.named_parameters() if name_has in name)


@torch.no_grad()
def flops(forward: Callable[..., object], **inputs: Any) -> int:
    """Counted operations of `forward`; sizes among the inputs become empty tensors on the meta device."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        tensors = {
            name: torch.empty(value) if isinstance(value, tuple) else value for name, value in inputs.items()
        }
        forward(**tensors)
    return counter.get_total_flops()


def changed(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {**config, **changes}
