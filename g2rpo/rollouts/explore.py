"""Exploration: executes a plan with the policy, from the initial noise to every final latent.

    start           one initial noise per prompt, shared by its group, or one per member
    anchor          the ODE from the start: states x_k and velocities, computed once per prompt (or member)
    run_branches    from each branch's anchor state: the noise step (no forward, because its velocity is the
                    anchor's), then waves of forwards up to the images; each shared state is evaluated once
                    (see tree.py)

Forwards are counted where the policy is called. States, means and log-probabilities are float32. The loop
never synchronises with the device: noise levels stay on the CPU, and all indices are computed in advance.
The batch size changes results by rounding only.

Axes: R reward, P prompt, K noise step, J granularity, G member, L tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from g2rpo.flow.group_noise import group_noise, start_noise
from g2rpo.flow.sde import transition, transition_log_prob
from g2rpo.flow.solvers import dpm2m_step
from g2rpo.models.policy import Conditioning, Policy
from g2rpo.rollouts.plan import Plan
from g2rpo.rollouts.tree import make_tree
from g2rpo.runtime.processes import copied_to
from g2rpo.runtime.progress import phase
from g2rpo.runtime.random import keyed_noise
from g2rpo.runtime.timing import Timer

Key = tuple[int, int, int]
TailContext = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Exploration:
    """States, log-probabilities and clean latents of P groups, before any reward. Tensors are float32.

    Attributes:
        plan: the plan that was executed.
        keys: (seed, iteration, prompt_index) of each prompt.
        x: [K, P, G or 1, L, C], the state before each noise step; size 1 if it is the shared anchor state.
            K is 0 for a plan without noise steps.
        x_next: [K, P, G, L, C], the state after the noise step.
        velocity: [K, P, 1, L, C], the anchor's velocity at x, or None if x is not an anchor state.
        log_prob: [K, P, G], log-probability of the noise step under the policy's velocity.
        latents: [distinct images, P, G, L, C], clean latents.
        anchor_latents: [P, L, C], clean latents of the anchor, or None if it was not continued to its image.
        image_of_tail: [branches][J], index of the distinct image at which each tail ends.
        nfe: counted forwards of all P groups: anchor, sde, tails, total.
    """

    plan: Plan
    keys: tuple[Key, ...]
    x: Tensor
    x_next: Tensor
    velocity: Tensor | None
    log_prob: Tensor
    latents: Tensor
    anchor_latents: Tensor | None
    image_of_tail: tuple[tuple[int, ...], ...]
    nfe: dict[str, int]


@dataclass(frozen=True)
class Anchor:
    """The ODE path that all members of a group share, or one per member with individual noise.

    Attributes:
        states, velocities: position -> [P, L, C], or [P * G, L, C] with individual noise; float32, at the
            positions where a branch starts.
        latents: [P, L, C], its clean latents, or None if it was not continued to the end.
    """

    states: dict[int, Tensor]
    velocities: dict[int, Tensor]
    latents: Tensor | None


class CountedPolicy:
    """Calls the policy in batches of at most `rollout_batch` samples and counts the forwards of each part.

    Attributes:
        counts: forwards so far, of "anchor", "sde" and "tails".
        count: called with the number of forwards of each call of the policy.
    """

    def __init__(
        self,
        policy: Policy,
        cond: Conditioning,
        rollout_batch: int,
        count: Callable[[int], None] = lambda forwards: None,
    ) -> None:
        if rollout_batch < 1:
            raise ValueError(f"rollout_batch must be >= 1, got {rollout_batch}")
        self.policy, self.cond, self.rollout_batch, self.count = policy, cond, rollout_batch, count
        self.counts = {"anchor": 0, "sde": 0, "tails": 0}

    def __call__(
        self, nodes: list[Tensor], sigma: Tensor, rows: Tensor, parts: Sequence[str], levels: Tensor
    ) -> list[Tensor]:
        """Evaluates the velocities of several nodes; with several modules, one module at a time.

        Args:
            nodes: states [S, L, C], one tensor per node.
            sigma: noise level of each sample, [nodes * S], on the policy's device.
            rows: conditioning row of each sample, [nodes * S], on the CPU.
            parts: the part as which each node is counted.
            levels: noise level of each node, on the CPU.

        Returns:
            One velocity [S, L, C] per node.
        """
        if len(self.policy.modules) == 1:
            return self._evaluate(nodes, sigma, rows, parts)
        experts = [self.policy.expert_of(level) for level in levels.tolist()]
        sigmas, rows_of = sigma.split(len(nodes[0])), rows.split(len(nodes[0]))
        velocities: dict[int, Tensor] = {}
        for name in self.policy.modules:
            own = [n for n, expert in enumerate(experts) if expert == name]
            if own:
                evaluated = self._evaluate(
                    [nodes[n] for n in own],
                    torch.cat([sigmas[n] for n in own]),
                    torch.cat([rows_of[n] for n in own]),
                    [parts[n] for n in own],
                )
                velocities |= dict(zip(own, evaluated, strict=True))
        return [velocities[n] for n in range(len(nodes))]

    def _evaluate(
        self, nodes: list[Tensor], sigma: Tensor, rows: Tensor, parts: Sequence[str]
    ) -> list[Tensor]:
        per_node = len(nodes[0])
        x = torch.cat(nodes)
        velocities = []
        for low in range(0, len(x), self.rollout_batch):
            batch = slice(low, low + self.rollout_batch)
            velocities.append(self.policy.velocity(x[batch], sigma[batch], self.cond[rows[batch]]))
            high = low + len(velocities[-1])
            self.count((high - low) * self.policy.forwards_per_sample)
            for n in range(low // per_node, (high - 1) // per_node + 1):
                samples = min(high, (n + 1) * per_node) - max(low, n * per_node)
                self.counts[parts[n]] += samples * self.policy.forwards_per_sample
        return list(torch.cat(velocities).split(per_node))


@torch.no_grad()
def explore(
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
    tails: TailContext = nullcontext,
) -> Exploration:
    """Executes a plan for P prompts with G members each.

    Args:
        policy: the policy that is explored.
        plan: the noise steps and tails.
        sigmas: [T + 1], falling from 1 to 0.
        cond: conditioning of the prompts, P rows.
        group_size: G.
        diffusion, eta: step rule of the noise steps and its strength, see `sde.transition`.
        seed, iteration, prompt_indices: keys of the noise; a prompt index is the position in the stream.
        rollout_batch: maximum number of samples per forward.
        noise: dependence between the noise of a group's members, at noise steps and at the start if that is
            individual, see `group_noise.group_noise`.
        timer: receives the laps "anchor" and "tails" (which includes the later noise steps of a path).
        tails: context manager for the forwards whose results only a reward sees, `Policy.tails`.

    Raises:
        ValueError: the number of conditioning rows differs from that of the prompts, rollout_batch < 1, or
            sigmas that do not fit the plan.
    """
    if len(cond) != len(prompt_indices) or not prompt_indices:
        raise ValueError(
            f"got {len(cond)} rows of conditioning for {len(prompt_indices)} prompts; give one row per prompt"
        )
    levels = plan.levels(sigmas.detach().to("cpu", torch.float32))
    keys = tuple((seed, iteration, prompt) for prompt in prompt_indices)
    shape, rows = policy.latent_shape, torch.arange(len(keys))
    if plan.individual_noise:
        start = torch.cat([start_noise(noise, shape, group_size, key) for key in keys])
        rows = rows.repeat_interleave(group_size)
    else:
        start = torch.stack([keyed_noise(shape, *key, "start") for key in keys])
    drawn = [group_noise(noise, shape, group_size, key, step) for step in plan.noise_steps for key in keys]
    all_noise = torch.stack(drawn) if drawn else start.new_empty(0, group_size, *shape)
    member_noise = all_noise.unflatten(0, (len(plan.noise_steps), len(keys)))
    total = plan.nfe(group_size, policy.forwards_per_sample)["total"] * len(keys)
    with ExitStack() as stack, phase("rollout", total, "forwards", repeated=True) as rollout:
        forwards = CountedPolicy(policy, cond, rollout_batch, rollout.add)
        anchor = walk_anchor(forwards, plan, levels, copied_to(policy.device, start), rows)
        if timer is not None:
            timer.lap("anchor")
        member_noise = copied_to(policy.device, member_noise)
        exploration = run_branches(
            forwards,
            plan,
            levels,
            anchor,
            member_noise,
            keys,
            diffusion=diffusion,
            eta=eta,
            before_tails=lambda: stack.enter_context(tails()),
        )
    if timer is not None:
        timer.lap("tails")
    return exploration


@torch.no_grad()
def walk_anchor(
    forwards: CountedPolicy, plan: Plan, levels: Tensor, start: Tensor, rows: Tensor | None = None
) -> Anchor:
    """Integrates the ODE from the initial noise, as far as the plan needs it.

    Without noise steps this is the first evaluation of the tails.

    Args:
        forwards: the policy, counted.
        plan: says at which positions branches start and where the anchor ends.
        levels: noise level of each position, on the CPU.
        start: initial noise [P, L, C], or [P * G, L, C] with individual noise, float32.
        rows: row of the conditioning of each state, on the CPU; None = 0, 1, 2, ...
    """
    starts = {branch.start for branch in plan.branches}
    part = "anchor" if plan.noise_steps else "tails"
    rows = torch.arange(len(start)) if rows is None else rows
    sigma = copied_to(start.device, levels[:, None].repeat(1, len(start)))
    states, velocities = {}, {}
    x = start
    for position in range(max(plan.anchor_evaluations, 1)):
        (velocity,) = forwards([x], sigma[position], rows, (part,), levels[position : position + 1])
        if position in starts:
            states[position], velocities[position] = x, velocity
        x = x + velocity * (levels[position + 1] - levels[position])
    return Anchor(states, velocities, x if plan.finish_anchor else None)


@torch.no_grad()
def run_branches(
    forwards: CountedPolicy,
    plan: Plan,
    levels: Tensor,
    anchor: Anchor,
    noise: Tensor,
    keys: tuple[Key, ...],
    *,
    diffusion: str,
    eta: float,
    before_tails: Callable[[], object] = lambda: None,
) -> Exploration:
    """Executes all branches from the anchor's states to their images.

    Args:
        forwards: the policy, counted.
        plan: the branches and their tails.
        levels: noise level of each position, on the CPU.
        anchor: the states from which the branches start.
        noise: [K, P, G, L, C], standard normal.
        keys: (seed, iteration, prompt_index) of each prompt, stored with the result.
        diffusion, eta: step rule of the noise steps and its strength.
        before_tails: called before the first wave whose results only a reward sees.
    """
    tree = make_tree(plan)
    num_noise_steps, num_prompts, group_size = noise.shape[:3]
    prompt_rows = torch.arange(num_prompts).repeat_interleave(group_size)
    wave_sigmas = [
        copied_to(noise.device, levels[list(wave.positions)].repeat_interleave(len(prompt_rows)))
        for wave in tree.waves
    ]
    sigmas = levels[: plan.num_steps + 1]
    before: list[Tensor | None] = [None] * num_noise_steps
    after, log_probs = list(before), list(before)
    images: list[Tensor | None] = [None] * tree.num_images

    starts = tree.waves[0].positions
    copies = 1 if plan.individual_noise else group_size
    nodes = [anchor.states[position].repeat_interleave(copies, 0) for position in starts]
    # dpm2m uses the previous image prediction, including the one at the noise step
    history: list[tuple[Tensor, int] | None] = [None] * len(nodes)
    for number, (wave, sigma) in enumerate(zip(tree.waves, wave_sigmas, strict=True)):
        if number == tree.first_tail_wave:
            before_tails()
        if wave is tree.waves[0]:
            velocities = [anchor.velocities[position].repeat_interleave(copies, 0) for position in starts]
        else:
            rows = prompt_rows.repeat(len(nodes))
            velocities = forwards(nodes, sigma, rows, wave.parts, levels[list(wave.positions)])
        next_nodes, next_history = [], []
        for edge in wave.edges:
            x, velocity = nodes[edge.node], velocities[edge.node]
            level, next_level = levels[edge.position], levels[edge.next_position]
            x0 = x - level * velocity if plan.solver == "dpm2m" else None
            if edge.noise is not None:
                mean, std = transition(diffusion, x, velocity, sigmas, edge.position, eta)
                x_next = mean + std * noise[edge.noise].flatten(0, 1)
                before[edge.noise], after[edge.noise] = x, x_next
                log_probs[edge.noise] = transition_log_prob(diffusion, x_next, mean, std)
            elif x0 is None:
                x_next = x + velocity * (next_level - level)
            else:
                x0_previous, position_previous = history[edge.node] or (None, None)
                sigma_previous = None if position_previous is None else levels[position_previous]
                x_next = dpm2m_step(x, x0, level, next_level, x0_previous, sigma_previous)
            if edge.image is None:
                next_nodes.append(x_next)
                next_history.append(None if x0 is None else (x0, edge.position))
            else:
                images[edge.image] = x_next
        nodes, history = next_nodes, next_history

    def stacked(rows: list[Tensor | None], shape: tuple[int, ...] = noise.shape[3:]) -> Tensor:
        if not rows:
            return noise.new_empty(0, num_prompts, group_size, *shape)
        return torch.stack([row for row in rows if row is not None]).unflatten(1, (num_prompts, group_size))

    anchor_x: Tensor | None = None
    anchor_velocity: Tensor | None = None
    if plan.shares_states:
        anchor_x = torch.stack([anchor.states[step][:, None] for step in plan.noise_steps])
        anchor_velocity = torch.stack([anchor.velocities[step][:, None] for step in plan.noise_steps])
    return Exploration(
        plan=plan,
        keys=keys,
        x=stacked(before) if anchor_x is None else anchor_x,
        x_next=stacked(after),
        velocity=anchor_velocity,
        log_prob=stacked(log_probs, ()),
        latents=stacked(images),
        anchor_latents=anchor.latents,
        image_of_tail=tree.image_of_tail,
        nfe={**forwards.counts, "total": sum(forwards.counts.values())},
    )
