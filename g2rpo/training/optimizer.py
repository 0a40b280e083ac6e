"""AdamW, in float32 or with moments in 8 bits, its learning rate, and the running mean of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def make_optimizer(parameters: Iterable[Tensor], settings: Any) -> torch.optim.Optimizer:
    """AdamW with the settings' values; `adamw8bit` is torchao's, with the moments in 8 bits."""
    arguments: dict[str, Any] = {
        "lr": settings.lr,
        "betas": (settings.adam_beta1, settings.adam_beta2),
        "eps": settings.adam_eps,
        "weight_decay": settings.weight_decay,
    }
    if settings.optimizer == "adamw8bit":
        from torchao.optim import AdamW8bit

        return AdamW8bit(list(parameters), **arguments)
    return torch.optim.AdamW(list(parameters), fused=True, **arguments)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets it in every group; torchao wants a tensor there, always the same one."""
    in_tensor = type(optimizer).__module__.startswith("torchao.")
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = torch.tensor(rate) if in_tensor else rate


def learning_rate(
    lr: float, iteration: int, iterations: int, warmup_iterations: int, schedule: str = "constant"
) -> float:
    """Rate of the update of `iteration`, 0 the first: linear warm-up to `lr`, then the schedule's fall to 0.

    A function of the iteration alone, so that a resumed run needs no state for it. The first update already
    moves, and so does the last: `linear` ends one step above 0.
    """
    if iteration < warmup_iterations:
        return lr * (iteration + 1) / warmup_iterations
    done = (iteration - warmup_iterations) / max(iterations - warmup_iterations, 1)
    fall = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return lr * fall[schedule]
