"""What the policy makes for a plan: the anchor, the noisy steps, and every way on to an image.

    start    one noise per prompt, shared by its group
    anchor   the ODE from it: states x_k and velocities, once per prompt
    grow     from each branch's anchor state: the noisy step (no forward: its velocity is the anchor's),
             then waves of forwards to the images, every shared state evaluated once (see tree.py)

The forwards are counted where the policy is called. States, means and log-probabilities are float32.
Nothing in the loop waits for the device: levels live on the CPU, and every index is known beforehand.
Batching changes results by rounding only.

Axes: R reward, P prompt, K noisy step, J granularity, G member, L tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from g2rpo.flow.group_noise import group_noise
from g2rpo.flow.sde import transition, transition_log_prob
from g2rpo.flow.solvers import dpm2m_step
from g2rpo.models.policy import Conditioning, Policy
from g2rpo.rollouts.plan import Plan
from g2rpo.rollouts.tree import make_tree
from g2rpo.runtime.random import keyed_noise
from g2rpo.runtime.timing import Timer

Key = tuple[int, int, int]
Tails = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Samples:
    """What the policy made for P prompts, before any reward.

    Attributes:
        plan: what was walked.
        keys: (seed, iteration, index in the stream) of each prompt.
        x: [K, P, G or 1, L, C], float32, the state before each noisy step; 1 where it is the anchor's.
        x_next: [K, P, G, L, C], the state after it.
        velocity: [K, P, 1, L, C], the anchor's at x, or None where x is not the anchor's.
        log_prob: [K, P, G], of that step under the policy's velocity.
        latents: [distinct images, P, G, L, C], clean.
        anchor_latents: [P, L, C], clean, or None where the anchor was not walked to its image.
        images: [branches][J], which distinct image each tail ends at.
        nfe: counted forwards of all P groups.
    """

    plan: Plan
    keys: tuple[Key, ...]
    x: Tensor
    x_next: Tensor
    velocity: Tensor | None
    log_prob: Tensor
    latents: Tensor
    anchor_latents: Tensor | None
    images: tuple[tuple[int, ...], ...]
    nfe: dict[str, int]


@dataclass(frozen=True)
class Anchor:
    """The group's shared path.

    Attributes:
        states, velocities: [P, L, C] by position, where a branch starts.
        latents: its clean image [P, L, C], if walked to the end.
    """

    states: dict[int, Tensor]
    velocities: dict[int, Tensor]
    latents: Tensor | None


class CountedPolicy:
    """Calls the policy in batches of at most `rollout_batch` samples and counts the forwards by part."""

    def __init__(self, policy: Policy, cond: Conditioning, rollout_batch: int) -> None:
        if rollout_batch < 1:
            raise ValueError(f"rollout_batch must be >= 1, got {rollout_batch}")
        self.policy, self.cond, self.rollout_batch = policy, cond, rollout_batch
        self.counts = {"anchor": 0, "sde": 0, "tails": 0}

    def __call__(
        self, nodes: list[Tensor], sigma: Tensor, rows: Tensor, parts: Sequence[str]
    ) -> list[Tensor]:
        """Velocities of nodes [S, L, C] each.

        Args:
            sigma, rows: level and prompt of every sample [nodes * S], on the policy's device.
            parts: what each node counts as.
        """
        per_node = len(nodes[0])
        x = torch.cat(nodes)
        velocities = []
        for low in range(0, len(x), self.rollout_batch):
            batch = slice(low, low + self.rollout_batch)
            velocities.append(self.policy.velocity(x[batch], sigma[batch], self.cond[rows[batch]]))
            high = low + len(velocities[-1])
            for n in range(low // per_node, (high - 1) // per_node + 1):
                samples = min(high, (n + 1) * per_node) - max(low, n * per_node)
                self.counts[parts[n]] += samples * self.policy.forwards_per_sample
        return list(torch.cat(velocities).split(per_node))


@torch.no_grad()
def sample(
    policy: Policy,
    plan: Plan,
    sigmas: Tensor,
    cond: Conditioning,
    *,
    group_size: int,
    diffusion: str,
    eta: float,
    seed: int,
    iteration: int,
    prompt_indices: Sequence[int],
    rollout_batch: int = 24,
    noise: str = "independent",
    timer: Timer | None = None,
    tails: Tails = nullcontext,
) -> Samples:
    """Everything that the policy makes for a plan: P prompts, G members each.

    Args:
        sigmas: the schedule [T + 1].
        cond: P rows.
        diffusion, eta: step rule of the noisy steps, see `sde.transition`.
        seed, iteration, prompt_indices: keys of the noise; the index of each prompt in its stream.
        rollout_batch: most samples in one forward.
        noise: how the members' noise depends on each other's, see `noise.group_noise`.
        timer: gets the laps "anchor" and "tails" (with the noisy steps of a path).
        tails: entered for the forwards that only a reward sees, such as FluxPolicy.tails.
    """
    if len(cond) != len(prompt_indices) or not prompt_indices:
        raise ValueError(f"{len(cond)} rows of conditioning for {len(prompt_indices)} prompts; give one each")
    levels = plan.levels(sigmas.detach().to("cpu", torch.float32))
    forwards = CountedPolicy(policy, cond, rollout_batch)
    keys = tuple((seed, iteration, prompt) for prompt in prompt_indices)
    start = torch.stack([keyed_noise(policy.latent_shape, *key, "start") for key in keys])
    drawn = torch.stack(
        [
            group_noise(noise, policy.latent_shape, group_size, key, step)
            for step in plan.noise_steps
            for key in keys
        ]
    ).unflatten(0, (len(plan.noise_steps), len(keys)))
    anchor = walk_anchor(forwards, plan, levels, _on(policy.device, start))
    if timer is not None:
        timer.lap("anchor")
    noise_here = _on(policy.device, drawn)
    with ExitStack() as entered:
        samples = grow(
            forwards,
            plan,
            levels,
            anchor,
            noise_here,
            keys,
            diffusion=diffusion,
            eta=eta,
            at_tails=lambda: entered.enter_context(tails()),
        )
    if timer is not None:
        timer.lap("tails")
    return samples


@torch.no_grad()
def walk_anchor(forwards: CountedPolicy, plan: Plan, levels: Tensor, start: Tensor) -> Anchor:
    """The shared ODE from the initial noise [P, L, C], as far as the plan needs it."""
    starts = {branch.noise_steps[0] for branch in plan.branches}
    rows = torch.arange(len(start), device=start.device)
    sigma = _on(start.device, levels[:, None].repeat(1, len(start)))
    states, velocities = {}, {}
    x = start
    for position in range(plan.anchor_evaluations):
        (velocity,) = forwards([x], sigma[position], rows, ("anchor",))
        if position in starts:
            states[position], velocities[position] = x, velocity
        x = x + velocity * (levels[position + 1] - levels[position])
    return Anchor(states, velocities, x if plan.finish_anchor else None)


@torch.no_grad()
def grow(
    forwards: CountedPolicy,
    plan: Plan,
    levels: Tensor,
    anchor: Anchor,
    noise: Tensor,
    keys: tuple[Key, ...],
    *,
    diffusion: str,
    eta: float,
    at_tails: Callable[[], object] = lambda: None,
) -> Samples:
    """All branches from the anchor's states to their images.

    Args:
        levels: of every position, on the CPU.
        noise: standard normal [K, P, G, L, C].
        keys: of the prompts, for what is drawn later.
        at_tails: called before the forwards from which on only a reward sees what comes out.
    """
    tree = make_tree(plan)
    num_noisy, num_prompts, group_size = noise.shape[:3]
    prompt_rows = torch.arange(num_prompts, device=noise.device).repeat_interleave(group_size)
    sigma = [
        _on(noise.device, levels[list(wave.positions)].repeat_interleave(len(prompt_rows)))
        for wave in tree.waves
    ]
    schedule = levels[: plan.num_steps + 1]
    before: list[Tensor | None] = [None] * num_noisy
    after, log_probs = list(before), list(before)
    images: list[Tensor | None] = [None] * tree.num_images

    starts = tree.waves[0].positions
    nodes = [anchor.states[position].repeat_interleave(group_size, 0) for position in starts]
    # dpm2m looks one image prediction back, over the noisy step too
    history: list[tuple[Tensor, int] | None] = [None] * len(nodes)
    for number, (wave, wave_sigma) in enumerate(zip(tree.waves, sigma, strict=True)):
        if number == tree.first_of_tails:
            at_tails()
        if wave is tree.waves[0]:
            velocities = [anchor.velocities[position].repeat_interleave(group_size, 0) for position in starts]
        else:
            velocities = forwards(nodes, wave_sigma, prompt_rows.repeat(len(nodes)), wave.parts)
        next_nodes, next_history = [], []
        for edge in wave.edges:
            x, velocity = nodes[edge.node], velocities[edge.node]
            level, next_level = levels[edge.position], levels[edge.next_position]
            x0 = x - level * velocity if plan.solver == "dpm2m" else None
            if edge.noise is not None:
                mean, std = transition(diffusion, x, velocity, schedule, edge.position, eta)
                x_next = mean + std * noise[edge.noise].flatten(0, 1)
                before[edge.noise], after[edge.noise] = x, x_next
                log_probs[edge.noise] = transition_log_prob(diffusion, x_next, mean, std)
            elif x0 is None:
                x_next = x + velocity * (next_level - level)
            else:
                x0_previous, previous = history[edge.node] or (None, None)
                sigma_previous = None if previous is None else levels[previous]
                x_next = dpm2m_step(x, x0, level, next_level, x0_previous, sigma_previous)
            if edge.image is None:
                next_nodes.append(x_next)
                next_history.append(None if x0 is None else (x0, edge.position))
            else:
                images[edge.image] = x_next
        nodes, history = next_nodes, next_history

    def stacked(rows: list[Tensor | None]) -> Tensor:
        return torch.stack([row for row in rows if row is not None]).unflatten(1, (num_prompts, group_size))

    shared: Tensor | None = None
    at_anchor: Tensor | None = None
    if plan.shares_states:
        shared = torch.stack([anchor.states[step][:, None] for step in plan.noise_steps])
        at_anchor = torch.stack([anchor.velocities[step][:, None] for step in plan.noise_steps])
    return Samples(
        plan=plan,
        keys=keys,
        x=stacked(before) if shared is None else shared,
        x_next=stacked(after),
        velocity=at_anchor,
        log_prob=stacked(log_probs),
        latents=stacked(images),
        anchor_latents=anchor.latents,
        images=tree.images,
        nfe={**forwards.counts, "total": sum(forwards.counts.values())},
    )


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    """A CPU tensor moved without waiting, which needs pinned memory."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
