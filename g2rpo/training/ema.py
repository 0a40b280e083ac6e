"""The running mean of the weights (an EMA), and weights that are swapped in for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from g2rpo.runtime.sharding import local


@contextmanager
def holding(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Parameters that have `values` for a while, such as their running mean; the others keep their own."""
    live = {name: parameters[name].detach().clone() for name in values}

    @torch.no_grad()
    def put(source: Mapping[str, Tensor]) -> None:
        for name, value in source.items():
            local(parameters[name]).copy_(local(value))

    try:
        put(values)
        yield
    finally:
        put(live)


@torch.no_grad()
def follow(means: Mapping[str, Tensor], parameters: Mapping[str, Tensor], decay: float, step: int) -> None:
    """Moves running means of the weights (an EMA) on, after `step` iterations and this one.

    Young averages follow quickly: the first iterations would otherwise be mostly the base model.
    """
    if means:
        mean, now = ([local(t) for t in some.values()] for some in (means, parameters))
        torch._foreach_lerp_(mean, now, 1 - min(decay, (step + 1) / (step + 10)))
