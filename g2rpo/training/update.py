"""The update: one or several optimizer steps on the training rows of an iteration, for any objective.

    split      the rows of each optimizer step (Rows.split)
    snapshot   values by the weights before the first step, or before each, if the objective asks for them
    loss       of one batch of rows after the other: reference, behaviour and policy velocity, then backward
    step       the norm of the gradient is limited, and a loss or gradient that is not finite is agreed on by
               all processes, which stop or skip the step (step_checks.py)

Each process holds the rows of its own groups. Gradients are averaged over processes, so the loss of a batch
is weighted by its share of the rows of all processes. A process with fewer rows of an optimizer step than
another evaluates a filler row of weight 0, so that all processes run the same number of forwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from g2rpo.models.policy import Conditioning, Policy, root_module, trained_parameters
from g2rpo.objectives.base import ROLLOUT_RATIO, Loss, Objective, Rows
from g2rpo.runtime.processes import gathered, world_size
from g2rpo.runtime.progress import phase
from g2rpo.runtime.sharding import full_tensor
from g2rpo.training.ema import swapped_weights
from g2rpo.training.optimizer import fill_missing_gradients
from g2rpo.training.step_checks import NotFinite, StepChecks

__all__ = ["NotFinite", "reference_of", "update", "velocity_with"]

Velocity = Callable[[Tensor, Tensor, Conditioning], Tensor]


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
    return velocity_with(policy, parameters, first)


def velocity_with(policy: Policy, parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Velocity:
    """The velocity of the policy with other weights, which are copied into it for each call.

    Args:
        parameters: name -> parameter of the policy.
        values: name -> its value in the calls; may change between them.
    """

    def velocity(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        with swapped_weights(parameters, values):
            return policy.velocity(x, sigma, cond)

    return velocity


def update(
    policy: Policy,
    objective: Objective,
    parts: Sequence[Rows],
    cond: Conditioning,
    optimizer: torch.optim.Optimizer,
    *,
    max_grad_norm: float,
    update_batch: int = 16,
    reference: Velocity | None = None,
    behaviour: Velocity | None = None,
    checks: StepChecks | None = None,
    before_first_step: Callable[[float | None], None] = lambda ratio_noise: None,
) -> dict[str, float]:
    """Trains the policy on the rows of one iteration.

    Args:
        objective: gives the loss of the rows.
        parts: rows of each optimizer step, from `Rows.split`.
        cond: one row per prompt.
        max_grad_norm: gradients are scaled down to this norm.
        update_batch: rows of one forward and backward; changes results by rounding only.
        reference, behaviour: velocities of these policies, for an objective that needs them.
        checks: what happens to a step whose loss or gradient is not finite; None: it stops the run.
        before_first_step: called on every process before the weights change, with the largest |ratio - 1|
            between the rollout and the update on this process; None: there is no ratio.

    Returns:
        loss, grad_norm and the metrics of the objective: averages, maxima, and `name/k` by noise step. Steps
        that were skipped count only in nonfinite_loss and nonfinite_grad; if all were, loss and grad_norm are
        NaN.

    Raises:
        NotFinite: a loss or gradient that is not finite and is not skipped. No optimizer step was taken with
            it, but with several steps some before it may have been taken.
    """
    checks = checks or StepChecks()
    loop = _Loop(policy, objective, cond, reference, behaviour, next(p[:1] for p in parts if len(p)))
    steps = [(part, *loop.batches(part, update_batch)) for part in parts]
    when = objective.snapshot_at(len(steps))
    snapshots = [loop.snapshot(part, batches) if when == "first" else None for part, batches, _ in steps]
    parameters = list(trained_parameters(policy).values())
    metrics: list[dict[str, Tensor]] = []
    num_batches = sum(len(batches) for _, batches, _ in steps)
    with phase("update", num_batches, "batches", repeated=True) as progress:
        loop.count = progress.add
        for number, (part, batches, num_rows) in enumerate(steps):
            snapshot = loop.snapshot(part, batches) if when == "each" else snapshots[number]
            prepared = objective.prepare(part, snapshot)
            optimizer.zero_grad(set_to_none=True)
            measured = loop.measured()
            of_step = loop.backward(prepared, batches, num_rows, snapshot)
            fill_missing_gradients(parameters)
            of_step["grad_norm"] = full_tensor(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm))
            if number == 0:
                before_first_step(loop.ratio_noise(parts, snapshots))
            try:
                loss = of_step.get("loss", torch.zeros_like(of_step["grad_norm"]))
                accepted = checks.accepts(loss, of_step["grad_norm"], number, len(steps), len(metrics))
            except NotFinite:
                optimizer.zero_grad(set_to_none=True)
                raise
            if accepted:
                optimizer.step()
                metrics.append(of_step)
            else:
                loop.restore(measured)
    optimizer.zero_grad(set_to_none=True)  # the next rollout needs the memory of the gradients
    names = dict.fromkeys(name for of_step in metrics for name in of_step)
    none = parts[0].x.new_zeros(())  # of a step that has rows on other processes only
    means = {n: torch.stack([of_step.get(n, none) for of_step in metrics]).mean().item() for n in names}
    means = means or dict.fromkeys(("loss", "grad_norm"), math.nan)
    return _over_processes(means, loop.largest()) | checks.counts


@dataclass(frozen=True)
class _Batch:
    """The rows of one forward.

    Attributes:
        index: which rows of the optimizer step; None: a filler, whose loss does not count.
        cond_row: their rows of the conditioning, on the CPU.
        filler: the row that is evaluated if there is no index.
    """

    index: slice | Tensor | None
    cond_row: Tensor
    filler: Rows

    def of(self, part: Rows) -> Rows:
        return self.filler if self.index is None else part[self.index]


class _Loop:
    """Evaluates batches of rows one after the other, and keeps what is measured on the way.

    Attributes:
        filler: a row that makes up for missing ones.
        maxima: metric -> its largest value so far.
        by_step: metric -> noise steps and values of the rows so far.
        count: called after each batch whose gradient was added.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        cond: Conditioning,
        reference: Velocity | None,
        behaviour: Velocity | None,
        filler: Rows,
    ) -> None:
        self.policy, self.objective, self.cond = policy, objective, cond
        self.reference, self.behaviour, self.filler = reference, behaviour, filler
        self.maxima: dict[str, Tensor] = {}
        self.by_step: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.count: Callable[[], None] = lambda: None

    def batches(self, part: Rows, size: int) -> tuple[list[_Batch], int]:
        """The batches of an optimizer step's rows, and the number of rows of all processes.

        Every process gets the same number of forwards; with several modules, the same number of each, and
        never rows of two modules in one batch.
        """
        cond_row = part.cond_row.cpu()
        sizes = gathered(len(part))
        if len(self.policy.modules) == 1:
            own: list[slice | Tensor] = [
                slice(low, min(low + size, len(part))) for low in range(0, len(part), size)
            ]
            return self._filled(own, cond_row, max(sizes), size, self.filler), sum(sizes)
        batches: list[_Batch] = []
        levels = part.sigma.tolist()
        experts = [self.policy.expert_of(level) for level in levels]
        every = gathered(
            {name: (experts.count(name), level) for name, level in zip(experts, levels, strict=True)}
        )
        for expert in self.policy.modules:
            counts = [of_process[expert] for of_process in every if expert in of_process]
            if counts:
                index = torch.tensor(
                    [n for n, name in enumerate(experts) if name == expert], dtype=torch.int64
                )
                filler = replace(self.filler, sigma=torch.full_like(self.filler.sigma, counts[0][1]))
                own = list(index.split(size)) if len(index) else []
                batches += self._filled(own, cond_row, max(n for n, _ in counts), size, filler)
        return batches, sum(sizes)

    def _filled(
        self, own: Sequence[slice | Tensor], cond_row: Tensor, most: int, size: int, filler: Rows
    ) -> list[_Batch]:
        """Batches of this process's rows, with fillers up to the number of the process with most rows."""
        missing = math.ceil(most / size) - len(own)
        fillers = [_Batch(None, self.filler.cond_row.cpu(), filler)] * missing
        return [*(_Batch(index, cond_row[index], filler) for index in own), *fillers]

    def snapshot(self, part: Rows, batches: Sequence[_Batch]) -> dict[str, Tensor]:
        """The snapshot of an optimizer step's rows, by the weights as they are."""
        # With gradient, dropped at once: without it other kernels may run, and the first ratio be no 1.
        values: dict[str, list[Tensor]] = {}
        order: list[Tensor] = []
        for batch in batches:
            rows = batch.of(part)
            velocity = self._velocity(self.policy.velocity, rows, batch)
            if batch.index is None:
                continue
            order.append(torch.arange(len(part))[batch.index])
            for name, value in self.objective.snapshot(rows, velocity).items():
                values.setdefault(name, []).append(value)
        position = torch.cat(order).argsort() if order else None
        return {name: torch.cat(parts)[position] for name, parts in values.items()}

    def backward(
        self,
        part: Rows,
        batches: Sequence[_Batch],
        num_rows: int,
        snapshot: Mapping[str, Tensor] | None,
    ) -> dict[str, Tensor]:
        """Adds the gradients of one optimizer step, batch by batch.

        Args:
            part: the rows of the step on this process.
            batches: the rows of each forward.
            num_rows: rows of the step on all processes.
            snapshot: of the rows, or None.

        Returns:
            The metrics that are averaged over the rows of the step.
        """
        means: dict[str, Tensor] = {}
        for batch in batches:
            rows = batch.of(part)
            # The others come before the policy's own forward, whose graph needs the weights untouched.
            with torch.no_grad():
                reference, behaviour = (
                    None if velocity is None else self._velocity(velocity, rows, batch)
                    for velocity in (self.reference, self.behaviour)
                )
            velocity = self._velocity(self.policy.velocity, rows, batch)
            if batch.index is None:
                (velocity.sum() * 0.0).backward()
                self.count()
                continue
            of_batch = None if snapshot is None else {n: v[batch.index] for n, v in snapshot.items()}
            loss = self.objective.loss(
                rows, velocity, reference=reference, behaviour=behaviour, snapshot=of_batch
            )
            share = len(rows) * world_size() / num_rows
            (loss.value * share).backward()
            for name, value in {**loss.mean, "loss": loss.value}.items():
                means[name] = means.get(name, 0.0) + value.detach() * share
            self._measure(loss)
            self.count()
        return means

    def largest(self) -> dict[str, float]:
        """The maxima, and `name/k` of each metric by noise step."""
        found = {name: value.item() for name, value in self.maxima.items()}
        for name, parts in self.by_step.items():
            step, value = (torch.cat(values) for values in zip(*parts, strict=True))
            sums = value.new_zeros(2, int(step.max()) + 1)
            sums[0].index_add_(0, step, value.masked_fill(value.isnan(), 0.0))
            sums[1].index_add_(0, step, (~value.isnan()).to(value.dtype))
            totals, counts = sums.tolist()
            found |= {f"{name}/{k}": totals[k] / n for k, n in enumerate(counts) if n}
        return found

    def ratio_noise(
        self, parts: Sequence[Rows], snapshots: Sequence[Mapping[str, Tensor] | None]
    ) -> float | None:
        """The largest |ratio - 1| between rollout and update, of the snapshots and of the rows so far."""
        values = [self.maxima[ROLLOUT_RATIO]] if ROLLOUT_RATIO in self.maxima else []
        for part, snapshot in zip(parts, snapshots, strict=True):
            if snapshot and (noise := self.objective.ratio_noise(part, snapshot)) is not None:
                values.append(noise.max())
        return torch.stack(values).max().item() if values else None

    def measured(self) -> tuple[dict[str, Tensor], dict[str, list[tuple[Tensor, Tensor]]]]:
        """A copy of what was measured so far."""
        return dict(self.maxima), {name: list(values) for name, values in self.by_step.items()}

    def restore(self, measured: tuple[dict[str, Tensor], dict[str, list[tuple[Tensor, Tensor]]]]) -> None:
        """Forgets what was measured since `measured`, because its optimizer step was skipped."""
        self.maxima, self.by_step = measured

    def _measure(self, loss: Loss) -> None:
        for name, value in loss.max.items():
            self.maxima[name] = torch.maximum(self.maxima.get(name, value), value)
        for name, pair in loss.by_step.items():
            self.by_step.setdefault(name, []).append(pair)

    def _velocity(self, velocity: Velocity, rows: Rows, batch: _Batch) -> Tensor:
        return velocity(rows.x, rows.sigma, self.cond[batch.cond_row])


def _over_processes(means: dict[str, float], largest: dict[str, float]) -> dict[str, float]:
    """Metrics of all processes: averages of the means, and the largest of the others."""
    gathered_metrics = gathered((means, largest))
    every = dict.fromkeys([*means, *(name for own, _ in gathered_metrics for name in own)])
    averages = {n: sum(own.get(n, 0.0) for own, _ in gathered_metrics) / len(gathered_metrics) for n in every}
    names = dict.fromkeys(name for _, maxima in gathered_metrics for name in maxima)
    return averages | {
        name: max(maxima[name] for _, maxima in gathered_metrics if name in maxima) for name in names
    }
