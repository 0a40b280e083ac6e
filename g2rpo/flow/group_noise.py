"""The noise of a group's members at one step, which may be drawn to differ more than by chance.

A group is an evolution-strategies estimate around one state: its gradient is a sum of advantages times noise.
Known ways to lower that estimate's variance cost no forward. In all of them each member's noise is standard
normal by itself; only how the members depend on each other changes.

    independent   the methods' papers
    antithetic    members 2i and 2i + 1 get +e and -e (Salimans et al., arXiv:1703.03864, section 2.1): what
                  e does to the reward in even order cancels. With an odd G the last member has no mirror
    orthogonal    directions at right angles, lengths kept (Choromanski et al., arXiv:1804.02395)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from g2rpo.runtime.random import keyed_noise

GROUP_NOISES = ("independent", "antithetic", "orthogonal")


def group_noise(
    kind: str, shape: Sequence[int], group_size: int, key: tuple[int, int, int], step: int
) -> Tensor:
    """Noise [G, *shape] of a group at one step, float32 on the CPU.

    Args:
        kind: one of GROUP_NOISES.
        shape: of one state.
        key: (seed, iteration, index of the prompt in its stream).

    Raises:
        ValueError: an unknown kind, or more orthogonal members than a state has dimensions.
    """
    if kind not in GROUP_NOISES:
        raise ValueError(f"unknown noise {kind!r}: use one of {', '.join(GROUP_NOISES)}")

    def drawn(member: int) -> Tensor:
        return keyed_noise(shape, *key, "step", step, member)

    if kind == "antithetic":
        return torch.stack([-drawn(m - 1) if m % 2 else drawn(m) for m in range(group_size)])
    noise = torch.stack([drawn(m) for m in range(group_size)])
    return noise if kind == "independent" else orthogonal(noise)


def orthogonal(noise: Tensor) -> Tensor:
    """Independent normal rows [G, ...] turned to stand at right angles, each as long as it was.

    The directions are uniform on the sphere (QR with a positive diagonal, Mezzadri, math-ph/0609050) and
    do not depend on the lengths, so each row is still standard normal.
    """
    rows = noise.flatten(1).double()
    if len(rows) > rows.shape[1]:
        raise ValueError(f"{len(rows)} members cannot be orthogonal in {rows.shape[1]} dimensions")
    q, r = torch.linalg.qr(rows.T)
    directions = (q * r.diagonal().sign()).T
    return (directions * rows.norm(dim=1, keepdim=True)).to(noise.dtype).unflatten(1, noise.shape[1:])
