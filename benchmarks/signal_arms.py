"""The arms of gradient_signal.py: methods, group sizes, noise, and granularity as a control variate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from g2rpo.algorithms.base import Algorithm
from g2rpo.algorithms.dance_grpo import DanceGRPO
from g2rpo.algorithms.g2rpo import G2RPO, G2RPOSingle
from g2rpo.algorithms.mix_grpo import MixGRPO
from g2rpo.rollouts.plan import Plan
from g2rpo.rollouts.score import Rollout

T, STEPS = 8, 4
PLAIN, REFERENCE = "singular {1}", "reference"


@dataclass(frozen=True)
class Arm:
    """A method, its group size G and the noise of its groups.

    With `fine` > 0, granularity is a control variate: all members have the coarse tail, the last of two
    granularities, and `fine` of them also the fine one, the first. (This script computes both for all members
    and ignores the others, which gives the same numbers.)
    """

    algorithm: Algorithm
    group_size: int = 12
    noise: str = "independent"
    fine: int = 0

    @property
    def plan(self) -> Plan:
        return self.algorithm.plan(0, 0)

    @property
    def nfe(self) -> dict[str, int]:
        return controlled_nfe(self.plan, self.group_size, self.fine)

    def advantages(self, groups: list[Rollout], weights: list[float]) -> list[Tensor]:
        """Computes the advantages [K, G] of each group."""
        if not self.fine:
            return self.algorithm.advantages(groups, weights)
        r = weights.index(1.0)
        return [controlled(group.rewards[r], self.fine).clamp(-5, 5) for group in groups]


def controlled_nfe(plan: Plan, group_size: int, fine: int) -> dict[str, int]:
    """Counts forwards like Plan.nfe, with fine tails of only `fine` members; 0 is all members."""
    nfe = plan.nfe(group_size)
    if fine:
        coarse = replace(plan, branches=tuple(replace(b, tails=b.tails[1:]) for b in plan.branches))
        nfe["total"] -= (group_size - fine) * (plan.nfe(1)["tails"] - coarse.nfe(1)["tails"])
    return nfe


def controlled(rewards: Tensor, fine: int, share: float = 0.7) -> Tensor:
    """Computes advantages [K, G] from rewards [K, 2, G], fine and coarse, using `fine` of the fine ones.

    With z standardised, A = share z_coarse for all members, plus G / fine (z_fine - share z_coarse) for
    `fine` of them. In the mean over members this is the gradient of the fine advantage, with the least
    variance if `share` is the correlation of both.
    """
    size = rewards.shape[-1]
    few, coarse = rewards[:, 0, :fine], rewards[:, 1]
    z = (coarse - coarse.mean(-1, keepdim=True)) / coarse.std(-1, keepdim=True).clamp(min=1e-8)
    scale = few.std(-1, keepdim=True).clamp(min=1e-8)
    centre = few.mean(-1, keepdim=True) - share * scale * z[:, :fine].mean(-1, keepdim=True)
    advantages = share * z
    advantages[:, :fine] += size / fine * ((few - centre) / scale - share * z[:, :fine])
    return advantages


def make_arms(reference_size: int) -> dict[str, Arm]:
    """Creates the arms; dance_grpo takes one optimizer step, to have one gradient."""

    def singular(*granularities: int, **other: Any) -> Arm:
        return Arm(G2RPO(num_steps=T, train_steps=STEPS, granularities=granularities), **other)

    plain = G2RPOSingle(num_steps=T, train_steps=STEPS)
    path = replace(DanceGRPO(num_steps=T, train_fraction=1.0), update="once")
    nfe = [arm.plan.nfe(12) for arm in (Arm(plain), singular(1, 2, 3))]
    equal = round(12 * (nfe[1]["total"] - nfe[1]["anchor"]) / (nfe[0]["total"] - nfe[0]["anchor"]))
    return {
        "path, dance 0.3": Arm(path),
        "path, flow 0.7": Arm(replace(path, diffusion="flow", eta=0.7)),
        "window of 4, flow 0.7": Arm(MixGRPO(num_steps=T, window=STEPS, update="once")),
        "window of 4, Flash 0.4": Arm(MixGRPO(num_steps=T, window=STEPS, update="once", flash=0.4)),
        PLAIN: Arm(plain),
        f"singular {{1}}, G = {equal}": Arm(plain, equal),
        "singular {1}, G = 4": Arm(plain, 4),
        "singular {1, 2}": singular(1, 2),
        "singular {1, 2, 3}": singular(1, 2, 3),
        "singular {2}": singular(2),
        "singular {3}": singular(3),
        "singular {3}, G = 4": singular(3, group_size=4),
        "{1, 2, 3}, antithetic": singular(1, 2, 3, noise="antithetic"),
        "{1, 2, 3}, orthogonal": singular(1, 2, 3, noise="orthogonal"),
        "{3} for 24, {1} for 6": singular(1, 3, group_size=24, fine=6),
        "{3} for 24, {1} for 4": singular(1, 3, group_size=24, fine=4),
        "{2} for 18, {1} for 6": singular(1, 2, group_size=18, fine=6),
        REFERENCE: Arm(plain, reference_size),
    }
