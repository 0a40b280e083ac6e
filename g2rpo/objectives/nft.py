"""DiffusionNFT (arXiv:2509.16117): the clean latents of good images attract the velocity, those of bad repel.

A row is a clean latent x0 of the rollout with fresh noise e at one noise level t of the sampler:

    x_t = (1 - t) x0 + t e
    r   = 1/2 + clip(A, +-C) / 2C                                  optimality of the image, in [0, 1]
    v+  = b v + (1 - b) v_old,  v- = (1 + b) v_old - b v           v_old: the behaviour policy's velocity
    L+- = mean (x0+- - x0)^2 / w+-,  x0+- = x_t - t v+-            w+-: mean |x0+- - x0|, >= 1e-5, a constant
    loss = C mean [ (r L+ + (1 - r) L-) / b ] + kl_beta mean (v - v_ref)^2

It needs no noise step and no log-probability, so any ODE solver can make the rollouts. At v = v_old the
gradient is -2 C t (2r - 1) (x_t - t v - x0) / w, averaged over all values of all rows: an image of average
reward (r = 1/2) gives none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from g2rpo.objectives.base import Context, Loss, Objective, Rows
from g2rpo.objectives.lag import Lag
from g2rpo.rollouts.score import Rollout

ADVANTAGE_MODES = ("all", "positive_only", "negative_only", "one_only", "binary")
SMALLEST_WEIGHT = 1e-5


@dataclass(frozen=True)
class NftRows(Rows):
    """Noised clean latents.

    Attributes:
        clean: [N, L, C], float32, the clean latents.
        optimality: [N], r in [0, 1].
        counts: [N], 1, or 0 for a member without a reward or with latents that are not finite, which gives
            no gradient; its row is kept, so that every rank runs the same number of forwards.
        level: [N], int64, index of the noise level into the sigmas.
    """

    clean: Tensor
    optimality: Tensor
    counts: Tensor
    level: Tensor


@dataclass(frozen=True)
class NftObjective(Objective):
    """DiffusionNFT's loss and its KL.

    Attributes:
        levels: indices into the sigmas of the noise levels that can be trained.
        num_levels: number of them that each member trains, drawn anew for each member and iteration.
        schedule: how much of the behaviour weights is kept after each iteration.
        beta: b, > 0, share of the policy's velocity in v+.
        clip: C, > 0, the advantage at which an image counts as entirely good or bad.
        mode: one of ADVANTAGE_MODES, see `optimality`.
        kl_beta: weight of the KL to the reference, >= 0; 0 = no KL and no reference forward.
    """

    levels: tuple[int, ...]
    num_levels: int
    schedule: Lag
    beta: float = 1.0
    clip: float = 5.0
    mode: str = "all"
    kl_beta: float = 0.0

    @property
    def needs_latents(self) -> bool:
        """Whether rollouts keep the clean latents, which are noised again."""
        return True

    @property
    def needs_reference(self) -> bool:
        """Whether there is a KL."""
        return self.kl_beta > 0

    @property
    def lag(self) -> Lag:
        """The schedule of the behaviour weights."""
        return self.schedule

    def rows(self, rollouts: Sequence[Rollout], advantages: Sequence[Tensor], context: Context) -> NftRows:
        """Returns the rows of all groups in the order (prompt, member, level as drawn)."""
        parts: dict[str, list[Tensor]] = {}
        for p, (rollout, advantage) in enumerate(zip(rollouts, advantages, strict=True)):
            for name, value in self._rows_of_group(p, rollout, advantage, context).items():
                parts.setdefault(name, []).append(value)
        return NftRows(**{name: torch.cat(values) for name, values in parts.items()})

    def loss(
        self,
        rows: Rows,
        velocity: Tensor,
        *,
        reference: Tensor | None = None,
        behaviour: Tensor | None = None,
        snapshot: Mapping[str, Tensor] | None = None,
    ) -> Loss:
        """Returns the loss of the rows.

        Metrics: policy_loss, kl (with a reference), optimality (mean r), and behaviour_dev, the root mean
        square of v - v_old, also by noise level.
        """
        assert isinstance(rows, NftRows) and behaviour is not None
        b, r, counts = self.beta, rows.optimality, rows.counts
        good = self._distance(rows, b * velocity + (1 - b) * behaviour)
        bad = self._distance(rows, (1 + b) * behaviour - b * velocity)
        policy_loss = self.clip * (counts * (r * good + (1 - r) * bad) / b).mean()
        value, metrics = policy_loss, {"policy_loss": policy_loss.detach()}
        if self.kl_beta:
            assert reference is not None
            kl = (counts * (velocity - reference).square().flatten(1).mean(1)).mean()
            value = value + self.kl_beta * kl
            metrics["kl"] = kl.detach()
        off = (velocity.detach() - behaviour).square().flatten(1).mean(1).sqrt()
        metrics |= {"optimality": r.mean(), "behaviour_dev": off.mean()}
        return Loss(value, metrics, by_step={"behaviour_dev": (rows.level, off)})

    @staticmethod
    def _distance(rows: NftRows, velocity: Tensor) -> Tensor:
        """L [n]: distance of the clean latents that a velocity predicts from the true ones."""
        off = rows.x - rows.sigma[:, None, None] * velocity - rows.clean
        weight = off.detach().abs().flatten(1).mean(1).clamp(min=SMALLEST_WEIGHT)
        return off.square().flatten(1).mean(1) / weight

    def _rows_of_group(
        self, p: int, rollout: Rollout, advantage: Tensor, context: Context
    ) -> dict[str, Tensor]:
        assert rollout.latents is not None
        clean = rollout.latents[rollout.image_of_tail[0][0]]  # [G, L, C]
        counts = rollout.valid.all(0) & clean.flatten(1).isfinite().all(1)
        clean = clean.where(counts[:, None, None], 0.0)
        drawn = [
            (member, level)
            for member in range(len(clean))
            for level in self.drawn_levels(rollout.prompt_index, member, context)
        ]
        noise = torch.stack(
            [context.noise(clean.shape[1:], rollout.prompt_index, member, level) for member, level in drawn]
        )
        members, levels = torch.tensor(drawn).to(clean.device).unbind(1)
        sigma, x0 = context.sigmas[levels], clean[members]
        t = sigma[:, None, None]
        r = optimality(advantage[0], self.clip, self.mode)
        group = torch.full_like(members, p)
        return {
            "x": (1 - t) * x0 + t * noise.to(clean.device),
            "sigma": sigma,
            "cond_row": group,
            "group": group,
            "member": members,
            "clean": x0,
            "optimality": r[members],
            "counts": counts.to(clean.dtype)[members],
            "level": levels,
        }

    def drawn_levels(self, prompt_index: int, member: int, context: Context) -> list[int]:
        """Returns the levels that a member trains: the first of a random permutation of `levels`."""
        generator = context.generator(prompt_index, member, "levels")
        order = torch.randperm(len(self.levels), generator=generator)[: self.num_levels]
        return [self.levels[n] for n in order.tolist()]


def optimality(advantages: Tensor, clip: float, mode: str = "all") -> Tensor:
    """Returns r = 1/2 + A / 2C for clipped advantages A, in [0, 1].

    Args:
        advantages: [...], unitless.
        clip: C > 0.
        mode: "all" = A as it is; "positive_only" = max(A, 0); "negative_only" = min(A, 0); "one_only" = 1
            where A > 0, else 0; "binary" = the sign of A.

    Raises:
        ValueError: unknown mode.
    """
    a = advantages.clamp(-clip, clip)
    if mode == "positive_only":
        a = a.clamp(min=0)
    elif mode == "negative_only":
        a = a.clamp(max=0)
    elif mode == "one_only":
        a = (a > 0).to(a.dtype)
    elif mode == "binary":
        a = a.sign()
    elif mode != "all":
        raise ValueError(f"unknown advantage mode {mode!r}: use one of {', '.join(ADVANTAGE_MODES)}")
    return (0.5 + a / (2 * clip)).clamp(0, 1)
