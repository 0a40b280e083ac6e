"""AdamW, with moments in float32 or in 8 bits, and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from g2rpo.runtime.quiet import quiet_packages


@quiet_packages()
def make_optimizer(parameters: Iterable[Tensor], settings: Any) -> torch.optim.Optimizer:
    """AdamW with the values of the settings; `adamw8bit` is torchao's, with moments in 8 bits."""
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


def fill_missing_gradients(parameters: Iterable[Tensor]) -> None:
    """Sets the gradient of parameters that the loss does not depend on to 0.

    Some networks have such parameters: where only one of two streams is the output, the last layers of the
    other have no effect. Without a gradient, the optimizer would keep no moments of them, and its checkpoint
    would not fit when the run is resumed.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of every parameter group; torchao needs the same tensor every time."""
    in_tensor = type(optimizer).__module__.startswith("torchao.")
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = torch.tensor(rate) if in_tensor else rate


def learning_rate(
    lr: float, iteration: int, iterations: int, warmup_iterations: int, schedule: str = "constant"
) -> float:
    """Learning rate of an iteration: a linear warm-up to `lr`, then constant, linear or cosine decay.

    It depends only on the arguments, so that a resumed run needs no state. It is above 0 in the first and the
    last iteration: `linear` ends one step above 0.

    Args:
        lr: rate after the warm-up.
        iteration: index of the iteration, from 0.
        iterations: length of the run, at which the decay reaches 0.
        warmup_iterations: length of the warm-up; 0 = none.
        schedule: "constant", "linear" or "cosine".
    """
    if iteration < warmup_iterations:
        return lr * (iteration + 1) / warmup_iterations
    done = (iteration - warmup_iterations) / max(iterations - warmup_iterations, 1)
    decay = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return lr * decay[schedule]
