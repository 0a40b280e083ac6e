"""GRPO: the clipped surrogate on the noise steps of a rollout, and an optional KL to the reference.

    ratio = exp(log_prob - log_prob_old)
    loss  = mean max(-A ratio, -A clip(ratio, 1 - c, 1 + c))      minus G2RPO's Eq. 12 (arXiv:2510.01982)
    kl    = mean |mean - mean_ref|^2 / (2 std^2)                   Flow-GRPO (arXiv:2505.05470)

Log-probabilities are means over the latent dimensions (see sde.py), so ratios are very close to 1.

A row is the anchor state that the G members of a group share, or the state of one member. With one optimizer
step, the old log-probability is the detached new one, and the ratio is exactly 1. With several, a snapshot
gives it before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from g2rpo.flow.sde import coefficient, noise_step, transition_log_prob
from g2rpo.objectives.base import ROLLOUT_RATIO, Context, Loss, Objective, Rows, SnapshotTime
from g2rpo.rollouts.score import Rollout


@dataclass(frozen=True)
class GrpoRows(Rows):
    """Noise steps, G per row: G is the group size if the members share the state (the anchor's), else 1.

    Attributes:
        sigma_next: [N], float32, the noise level after the step.
        coefficient: [N], float32, of the noise in the step (sde.coefficient).
        step: [N], int64, index of the noise step into the sigmas.
        x_next: [N, G, L, C], float32, the states after the step.
        advantages: [N, G], unitless.
        rollout_log_prob: [N, G], float32; not finite if the step is not.
        velocity: [N, L, C], the rollout's velocity at x, or None.
    """

    sigma_next: Tensor
    coefficient: Tensor
    step: Tensor
    x_next: Tensor
    advantages: Tensor
    rollout_log_prob: Tensor
    velocity: Tensor | None = None

    def of_members(self, first: int, end: int) -> Self:
        """Returns the rows of some members; a row that all members share keeps these only."""
        if self.x_next.shape[1] == 1:
            return super().of_members(first, end)
        shared = ("x_next", "advantages", "rollout_log_prob")
        return replace(self, **{name: getattr(self, name)[:, first:end] for name in shared})


@dataclass(frozen=True)
class GrpoObjective(Objective):
    """The clipped surrogate.

    Attributes:
        diffusion: step rule, "flow", "dance" or "cps".
        eta: noise strength of the step rule, > 0.
        clip_range: the ratio is clipped to 1 +- clip_range, > 0.
        kl_beta: weight of the KL to the reference, >= 0; 0 = no KL and no reference forward.
    """

    diffusion: str
    eta: float
    clip_range: float
    kl_beta: float = 0.0

    @property
    def needs_reference(self) -> bool:
        """Whether there is a KL."""
        return self.kl_beta > 0

    def snapshot_at(self, optimizer_steps: int) -> SnapshotTime:
        """Returns "first" where the weights move while old log-probabilities are still needed."""
        return "first" if optimizer_steps > 1 else "never"

    def rows(self, rollouts: Sequence[Rollout], advantages: Sequence[Tensor], context: Context) -> GrpoRows:
        """Returns the rows of all groups in the order (prompt, step[, member]).

        A step whose log-probability is not finite gets zeros for its states: its advantage is 0, but 0 times
        a non-finite state would make the sum NaN. The row is kept, so every rank runs the same number of
        forwards.
        """
        parts: dict[str, list[Tensor]] = {}
        for p, (rollout, advantage) in enumerate(zip(rollouts, advantages, strict=True)):
            row = _rows_of_group(rollout, advantage)
            row["cond_row"] = row["group"] = torch.full_like(row["step"], p)
            row["sigma"], row["sigma_next"] = context.sigmas[row["step"]], context.sigmas[row["step"] + 1]
            row["coefficient"] = coefficient(self.diffusion, context.sigmas, row["step"], self.eta)
            for name, value in row.items():
                parts.setdefault(name, []).append(value)
        return GrpoRows(**{name: torch.cat(values) for name, values in parts.items()})

    def snapshot(self, rows: Rows, velocity: Tensor) -> dict[str, Tensor]:
        """Returns the old log-probability [n, G], and the departure from the rollout if that is known."""
        assert isinstance(rows, GrpoRows)
        log_prob, mean, std = self._evaluate(rows, velocity)
        values = {"log_prob": log_prob.detach()}
        if rows.velocity is not None:
            values["departure"] = self.departure(rows, mean, std)
        return values

    def loss(
        self,
        rows: Rows,
        velocity: Tensor,
        *,
        reference: Tensor | None = None,
        behaviour: Tensor | None = None,
        snapshot: Mapping[str, Tensor] | None = None,
    ) -> Loss:
        """Returns the clipped surrogate, plus kl_beta times the KL.

        Metrics: clip_fraction, approx_kl, kl (with a reference), the largest ratio_max_dev and
        rollout_ratio_dev (|ratio - 1| between the rollout and the update's first forward), and
        velocity_dev by step (see `departure`).
        """
        assert isinstance(rows, GrpoRows)
        finite_rows = rows.rollout_log_prob.isfinite()
        log_prob, mean, std = self._evaluate(rows, velocity)
        before = log_prob.detach() if snapshot is None else snapshot["log_prob"]
        value, metrics = clipped_surrogate(log_prob, before, rows.advantages, self.clip_range)
        largest = {"ratio_max_dev": metrics.pop("ratio_max_dev")}
        if self.kl_beta:
            assert reference is not None
            with torch.no_grad():
                _, mean_reference, _ = self._evaluate(rows, reference)
            kl = step_kl(mean, mean_reference, std).where(finite_rows.flatten(), 0.0).mean()
            value = value + self.kl_beta * kl
            metrics["kl"] = kl.detach()
        largest[ROLLOUT_RATIO] = self.ratio_noise(rows, {"log_prob": before}).max()
        by_step = {}
        if rows.velocity is not None:
            departed = self.departure(rows, mean, std) if snapshot is None else snapshot["departure"]
            by_step["velocity_dev"] = (rows.step, departed.where(finite_rows.all(1), torch.nan))
        return Loss(value, metrics, largest, by_step)

    @property
    def ratio_clip(self) -> float:
        """The clip range."""
        return self.clip_range

    def ratio_noise(self, rows: Rows, snapshot: Mapping[str, Tensor]) -> Tensor:
        """Returns |ratio - 1|, [n, G], of the snapshot to the rollout; 0 for a step that is not finite."""
        assert isinstance(rows, GrpoRows)
        off = (snapshot["log_prob"] - rows.rollout_log_prob).exp().sub(1).abs()
        return off.where(rows.rollout_log_prob.isfinite(), 0.0)

    @torch.no_grad()
    def departure(self, rows: GrpoRows, mean: Tensor, std: Tensor) -> Tensor:
        """Distance between the means of the update and of the rollout, relative to the noise of the step.

        The weights are the same; dtype, batch and kernels differ. A ratio that used the log-probability of
        the rollout would differ from 1 by about this much before any update.

        Returns:
            [n], float32: the root mean square over the latent dimensions, divided by the standard deviation.
        """
        members = rows.x_next.shape[1]
        assert rows.velocity is not None
        before, _ = noise_step(
            self.diffusion, rows.x, rows.velocity, rows.sigma, rows.sigma_next, rows.coefficient, self.eta
        )
        off = (mean[::members] - before).flatten(1).square().mean(1).sqrt()
        return (off / std.flatten()[::members]).to(torch.float32)

    def _evaluate(self, rows: GrpoRows, velocity: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability [n, G] of the members' states, with mean [n * G, ...] and std of their step."""
        members = rows.x_next.shape[1]
        per_row = (rows.x, velocity, rows.sigma, rows.sigma_next, rows.coefficient)
        x, v, sigma, sigma_next, strength = (value.repeat_interleave(members, 0) for value in per_row)
        mean, std = noise_step(self.diffusion, x, v, sigma, sigma_next, strength, self.eta)
        log_prob = transition_log_prob(self.diffusion, rows.x_next.flatten(0, 1), mean, std)
        return log_prob.unflatten(0, (-1, members)), mean, std


def _rows_of_group(rollout: Rollout, advantage: Tensor) -> dict[str, Tensor]:
    """Fields of a group's rows by name, in the order (step[, member])."""
    group_size = rollout.log_prob.shape[1]
    finite = rollout.log_prob.isfinite()[:, :, None, None]
    x_next = rollout.x_next.where(finite, 0.0)
    shares_states = rollout.x.shape[1] == 1
    x = rollout.x.where(finite.any(1, keepdim=True) if shares_states else finite, 0.0)
    if shares_states:  # one forward serves the whole group
        assert bool(rollout.train_mask.all())
        row = {
            "x": x[:, 0],
            "x_next": x_next,
            "step": rollout.step[:, 0],
            "member": torch.zeros_like(rollout.step[:, 0]),
            "advantages": advantage,
            "rollout_log_prob": rollout.log_prob,
        }
        return row if rollout.velocity is None else row | {"velocity": rollout.velocity[:, 0]}
    kept = rollout.train_mask.flatten()
    return {
        "x": x.flatten(0, 1)[kept],
        "x_next": x_next.flatten(0, 1)[kept][:, None],
        "step": rollout.step.expand(-1, group_size).flatten()[kept],
        "member": torch.arange(group_size).to(rollout.step).repeat(len(rollout.step))[kept],
        "advantages": advantage.flatten()[kept][:, None],
        "rollout_log_prob": rollout.log_prob.flatten()[kept][:, None],
    }


def clipped_surrogate(
    log_prob: Tensor, log_prob_old: Tensor, advantages: Tensor, clip_range: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns PPO's clipped objective as a loss to be minimised: the mean over all elements.

    Over [K, G] this is the sum of each step's mean over the group, divided by K.

    Args:
        log_prob: log-probabilities under the policy being trained; carries the gradient.
        log_prob_old: log-probabilities under the policy that sampled; same shape, no gradient.
        advantages: unitless, same shape or broadcastable.
        clip_range: c > 0.

    Returns:
        The loss, a scalar, and metrics, scalars without gradient: ratio_max_dev (largest |ratio - 1|),
        clip_fraction (share of elements whose gradient is clipped to 0) and approx_kl (mean of
        (ratio - 1) - ln ratio).

    Raises:
        ValueError: clip_range <= 0.
    """
    if not clip_range > 0:
        raise ValueError(f"clip_range must be > 0, got {clip_range}")
    log_ratio = log_prob - log_prob_old
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    loss = torch.maximum(unclipped, clipped).mean()
    with torch.no_grad():
        metrics = {
            "ratio_max_dev": (ratio - 1).abs().max(),
            "clip_fraction": (clipped > unclipped).float().mean(),
            # expm1, because near ratio 1 both terms are far below the rounding of 1
            "approx_kl": (torch.expm1(log_ratio) - log_ratio).mean(),
        }
    return loss, metrics


def step_kl(mean: Tensor, mean_reference: Tensor, std: Tensor | float) -> Tensor:
    """Returns the KL between two Gaussian steps of equal std, averaged over the latent dimensions.

    mean_D (mean - mean_reference)^2 / (2 std^2), with std the full standard deviation of the step (including
    the square root of |dsigma|). Differentiable in `mean`: never compute it under no_grad.

    Args:
        mean, mean_reference: [N, L, C], float32; the reference gets no gradient.
        std: scalar or broadcastable to them, > 0.

    Returns:
        [N], in nats per latent dimension.
    """
    return (
        ((mean - mean_reference.detach()) ** 2 / (2 * torch.as_tensor(std, dtype=mean.dtype) ** 2))
        .flatten(1)
        .mean(1)
    )
