"""Scoring: an exploration and rewards become rollouts, which hold one group each as dense tensors.

Distinct images are decoded once, rounded to 8 bits as in an image file, and scored once by every reward;
tails that end at the same image share its scores. Groupwise rewards judge the images of a cell together
(cells.py). One layout serves every method: in a path method, where
one image scores all steps, the rewards have size 1 on the axes K and J and broadcast.

Axes: R reward, K noise step, J granularity, G member, L tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from g2rpo.models.policy import Policy
from g2rpo.rewards.base import GroupReward, Metadata, Reward, is_groupwise
from g2rpo.rewards.checked import score_batch
from g2rpo.rewards.model_reward import scoring
from g2rpo.rollouts.cells import CellJudge
from g2rpo.rollouts.explore import Exploration
from g2rpo.rollouts.first_images import FirstImages
from g2rpo.rollouts.plan import Plan
from g2rpo.runtime.progress import phase
from g2rpo.runtime.random import keyed_generator
from g2rpo.runtime.timing import Timer


@dataclass(frozen=True)
class Rollout:
    """One group: one prompt, G members.

    Attributes:
        x: [K, G or 1, L, C], float32, the state before each noise step; size 1 if it is the anchor's.
        x_next: [K, G, L, C], float32, the state after the noise step.
        log_prob: [K, G], float32, log-probability of the noise step under the rollout's velocity.
        step: [K, 1], int64, index of the noise step into the sigmas.
        train_mask: [K, G], bool, the steps that each member trains.
        rewards: [R, K or 1, J, G], float32; NaN = invalid. K is 1 if one image scores all steps of a path.
        valid: [K, G], bool, all rewards of the step, its states and its images are finite. [1, G] for a plan
            without noise steps, as is policy_finite.
        policy_finite: [K, G], bool, the policy's part of `valid`: the step's states and images are finite.
        nfe: counted forwards of this group: anchor, sde, tails, total.
        prompt_index: position of the prompt in the stream.
        image_of_tail: `[branches][J]`, index of the member's distinct image at which each tail ends.
        velocity: [K, 1, L, C], the rollout's velocity at x, or None if x is not the anchor's.
        latents: [distinct images, G, L, C], float32, the clean latents, if kept.
        images: [distinct images, G, 3, H, W], uint8 on the CPU, if kept.
        anchor_rewards: [R] of the anchor's image, NaN for a groupwise reward, which does not judge it; None
            if the anchor was not continued to the end.
        anchor_image: [3, H, W], uint8 on the CPU, if kept.
    """

    x: Tensor
    x_next: Tensor
    log_prob: Tensor
    step: Tensor
    train_mask: Tensor
    rewards: Tensor
    valid: Tensor
    policy_finite: Tensor
    nfe: dict[str, int]
    prompt_index: int
    image_of_tail: tuple[tuple[int, ...], ...]
    velocity: Tensor | None = None
    latents: Tensor | None = None
    images: Tensor | None = None
    anchor_rewards: Tensor | None = None
    anchor_image: Tensor | None = None

    def for_statistics(self) -> Rollout:
        """Returns a copy on the CPU without states and images, small enough to send to all processes.

        It holds what advantages and metrics need: steps, rewards and validity.
        """
        none = self.x.new_zeros(0).cpu()
        kept = {name: getattr(self, name).cpu() for name in ("step", "rewards", "valid", "policy_finite")}
        anchor = None if self.anchor_rewards is None else self.anchor_rewards.cpu()
        return replace(
            self,
            x=none,
            x_next=none,
            log_prob=none,
            train_mask=none,
            velocity=None,
            latents=None,
            images=None,
            anchor_image=None,
            anchor_rewards=anchor,
            **kept,
        )


@torch.no_grad()
def score(
    policy: Policy,
    exploration: Exploration,
    rewards: Mapping[str, Reward | GroupReward],
    prompts: Sequence[str],
    metadata: Metadata | None = None,
    *,
    decode_batch: int = 24,
    keep_images: bool = False,
    keep_latents: bool = False,
    timer: Timer | None = None,
    first_images: FirstImages | None = None,
) -> list[Rollout]:
    """Decodes and scores every distinct image once, and returns one rollout per group.

    Args:
        policy: decodes the latents.
        exploration: states and latents of P groups.
        rewards: rewards by name, in the order of the axis R.
        prompts, metadata: one per group.
        decode_batch: number of images that are decoded and scored at once.
        keep_images: whether the rollouts keep the images.
        keep_latents: whether the rollouts keep the clean latents.
        timer: receives the laps "decode" and "reward".
        first_images: receives the first images with their scores.

    Raises:
        ValueError: the number of prompts or metadata differs from that of the groups, or no rewards.
    """
    plan = exploration.plan
    _, num_prompts, group_size = exploration.log_prob.shape
    if len(prompts) != num_prompts or (metadata is not None and len(metadata) != num_prompts):
        raise ValueError(
            f"got {len(prompts)} prompts and {'no' if metadata is None else len(metadata)} metadata for "
            f"{num_prompts} groups; give one prompt, and one metadata or none, per group"
        )
    if not rewards:
        raise ValueError("no rewards given; give at least one")
    latents, owners = _images_to_score(exploration)
    pointwise: dict[str, Any] = {name: r for name, r in rewards.items() if not is_groupwise(r)}
    groupwise: dict[str, Any] = {name: r for name, r in rewards.items() if is_groupwise(r)}
    cells = CellJudge(groupwise, prompts, metadata, group_size, len(exploration.latents) * num_prompts)
    scores, kept_images, finite_images = [], [], []
    with (
        scoring(rewards.values()),
        phase("decoding and scoring", len(latents), "images", repeated=True) as progress,
    ):
        for low in range(0, len(latents), decode_batch):
            batch = slice(low, low + decode_batch)
            pixels, finite = _decode(policy, latents[batch])
            finite_images.append(finite)
            if timer is not None:
                timer.lap("decode")
            prompt_rows = owners[batch]
            image_metadata = None if metadata is None else [metadata[p] for p in prompt_rows]
            image_prompts = [prompts[p] for p in prompt_rows]
            batch_scores = score_batch(pointwise, pixels, image_prompts, image_metadata)
            scores.append(batch_scores.masked_fill(~finite, torch.nan))
            cells.add(pixels, finite)
            progress.add(len(pixels))
            if timer is not None:
                timer.lap("reward")
            if first_images is not None:
                first_images.add(pixels, image_prompts, image_metadata, group_size, num_prompts)
            if keep_images:
                kept_images.append((pixels * 255).round().to(torch.uint8).cpu())

    scores_of = dict(zip(pointwise, torch.cat(scores, dim=1), strict=True)) | cells.scores(len(latents))
    all_scores = torch.stack([scores_of[name] for name in rewards])
    if first_images is not None:
        first_images.set_scores(all_scores)
    tree_shape = (len(exploration.latents), num_prompts, group_size)
    num_tree = len(exploration.latents) * num_prompts * group_size
    branch_of_step = [b for b, branch in enumerate(plan.branches) for _ in branch.noise_steps]

    def by_step(values: Tensor) -> Tensor:
        """[N, all images] -> [N, K or 1, J, P, G]: two tails that share an image both get its value."""
        per_tail = values[:, :num_tree].unflatten(1, tree_shape)[:, torch.tensor(exploration.image_of_tail)]
        return per_tail[:, branch_of_step] if len(plan.branches) > 1 else per_tail

    rewards_by_step = by_step(all_scores)
    policy_finite = by_step(torch.cat(finite_images)[None])[0].all(1)
    if plan.noise_steps:
        policy_finite = policy_finite & exploration.log_prob.isfinite()
    valid = rewards_by_step.isfinite().all(2).all(0) & policy_finite
    images = torch.cat(kept_images) if keep_images else None
    tree_images = None if images is None else images[:num_tree].unflatten(0, tree_shape)
    has_anchor = exploration.anchor_latents is not None
    step = torch.tensor(plan.noise_steps, dtype=torch.int64, device=policy.device)[:, None]
    return [
        Rollout(
            x=exploration.x[:, p],
            x_next=exploration.x_next[:, p],
            log_prob=exploration.log_prob[:, p],
            step=step,
            train_mask=train_mask(plan, group_size, *key).to(policy.device),
            rewards=rewards_by_step[:, :, :, p],
            valid=valid[:, p],
            policy_finite=policy_finite[:, p],
            nfe={part: count // num_prompts for part, count in exploration.nfe.items()},
            prompt_index=key[-1],
            image_of_tail=exploration.image_of_tail,
            velocity=None if exploration.velocity is None else exploration.velocity[:, p],
            latents=exploration.latents[:, p] if keep_latents else None,
            images=None if tree_images is None else tree_images[:, p],
            anchor_rewards=all_scores[:, num_tree + p] if has_anchor else None,
            anchor_image=images[num_tree + p] if has_anchor and images is not None else None,
        )
        for p, key in enumerate(exploration.keys)
    ]


def train_mask(plan: Plan, group_size: int, seed: int, iteration: int, prompt_index: int) -> Tensor:
    """Returns [K, G], bool: the noise steps that each member trains, num_trained of them or all."""
    num_noise_steps = len(plan.noise_steps)
    if plan.num_trained is None:
        return torch.ones(num_noise_steps, group_size, dtype=torch.bool)
    mask = torch.zeros(num_noise_steps, group_size, dtype=torch.bool)
    for member in range(group_size):
        generator = keyed_generator(seed, iteration, prompt_index, "trained", member)
        mask[torch.randperm(num_noise_steps, generator=generator)[: plan.num_trained], member] = True
    return mask


def _images_to_score(exploration: Exploration) -> tuple[Tensor, list[int]]:
    """Returns the clean latents of all distinct images, those of the anchors last, and the group of each."""
    num_images, num_prompts, group_size = exploration.latents.shape[:3]
    owners = [p for _ in range(num_images) for p in range(num_prompts) for _ in range(group_size)]
    latents = exploration.latents.flatten(0, 2)
    if exploration.anchor_latents is None:
        return latents, owners
    return torch.cat([latents, exploration.anchor_latents]), [*owners, *range(num_prompts)]


def _decode(policy: Policy, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Returns images with 8-bit values, [N, 3, H, W] in [0, 1], and which of them are finite, [N]."""
    pixels = policy.decode(latents)
    finite = latents.isfinite().flatten(1).all(1) & pixels.isfinite().flatten(1).all(1)
    # A reward gets black in place of a non-finite image, and its score is then discarded.
    pixels = pixels.where(finite[:, None, None, None], 0.0)
    return (255 * pixels).round() / 255, finite
