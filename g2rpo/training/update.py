"""The update: one or several optimizer steps on the training rows of an iteration.

    rows     each needs one forward: the anchor state that G members share, or the state of one member
    loss     the clipped surrogate (objectives/grpo.py), averaged over all trained (prompt, step, member)
    update   "once": one optimizer step on all gradients together;
             "per_step": one optimizer step after each noise step;
             a number N: N optimizer steps, each on another part of the members of every group

With one optimizer step, the old log-probability is the detached new one, and the ratio is exactly 1. With
several, one additional pass through the same forwards gives it before the first step.

Each process holds the rows of its own groups. Gradients are averaged over processes, so the loss of a batch
is weighted by its share of the rows of all processes. A process with fewer rows of an optimizer step than
another evaluates dummy rows of weight 0, so that all processes run the same number of forwards.

Axes: N row, P prompt, K noise step, G member (1 where a row is one member's own), L tokens, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from g2rpo.algorithms.base import Algorithm
from g2rpo.flow.sde import transition, transition_log_prob
from g2rpo.models.policy import Conditioning, Policy, root_module, trained_parameters
from g2rpo.objectives.batch import Rows
from g2rpo.objectives.grpo import clipped_surrogate, step_kl
from g2rpo.runtime.processes import gathered, world_size
from g2rpo.runtime.sharding import full_tensor
from g2rpo.training.ema import swapped_weights
from g2rpo.training.optimizer import fill_missing_gradients

Velocity = Callable[[Tensor, Tensor, Conditioning], Tensor]

Batch = tuple[Tensor, int]
"""Row numbers of one forward, and how many of them count."""


class NotFinite(RuntimeError):
    """The gradient of an optimizer step is not finite; that step was not taken.

    Attributes:
        steps_done: optimizer steps of this update that were taken before. 0: the weights are as they were.
    """

    def __init__(self, norm: float, steps_done: int, num_steps: int) -> None:
        super().__init__(f"the gradient's norm is {norm} at optimizer step {steps_done + 1} of {num_steps}")
        self.steps_done = steps_done


def reference_of(policy: Policy, lora: bool) -> Velocity:
    """The velocity of the reference policy of the KL, which is the policy as it is now.

    Args:
        lora: the adapters are switched off for the reference; otherwise it uses a copy of the weights.
    """
    modules: list[Any] = list(policy.modules.values())
    if lora:

        def without_adapters(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
            for module in modules:
                module.disable_adapters()
            try:
                return policy.velocity(x, sigma, cond)
            finally:
                for module in modules:
                    module.enable_adapters()

        return without_adapters
    parameters = dict(root_module(policy).named_parameters())
    first = {name: p.detach().clone() for name, p in parameters.items()}

    def with_first_weights(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        with swapped_weights(parameters, first):
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
    """Trains the policy on the rows of one iteration.

    Args:
        cond: one row per prompt.
        sigmas: noise levels [T + 1].
        max_grad_norm: gradients are scaled down to this norm.
        update_batch: rows of one forward and backward; changes results by rounding only.
        reference: velocity of the reference policy of the KL; needed with kl_beta > 0.

    Returns:
        loss, grad_norm, ratio_max_dev, clip_fraction, approx_kl, rollout_ratio_dev (largest |ratio - 1|
        between the update's first forward and the rollout's), velocity_dev/<k> (see `departure`) and, with a
        KL, kl. Means over optimizer steps.

    Raises:
        NotFinite: a gradient that is not finite. No optimizer step was taken with it, but with several steps
            some before it may have been taken.
    """
    steps = [(*_batches(index, update_batch), m) for index, m in _optimizer_steps(algorithm, rows)]
    loss = _BatchLoss(policy, algorithm, rows, cond, sigmas.to(rows.x.device), reference)
    if len(steps) > 1:
        loss.store_old_log_probs(steps)
    parameters = list(trained_parameters(policy).values())
    metrics: dict[str, list[Tensor]] = {}
    for number, (batches, num_rows, members) in enumerate(steps):
        optimizer.zero_grad(set_to_none=True)
        step_metrics = loss.backward(number, batches, num_rows, members)
        fill_missing_gradients(parameters)
        step_metrics["grad_norm"] = full_tensor(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm))
        if not bool(step_metrics["grad_norm"].isfinite()):
            optimizer.zero_grad(set_to_none=True)
            raise NotFinite(step_metrics["grad_norm"].item(), number, len(steps))
        optimizer.step()
        for name, value in step_metrics.items():
            metrics.setdefault(name, []).append(value)
    optimizer.zero_grad(set_to_none=True)  # the next rollout needs the memory of the gradients
    largest = {"ratio_max_dev": torch.stack(metrics.pop("ratio_max_dev")).max().item(), **loss.departures()}
    return _over_processes({n: torch.stack(v).mean().item() for n, v in metrics.items()}, largest)


class _BatchLoss:
    """The loss of one batch of rows after the other, and what is measured on the way.

    Attributes:
        old_log_probs: of each optimizer step, [rows that count, G], before the first step was taken; empty
            with a single step, where the old log-probability is the new one, detached.
    """

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        rows: Rows,
        cond: Conditioning,
        sigmas: Tensor,
        reference: Velocity | None,
    ) -> None:
        self.policy, self.algorithm, self.rows, self.cond = policy, algorithm, rows, cond
        self.sigmas, self.reference = sigmas, reference
        self.old_log_probs: list[Tensor] = []
        self._rollout_ratio_dev = torch.zeros((), device=rows.x.device)
        self._departed = torch.zeros(2, len(sigmas), device=rows.x.device)  # by step: sum, number of rows

    def store_old_log_probs(self, steps: Sequence[tuple[Sequence[Batch], int, slice]]) -> None:
        """Evaluates the rows of all optimizer steps by the weights of the rollout."""
        # With gradient, dropped at once: without it other kernels may run, and the first ratio be no 1.
        for batches, _, members in steps:
            log_probs = [
                self._evaluate_first(self.rows[index].of(members), counted)[0].detach()[
                    : None if counted else 0
                ]
                for index, counted in batches
            ]
            self.old_log_probs.append(torch.cat(log_probs))

    def backward(
        self, number: int, batches: Sequence[Batch], num_rows: int, members: slice
    ) -> dict[str, Tensor]:
        """Adds the gradients of one optimizer step, batch by batch.

        Args:
            number: of the optimizer step, from 0.
            batches: row numbers of each forward, and how many of them count.
            num_rows: rows of the step on all processes.
            members: of each group, those that the step trains.

        Returns:
            The metrics of the step: means over its rows, and the largest |ratio - 1|.
        """
        metrics: dict[str, Tensor] = {}
        done = 0
        for index, counted in batches:
            part = self.rows[index].of(members)
            share = counted * world_size() / num_rows
            old = self.old_log_probs[number][done : done + counted] if self.old_log_probs else None
            done += counted
            loss, batch_metrics = self._loss(part, counted, old)
            (loss * share).backward()
            batch_metrics["loss"] = loss
            deviation = batch_metrics.pop("ratio_max_dev") * (counted > 0)
            metrics["ratio_max_dev"] = torch.maximum(metrics.get("ratio_max_dev", deviation), deviation)
            for name, value in batch_metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value.detach() * share
        return metrics

    def departures(self) -> dict[str, float]:
        """rollout_ratio_dev, and velocity_dev/<k> of each noise step k that had rows."""
        departures = {"rollout_ratio_dev": self._rollout_ratio_dev.item()}
        sums, counts = self._departed.tolist()
        return departures | {f"velocity_dev/{k}": sums[k] / n for k, n in enumerate(counts) if n}

    def _loss(self, part: Rows, counted: int, old: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of one batch; `old`: its log-probabilities before the first optimizer step."""
        finite_rows = part.rollout_log_prob.isfinite()
        mean_reference = None
        if self.algorithm.kl_beta:  # before the policy's own forward, whose graph needs the weights untouched
            assert self.reference is not None
            with torch.no_grad():
                _, mean_reference, _ = self._evaluate(part, self.reference)
        if old is None:
            log_prob, mean, std = self._evaluate_first(part, counted)
        else:
            log_prob, mean, std = self._evaluate(part, self.policy.velocity)
        before = old if old is not None and counted else log_prob.detach()
        loss, metrics = clipped_surrogate(log_prob, before, part.advantages, self.algorithm.clip_range)
        if mean_reference is not None:
            metrics["kl"] = step_kl(mean, mean_reference, std).where(finite_rows.flatten(), 0.0).mean()
            loss = loss + self.algorithm.kl_beta * metrics["kl"]
        if counted:  # a forward that makes up for missing rows may be of weights that have moved
            off = (before - part.rollout_log_prob).exp().sub(1).abs().where(finite_rows, 0.0)
            self._rollout_ratio_dev = torch.maximum(self._rollout_ratio_dev, off.max())
        return loss, metrics

    def _evaluate(self, part: Rows, velocity: Velocity) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability [N, G] of the members' states, with mean [N * G, ...] and std of their step."""
        members, rule = part.x_next.shape[1], self.algorithm.diffusion
        v = velocity(part.x, self.sigmas[part.step], self.cond[part.cond_row])
        step = part.step.repeat_interleave(members)
        x, v = (value.repeat_interleave(members, 0) for value in (part.x, v))
        mean, std = transition(rule, x, v, self.sigmas, step, self.algorithm.eta)
        log_prob = transition_log_prob(rule, part.x_next.flatten(0, 1), mean, std)
        return log_prob.unflatten(0, (-1, members)), mean, std

    def _evaluate_first(self, part: Rows, counted: int) -> tuple[Tensor, Tensor, Tensor]:
        """As `_evaluate`, by the weights of the rollout; adds how far that departs from the rollout."""
        log_prob, mean, std = self._evaluate(part, self.policy.velocity)
        if part.velocity is not None and counted:
            finite = part.rollout_log_prob.isfinite().all(1)
            off = departure(self.algorithm, part, self.sigmas, mean, std).where(finite, 0.0)
            self._departed[0].index_add_(0, part.step, off)
            self._departed[1].index_add_(0, part.step, finite.to(self._departed.dtype))
        return log_prob, mean, std


def _over_processes(means: dict[str, float], largest: dict[str, float]) -> dict[str, float]:
    """Metrics of all processes: averages of the means, and the largest of the others."""
    gathered_metrics = gathered((means, largest))
    averages = {name: sum(own[name] for own, _ in gathered_metrics) / len(gathered_metrics) for name in means}
    names = dict.fromkeys(name for _, maxima in gathered_metrics for name in maxima)
    return averages | {
        name: max(maxima[name] for _, maxima in gathered_metrics if name in maxima) for name in names
    }


@torch.no_grad()
def departure(algorithm: Algorithm, part: Rows, schedule: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Distance between the means of the update and of the rollout, relative to the noise of the step.

    The weights are the same; dtype, batch and kernels differ. A ratio that used the log-probability of the
    rollout would differ from 1 by about this much before any update.

    Returns:
        [N], float32: the root mean square over the latent dimensions, divided by the standard deviation.
    """
    members = part.x_next.shape[1]
    assert part.velocity is not None
    before, _ = transition(algorithm.diffusion, part.x, part.velocity, schedule, part.step, algorithm.eta)
    off = (mean[::members] - before).flatten(1).square().mean(1).sqrt()
    return (off / std.flatten()[::members]).to(torch.float32)


def _optimizer_steps(algorithm: Algorithm, rows: Rows) -> list[tuple[Tensor, slice]]:
    """Row numbers of each optimizer step, and which of the members that share a row it trains.

    Every process gets the same number of steps; a step may have rows on other processes only.
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
    """Row numbers of each forward with how many of them count, and the number of rows of all processes.

    Every process gets the same number of forwards; one of which no row counts evaluates row 0.
    """
    sizes = gathered(len(group))
    batches = [(batch, len(batch)) for batch in group.split(size) if len(batch)]
    most = max(math.ceil(n / size) for n in sizes)
    return batches + [(group.new_zeros(1), 0)] * (most - len(batches)), sum(sizes)
