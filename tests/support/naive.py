"""A slow reference rollout: one sample at a time, no shared computation, every formula written out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from g2rpo.models.policy import Policy
from g2rpo.rollouts.plan import Branch, Plan
from g2rpo.runtime.random import keyed_noise


@dataclass
class Walk:
    """One member's path along one branch and one tail."""

    image: Tensor
    x: list[Tensor] = field(default_factory=list)
    x_next: list[Tensor] = field(default_factory=list)
    log_prob: list[float] = field(default_factory=list)


def naive_walk(
    policy: Policy,
    plan: Plan,
    sigmas: Tensor,
    prompt: str,
    key: tuple[int, int, int],
    branch: Branch,
    positions: tuple[int, ...],
    member: int,
    kind: str,
    eta: float,
) -> Walk:
    """Computes the path from the initial noise through anchor, noise steps and tail to the image."""
    levels = [*sigmas.tolist(), *plan.extra_sigmas]
    cond = policy.encode([prompt])
    own = (member,) if plan.individual_noise else ()
    x = keyed_noise(policy.latent_shape, *key, "start", *own)[None]
    walk = Walk(image=x)
    way = [*range(branch.noise_steps[-1] + 1 if branch.noise_steps else 0), *positions]
    previous: tuple[Tensor, float] | None = None
    for position, next_position in pairwise(way):
        s, s_next = levels[position], levels[next_position]
        dt = s_next - s
        with torch.no_grad():
            v = policy.velocity(x, torch.tensor([s]), cond)
        x0 = x - s * v
        if position in branch.noise_steps:
            g = eta * math.sqrt(s / (1 - (levels[1] if s == 1 else s))) if kind == "flow" else eta
            mean = x * (1 + g**2 * dt / (2 * s)) + v * (1 + g**2 * (1 - s) / (2 * s)) * dt
            std = g * math.sqrt(-dt)
            x_next = mean + std * keyed_noise(policy.latent_shape, *key, "step", position, member)
            error = (x_next - mean).double()
            density = -(error**2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)
            walk.x.append(x[0])
            walk.x_next.append(x_next[0])
            walk.log_prob.append(density.mean().item())
        elif (
            plan.solver == "dpm2m"
            and position > max(branch.noise_steps, default=-1)
            and s_next > 0
            and previous
        ):
            h = math.log((1 - s_next) / s_next) - math.log((1 - s) / s)
            x0_before, s_before = previous
            # if the previous step started at pure noise, its log-SNR is -inf and the correction 0
            r = (
                math.inf
                if s_before == 1
                else (math.log((1 - s) / s) - math.log((1 - s_before) / s_before)) / h
            )
            better = x0 + (x0 - x0_before) / (2 * r)
            x_next = s_next / s * x - (1 - s_next) * (math.exp(-h) - 1) * better
        else:
            x_next = x + v * dt
        previous = (x0, s)
        x = x_next
    walk.image = x[0]
    return walk


def naive_ode(policy: Policy, sigmas: Tensor, prompt: str, key: tuple[int, int, int]) -> Tensor:
    """Computes the anchor's clean latents [L, C] by the ODE over all steps."""
    cond = policy.encode([prompt])
    x = keyed_noise(policy.latent_shape, *key, "start")[None]
    for s, s_next in pairwise(sigmas.tolist()):
        with torch.no_grad():
            x = x + policy.velocity(x, torch.tensor([s]), cond) * (s_next - s)
    return x[0]
