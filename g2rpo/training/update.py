"""The update: rollouts to advantages, advantages to a loss, the loss to one optimizer step or several.

    rows     one network forward each: an anchor state that G members share, or one member's own state
    loss     minus the clipped objective (loss.py), the mean over all trained (prompt, step, member)
    steps    "once": all gradients together, one optimizer step;
             "per_step": an optimizer step after each noise step;
             a number: so many, each over another part of every group's members

With one optimizer step the old log-probability is the new one, detached, and the ratio is exactly 1. With
several, one more pass through the same forwards gives it, before the first step.

Each process has the rows of its groups; gradients are averaged over processes, so a batch counts by its share
of all processes' rows. Processes with fewer rows of a step make up for it with forwards that count nothing.

Axes: N row, P prompt, K noise step, G member (1 where a row is one member's own), L tokens, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from g2rpo.algorithms.base import Algorithm
from g2rpo.flow.sde import transition, transition_log_prob
from g2rpo.models.policy import Conditioning, Policy
from g2rpo.objectives.batch import Rows
from g2rpo.objectives.grpo import clipped_surrogate, step_kl
from g2rpo.runtime.processes import gathered, world_size
from g2rpo.runtime.sharding import whole
from g2rpo.training.ema import holding

Velocity = Callable[[Tensor, Tensor, Conditioning], Tensor]


class NotFinite(RuntimeError):
    """The gradient of an optimizer step is not a number; that step was not taken.

    Attributes:
        steps_done: optimizer steps of this update that were taken before. 0: the weights are as they were.
    """

    def __init__(self, norm: float, steps_done: int, num_steps: int) -> None:
        super().__init__(f"the gradient's norm is {norm} at optimizer step {steps_done + 1} of {num_steps}")
        self.steps_done = steps_done


def reference_of(policy: Policy, lora: bool) -> Velocity:
    """The policy's velocity as it is now, for the KL: without its adapters, or by a copy of its weights."""
    module: Any = policy.module
    if lora:

        def without_adapters(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
            module.disable_adapters()
            try:
                return policy.velocity(x, sigma, cond)
            finally:
                module.enable_adapters()

        return without_adapters
    parameters = dict(module.named_parameters())
    first = {name: p.detach().clone() for name, p in parameters.items()}

    def with_first_weights(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        with holding(parameters, first):
            return policy.velocity(x, sigma, cond)

    return with_first_weights


def update(
    policy: Policy,
    algorithm: Algorithm,
    rows: Rows,
    cond: Conditioning,
    sigmas: Tensor,
    optimizer: torch.optim.Optimizer,
    *,
    max_grad_norm: float,
    update_batch: int = 16,
    reference: Velocity | None = None,
) -> dict[str, float]:
    """Train the policy on one iteration's rows.

    Args:
        cond: one row a prompt.
        sigmas: the schedule [T + 1].
        max_grad_norm: gradients are scaled down to this norm.
        update_batch: rows of one forward and backward; changes results by rounding only.
        reference: velocity of the KL's other side; needed with kl_beta > 0.

    Returns:
        loss, grad_norm, ratio_max_dev, clip_fraction, approx_kl, rollout_ratio_dev (largest |ratio - 1|
        between the update's first forward and the rollout's), velocity_dev/<k> (see `departure`) and, with a
        KL, kl. Means over optimizer steps.

    Raises:
        NotFinite: a gradient that is not a number; no step was taken with it, but of several perhaps some
            before it.
    """
    schedule = sigmas.to(rows.x.device)
    parameters = [p for p in policy.module.parameters() if p.requires_grad]
    groups = _optimizer_steps(algorithm, rows)

    def evaluate(part: Rows, velocity: Velocity) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability [N, G] of the members' states, with mean [N * G, ...] and std of their step."""
        members = part.x_next.shape[1]
        v = velocity(part.x, schedule[part.step], cond[part.cond_row])
        step = part.step.repeat_interleave(members)
        x, v = (value.repeat_interleave(members, 0) for value in (part.x, v))
        mean, std = transition(algorithm.diffusion, x, v, schedule, step, algorithm.eta)
        log_prob = transition_log_prob(algorithm.diffusion, part.x_next.flatten(0, 1), mean, std)
        return log_prob.unflatten(0, (-1, members)), mean, std

    departed = torch.zeros(2, len(schedule), device=rows.x.device)  # by step: sum over rows, number of rows

    def first(part: Rows, counted: int) -> tuple[Tensor, Tensor, Tensor]:
        """As `evaluate`, with the rollout's weights: how far it departs from the rollout is noted."""
        log_prob, mean, std = evaluate(part, policy.velocity)
        if part.velocity is not None and counted:
            sound = part.rollout_log_prob.isfinite().all(1)
            off = departure(algorithm, part, schedule, mean, std).where(sound, 0.0)
            departed[0].index_add_(0, part.step, off)
            departed[1].index_add_(0, part.step, sound.to(departed.dtype))
        return log_prob, mean, std

    plans = [(*_batches(index, update_batch), members) for index, members in groups]
    old: dict[int, Tensor] = {}
    if len(groups) > 1:
        # With gradient, dropped at once: without it other kernels may run, and the first ratio be no 1.
        for g, (batches, _, members) in enumerate(plans):
            found = [first(rows[b].of(members), n)[0].detach()[: None if n else 0] for b, n in batches]
            old[g] = torch.cat(found)

    stats: dict[str, list[Tensor]] = {}
    drift = torch.zeros((), device=rows.x.device)
    for g, (batches, total, members) in enumerate(plans):
        optimizer.zero_grad(set_to_none=True)
        sums: dict[str, Tensor] = {}
        done = 0
        for batch, counted in batches:
            part = rows[batch].of(members)
            whole_rows = part.rollout_log_prob.isfinite()
            share = counted * world_size() / total
            mean_reference = None
            if algorithm.kl_beta:  # before the policy's own forward, whose graph needs the weights untouched
                assert reference is not None
                with torch.no_grad():
                    _, mean_reference, _ = evaluate(part, reference)
            log_prob, mean, std = evaluate(part, policy.velocity) if old else first(part, counted)
            before = old[g][done : done + counted] if old and counted else log_prob.detach()
            done += counted
            loss, told = clipped_surrogate(log_prob, before, part.advantages, algorithm.clip_range)
            if mean_reference is not None:
                told["kl"] = step_kl(mean, mean_reference, std).where(whole_rows.flatten(), 0.0).mean()
                loss = loss + algorithm.kl_beta * told["kl"]
            (loss * share).backward()
            told["loss"] = loss
            deviation = told.pop("ratio_max_dev") * (counted > 0)
            sums["ratio_max_dev"] = torch.maximum(sums.get("ratio_max_dev", deviation), deviation)
            for name, value in told.items():
                sums[name] = sums.get(name, 0.0) + value.detach() * share
            if counted:  # a forward that makes up for missing rows may be of weights that have moved
                off = (before - part.rollout_log_prob).exp().sub(1).abs().where(whole_rows, 0.0)
                drift = torch.maximum(drift, off.max())
        sums["grad_norm"] = whole(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm))
        if not bool(sums["grad_norm"].isfinite()):
            optimizer.zero_grad(set_to_none=True)
            raise NotFinite(sums["grad_norm"].item(), g, len(groups))
        optimizer.step()
        for name, value in sums.items():
            stats.setdefault(name, []).append(value)
    optimizer.zero_grad(set_to_none=True)  # their memory is the next rollout's
    largest = {
        "ratio_max_dev": torch.stack(stats.pop("ratio_max_dev")).max().item(),
        "rollout_ratio_dev": drift.item(),
    }
    sums_of, rows_of_step = departed.tolist()
    for k, number in enumerate(rows_of_step):
        if number:
            largest[f"velocity_dev/{k}"] = sums_of[k] / number
    every = gathered(({name: torch.stack(v).mean().item() for name, v in stats.items()}, largest))
    means = {name: sum(one[name] for one, _ in every) / len(every) for name in every[0][0]}
    names = dict.fromkeys(name for _, one in every for name in one)
    return means | {name: max(one[name] for _, one in every if name in one) for name in names}


@torch.no_grad()
def departure(algorithm: Algorithm, part: Rows, schedule: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """[N] how far the update's mean lies from the rollout's, in root mean square over the step's noise.

    Both are the same weights: what differs is dtype, batch and kernels. It is what the ratio would depart
    from 1 by, before an update, if the rollout's log-probability were used.
    """
    members = part.x_next.shape[1]
    assert part.velocity is not None
    before, _ = transition(algorithm.diffusion, part.x, part.velocity, schedule, part.step, algorithm.eta)
    off = (mean[::members] - before).flatten(1).square().mean(1).sqrt()
    return (off / std.flatten()[::members]).to(torch.float32)


def _optimizer_steps(algorithm: Algorithm, rows: Rows) -> list[tuple[Tensor, slice]]:
    """Row numbers of each optimizer step and which of the members that share a row it trains.

    As many on every process: the rows of one may be on others alone.
    """
    index = torch.arange(len(rows), device=rows.x.device)
    if algorithm.update == "per_step":
        steps = sorted({k for found in gathered(rows.step.unique().tolist()) for k in found})
        return [(index[rows.step == k], slice(None)) for k in steps]
    if algorithm.update == "once":
        return [(index, slice(None))]
    sharing = rows.x_next.shape[1]
    group_size = sharing if sharing > 1 else max(gathered(int(rows.member.max()))) + 1
    parts = torch.arange(group_size).tensor_split(algorithm.chunks(group_size))
    spans = [slice(int(part[0]), int(part[-1]) + 1) for part in parts]
    if sharing > 1:
        return [(index, span) for span in spans]
    return [(index[(rows.member >= s.start) & (rows.member < s.stop)], slice(None)) for s in spans]


def _batches(group: Tensor, size: int) -> tuple[list[tuple[Tensor, int]], int]:
    """Row numbers of each forward and how many of them count, as many on every process; and all rows' number.

    A forward of which none counts takes row 0.
    """
    sizes = gathered(len(group))
    batches = [(batch, len(batch)) for batch in group.split(size) if len(batch)]
    most = max(math.ceil(n / size) for n in sizes)
    return batches + [(group.new_zeros(1), 0)] * (most - len(batches)), sum(sizes)
