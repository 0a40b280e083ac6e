"""Noise of a group's members at one noise step or at the start, independent or coupled to reduce variance.

A group is an evolution-strategies estimate around one state: its gradient is a sum of advantages times noise.
The variance of that estimate can be reduced without additional forwards by coupling the members' noise. Each
member's noise stays standard normal on its own; only the dependence between members changes.

    independent   as in the papers of the methods
    antithetic    members 2i and 2i + 1 get +e and -e (Salimans et al., arXiv:1703.03864, section 2.1), which
                  cancels the even-order effects of e on the reward; with an odd G the last member is unpaired
    orthogonal    orthogonal directions with unchanged lengths (Choromanski et al., arXiv:1804.02395)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from g2rpo.runtime.random import keyed_noise

GROUP_NOISES = ("independent", "antithetic", "orthogonal")


def group_noise(
    kind: str, shape: Sequence[int], group_size: int, key: tuple[int, int, int], step: int
) -> Tensor:
    """Returns the noise of a group at one noise step.

    Args:
        kind: one of GROUP_NOISES.
        shape: shape of one state, such as (L, C).
        group_size: number of members, G.
        key: (seed, iteration, prompt_index).
        step: index k of the noise step.

    Returns:
        [G, *shape], float32, on the CPU.

    Raises:
        ValueError: the kind is unknown, or there are more orthogonal members than a state has dimensions.
    """
    return _coupled(kind, group_size, lambda member: keyed_noise(shape, *key, "step", step, member))


def start_noise(kind: str, shape: Sequence[int], group_size: int, key: tuple[int, int, int]) -> Tensor:
    """Returns the initial noise of a group's members, each its own; arguments and errors as `group_noise`."""
    return _coupled(kind, group_size, lambda member: keyed_noise(shape, *key, "start", member))


def _coupled(kind: str, group_size: int, member_noise: Callable[[int], Tensor]) -> Tensor:
    if kind not in GROUP_NOISES:
        raise ValueError(f"unknown noise {kind!r}: use one of {', '.join(GROUP_NOISES)}")
    if kind == "antithetic":
        return torch.stack([-member_noise(m - 1) if m % 2 else member_noise(m) for m in range(group_size)])
    noise = torch.stack([member_noise(m) for m in range(group_size)])
    return noise if kind == "independent" else orthogonal(noise)


def orthogonal(noise: Tensor) -> Tensor:
    """Makes independent standard normal rows orthogonal and keeps their lengths.

    The directions are uniform on the sphere (QR with a positive diagonal, Mezzadri, math-ph/0609050) and
    do not depend on the lengths, so each row is still standard normal.

    Args:
        noise: [G, ...]; computed in float64.

    Returns:
        [G, ...], with the dtype of `noise`.

    Raises:
        ValueError: G exceeds the number of dimensions of a row.
    """
    rows = noise.flatten(1).double()
    if len(rows) > rows.shape[1]:
        raise ValueError(
            f"{len(rows)} members cannot be orthogonal in {rows.shape[1]} dimensions; use a smaller "
            "group, or antithetic or independent noise"
        )
    q, r = torch.linalg.qr(rows.T)
    directions = (q * r.diagonal().sign()).T
    return (directions * rows.norm(dim=1, keepdim=True)).to(noise.dtype).unflatten(1, noise.shape[1:])
