"""Copies of the weights that follow them (the EMA, a lagged policy), and temporary replacement of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from g2rpo.runtime.sharding import local


@contextmanager
def swapped_weights(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Temporarily loads `values` and restores the originals on exit.

    Args:
        parameters: name -> parameter, changed in place.
        values: name -> replacement of the same shape and sharding, such as the EMA. Parameters without an
            entry keep their own values.
    """
    originals = {name: parameters[name].detach().clone() for name in values}

    @torch.no_grad()
    def load(source: Mapping[str, Tensor]) -> None:
        for name, value in source.items():
            local(parameters[name]).copy_(local(value))

    try:
        load(values)
        yield
    finally:
        load(originals)


@torch.no_grad()
def update_ema(
    ema: Mapping[str, Tensor], parameters: Mapping[str, Tensor], decay: float, iteration: int
) -> None:
    """Updates the EMA in place: ema += (1 - d) (parameter - ema), d = min(decay, (n + 1) / (n + 10)).

    The decay is smaller at first, because otherwise early averages would be mostly the base model.

    Args:
        ema: name -> average; if empty, nothing happens.
        parameters: name -> current parameter, with the same names in the same order.
        decay: in [0, 1).
        iteration: n, the iterations completed before this one.
    """
    follow(ema, parameters, min(decay, (iteration + 1) / (iteration + 10)))


@torch.no_grad()
def follow(copies: Mapping[str, Tensor], parameters: Mapping[str, Tensor], kept: float) -> None:
    """Moves copies of weights in place: copy <- kept copy + (1 - kept) parameter; kept 0 copies exactly.

    Args:
        copies: name -> copy; if empty, nothing happens.
        parameters: name -> current parameter, with the same names in the same order.
        kept: in [0, 1].
    """
    if copies:
        own, current = ([local(t) for t in tensors.values()] for tensors in (copies, parameters))
        torch._foreach_lerp_(own, current, 1 - kept)
