"""Samples and rewards to rollouts: every state, log-probability and score of a group, in dense tensors.

Distinct images are decoded once, rounded to 8 bits as a file would hold them, and judged once by every
reward; tails that share an image share its scores. One layout serves every method: a path method, where
one image judges all steps, has one step and one granularity in its rewards, and broadcasts.

Axes: R reward, K noisy step, J granularity, G member, L tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from g2rpo.models.policy import Policy
from g2rpo.rewards.base import Metadata, Reward
from g2rpo.rewards.checked import ask
from g2rpo.rewards.model_reward import scoring
from g2rpo.rollouts.explore import Samples
from g2rpo.rollouts.plan import Plan
from g2rpo.runtime.random import keyed_generator
from g2rpo.runtime.timing import Timer


@dataclass(frozen=True)
class Rollout:
    """One group: one prompt, G members.

    Attributes:
        x: [K, G or 1, L, C], float32, the state before each noisy step; 1 where it is the group's anchor.
        x_next: [K, G, L, C], the state after it.
        log_prob: [K, G], of that step under the rollout's velocity.
        step: [K, 1], int64, the step's index into the schedule.
        train_mask: [K, G], the steps to train.
        rewards: [R, K or 1, J, G]; not a number = invalid. 1 where one image judges all steps of a path.
        valid: [K, G], everything that judges the step is a number.
        drawn: [K, G], the policy's part of that: the step's states and pictures are numbers.
        nfe: counted forwards of this group: anchor, sde, tails, total.
        prompt: its index in the stream of prompts.
        velocity: [K, 1, L, C], the rollout's at x, or None where x is not the group's anchor.
        images: [branches][J], which of the member's distinct images each tail ends at.
        pictures: [distinct images, G, 3, H, W], uint8 on the CPU, if kept.
        anchor_rewards: [R] of the anchor's image, or None where it was not walked to the end.
        anchor_picture: [3, H, W], uint8 on the CPU, if kept.
    """

    x: Tensor
    x_next: Tensor
    log_prob: Tensor
    step: Tensor
    train_mask: Tensor
    rewards: Tensor
    valid: Tensor
    drawn: Tensor
    nfe: dict[str, int]
    prompt: int
    images: tuple[tuple[int, ...], ...]
    velocity: Tensor | None = None
    pictures: Tensor | None = None
    anchor_rewards: Tensor | None = None
    anchor_picture: Tensor | None = None

    def judged(self) -> Rollout:
        """What other processes need of it, on the CPU: rewards and what is valid; no states or pictures."""
        none = self.x.new_zeros(0).cpu()
        kept = {name: getattr(self, name).cpu() for name in ("step", "rewards", "valid", "drawn")}
        anchor = None if self.anchor_rewards is None else self.anchor_rewards.cpu()
        return replace(
            self,
            x=none,
            x_next=none,
            log_prob=none,
            train_mask=none,
            velocity=None,
            pictures=None,
            anchor_picture=None,
            anchor_rewards=anchor,
            **kept,
        )


@torch.no_grad()
def score(
    policy: Policy,
    samples: Samples,
    rewards: Mapping[str, Reward],
    prompts: Sequence[str],
    metadata: Metadata | None = None,
    *,
    decode_batch: int = 24,
    keep_pictures: bool = False,
    timer: Timer | None = None,
) -> list[Rollout]:
    """Judge every distinct image once and hand out the groups.

    Args:
        rewards: by name, in the order of the axis R.
        prompts, metadata: one per group.
        decode_batch: images decoded and judged at once.
        keep_pictures: also return the pictures.
        timer: gets the laps "decode" and "reward".
    """
    plan = samples.plan
    _, num_prompts, group_size = samples.log_prob.shape
    if len(prompts) != num_prompts or (metadata is not None and len(metadata) != num_prompts):
        raise ValueError(f"need one prompt, and one metadata if any, for each of {num_prompts} groups")
    if not rewards:
        raise ValueError("nothing to score with: give at least one reward")
    owners = [p for _ in range(len(samples.latents)) for p in range(num_prompts) for _ in range(group_size)]
    latents = samples.latents.flatten(0, 2)
    if samples.anchor_latents is not None:
        owners += range(num_prompts)
        latents = torch.cat([latents, samples.anchor_latents])

    scores, pictures, whole = [], [], []
    with scoring(rewards.values()):
        for low in range(0, len(latents), decode_batch):
            batch = slice(low, low + decode_batch)
            pixels, usable = _decode(policy, latents[batch])
            whole.append(usable)
            if timer is not None:
                timer.lap("decode")
            whose = owners[batch]
            answers = []
            for name, reward in rewards.items():
                known = None if metadata is None else [metadata[p] for p in whose]
                answer = ask(reward, pixels, [prompts[p] for p in whose], known)
                if answer.shape != (len(pixels),):
                    raise ValueError(
                        f"reward {name!r} gave {tuple(answer.shape)} scores for {len(pixels)} images"
                    )
                answers.append(answer.to(policy.device, torch.float32).masked_fill(~usable, torch.nan))
            scores.append(torch.stack(answers))
            if timer is not None:
                timer.lap("reward")
            if keep_pictures:
                pictures.append((pixels * 255).round().to(torch.uint8).cpu())

    judged = torch.cat(scores, dim=1)
    tree_shape = (len(samples.latents), num_prompts, group_size)
    num_tree = len(samples.latents) * num_prompts * group_size
    branch_of_step = [b for b, branch in enumerate(plan.branches) for _ in branch.noise_steps]

    def by_step(images: Tensor) -> Tensor:
        """[N, all images] -> [N, K or 1, J, P, G]: two tails that share an image both get its value."""
        per_tail = images[:, :num_tree].unflatten(1, tree_shape)[:, torch.tensor(samples.images)]
        return per_tail[:, branch_of_step] if len(plan.branches) > 1 else per_tail

    per_tail = by_step(judged)
    drawn = by_step(torch.cat(whole)[None])[0].all(1) & samples.log_prob.isfinite()
    valid = per_tail.isfinite().all(2).all(0) & drawn
    shots = torch.cat(pictures) if keep_pictures else None
    tree_shots = None if shots is None else shots[:num_tree].unflatten(0, tree_shape)
    has_anchor = samples.anchor_latents is not None
    step = torch.tensor(plan.noise_steps, device=policy.device)[:, None]
    return [
        Rollout(
            x=samples.x[:, p],
            x_next=samples.x_next[:, p],
            log_prob=samples.log_prob[:, p],
            step=step,
            train_mask=train_mask(plan, group_size, *key).to(policy.device),
            rewards=per_tail[:, :, :, p],
            valid=valid[:, p],
            drawn=drawn[:, p],
            nfe={part: count // num_prompts for part, count in samples.nfe.items()},
            prompt=key[-1],
            images=samples.images,
            velocity=None if samples.velocity is None else samples.velocity[:, p],
            pictures=None if tree_shots is None else tree_shots[:, p],
            anchor_rewards=judged[:, num_tree + p] if has_anchor else None,
            anchor_picture=shots[num_tree + p] if has_anchor and shots is not None else None,
        )
        for p, key in enumerate(samples.keys)
    ]


def train_mask(plan: Plan, group_size: int, seed: int, iteration: int, prompt: int) -> Tensor:
    """[K, G], True for the steps that each member trains: all, or num_trained of them drawn by key."""
    num_noisy = len(plan.noise_steps)
    if plan.num_trained is None:
        return torch.ones(num_noisy, group_size, dtype=torch.bool)
    mask = torch.zeros(num_noisy, group_size, dtype=torch.bool)
    for member in range(group_size):
        generator = keyed_generator(seed, iteration, prompt, "trained", member)
        mask[torch.randperm(num_noisy, generator=generator)[: plan.num_trained], member] = True
    return mask


def _decode(policy: Policy, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels as an 8-bit file would hold them, and which of them come from finite numbers alone."""
    pixels = policy.decode(latents)
    usable = latents.isfinite().flatten(1).all(1) & pixels.isfinite().flatten(1).all(1)
    # A reward sees black instead of a non-finite picture, whose score is then dropped.
    pixels = pixels.where(usable[:, None, None, None], 0.0)
    return (255 * pixels).round() / 255, usable
