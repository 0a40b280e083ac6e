"""One group, as training explores it: anchor path, branches, rewards, advantages, and what an update favours.

The plan, the rollout, the rewards, the advantages and the loss are those of training (rollouts/, rewards/,
objectives/); nothing is computed a second way. Added for people: the images along the anchor path, and the
images that the direction of the update leads to.

    singular   noise on one step k at a time, each branch finished by an ODE tail per granularity (G2RPO)
    path       noise on every step but the last, one image per branch (Flow-GRPO)

Axes: R reward, K noise step, J granularity, G member, L tokens, C channels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from g2rpo.data.prompts import checked_text
from g2rpo.flow.group_noise import GROUP_NOISES
from g2rpo.flow.group_noise import start_noise as member_starts
from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.flow.sde import transition
from g2rpo.models.policy import Conditioning, Policy
from g2rpo.objectives.advantages import advantages_of, group_advantages
from g2rpo.objectives.base import Context
from g2rpo.objectives.grpo import GrpoObjective, GrpoRows
from g2rpo.objectives.stats import rank_correlation
from g2rpo.rewards.base import Metadata
from g2rpo.rewards.checked import CheckedReward
from g2rpo.rewards.registry import load_reward
from g2rpo.rollouts.explore import CountedPolicy, explore, walk_anchor
from g2rpo.rollouts.plan import Plan
from g2rpo.rollouts.rules import EveryStep, Singular
from g2rpo.rollouts.score import Rollout, score
from g2rpo.runtime.random import keyed_noise

SAMPLINGS = ("singular", "path")

LOCAL_REWARDS = ("tiny_preference", "tiny_clip", "verifier", "verifier_strict", "colourfulness")
"""Rewards that need neither a download nor a server."""

MAX_GROUP, MAX_STEPS, MAX_GRANULARITIES, MAX_NOISE_STEPS = 16, 30, 4, 6
MAX_FORWARDS = 1500
"""Limits of a group on the page, so that one request cannot occupy the machine for long."""

DIFFUSION, CLIP = "flow", 5.0
"""Step rule and bound of the advantages, the defaults of the methods."""

TOKENS_PER_FORWARD = 8192
"""Latent tokens of one forward, which bounds its memory and the wait until a request can be cancelled."""

Progress = Callable[[int, int, str], None]
"""Receives forwards done, forwards in total, and what is computed; it raises to cancel."""


@dataclass(frozen=True)
class ExploreRequest:
    """What to explore. The defaults are a group of 6 members at 3 granularities.

    Attributes:
        prompt: the text.
        rewards: reward name -> weight.
        sampling: "singular" or "path".
        noise_steps: indices k of the noise steps, of singular sampling.
        granularities: strides of the tails, Lambda, of singular sampling.
        num_steps: denoising steps, T.
        eta: strength of the noise, > 0.
        group_size: members, G.
        seed: of all noise.
        shared_start: whether the members share the initial noise, as in training.
        noise: dependence between the noise of the members, see `group_noise.group_noise`.
        shift: of the sigmas.
    """

    prompt: str
    rewards: Mapping[str, float]
    sampling: str = "singular"
    noise_steps: tuple[int, ...] = (1,)
    granularities: tuple[int, ...] = (1, 2, 3)
    num_steps: int = 8
    eta: float = 0.7
    group_size: int = 6
    seed: int = 0
    shared_start: bool = True
    noise: str = "independent"
    shift: float = 3.0

    def __post_init__(self) -> None:
        """Checks the request.

        Raises:
            ValueError: a value is not allowed; the message says which are.
        """
        checked_text(self.prompt, "Prompt")
        _check_choice("sampling", self.sampling, SAMPLINGS)
        _check_choice("noise", self.noise, GROUP_NOISES)
        _check_range("the number of denoising steps T", self.num_steps, 3, MAX_STEPS)
        _check_range("the group size G", self.group_size, 2, MAX_GROUP)
        _check_range("the seed", self.seed, 0, 2**31 - 1)
        if not 0 < self.eta <= 2:
            raise ValueError(f"eta is {self.eta}; give a number above 0 and at most 2")
        if not 0 < self.shift <= 20:
            raise ValueError(f"the shift is {self.shift}; give a number above 0 and at most 20")
        if not self.rewards:
            raise ValueError("no reward is chosen; choose at least one, otherwise there are no advantages")
        if self.sampling == "singular":
            self._check_singular()
        forwards = self.plan().nfe(self.group_size)["total"]
        if forwards > MAX_FORWARDS:
            raise ValueError(
                f"this group needs {forwards:,} forwards, and the page computes at most {MAX_FORWARDS:,}; "
                "choose fewer noise steps, members, granularities or denoising steps"
            )

    def _check_singular(self) -> None:
        _check_list("noise step k", self.noise_steps, 0, self.num_steps - 2, MAX_NOISE_STEPS)
        _check_list("granularity", self.granularities, 1, self.num_steps - 1, MAX_GRANULARITIES)

    def plan(self) -> Plan:
        """Returns the plan of the group, as the plan rules of training make it."""
        if self.sampling == "path":
            plan = EveryStep().plan(self.num_steps, self.seed, 0)
        else:
            rule = Singular(tuple(sorted(self.noise_steps)), tuple(sorted(self.granularities)))
            plan = rule.plan(self.num_steps, self.seed, 0)
        return plan if self.shared_start else replace(plan, individual_noise=True, finish_anchor=False)

    @property
    def sigmas(self) -> Tensor:
        """The noise levels, [T + 1]."""
        return shifted_sigmas(self.num_steps, self.shift)


PRESETS: dict[str, dict[str, Any]] = {
    "G2RPO: one noise step, granularities 1, 2, 3": {
        "sampling": "singular", "noise_steps": (1,), "granularities": (1, 2, 3), "shared_start": True,
    },
    "Path sampling: noise at every step (Flow-GRPO)": {
        "sampling": "path", "shared_start": True,
    },
    "Fine only: granularity 1": {
        "sampling": "singular", "noise_steps": (1,), "granularities": (1,), "shared_start": True,
    },
    "Coarse only: granularity 3": {
        "sampling": "singular", "noise_steps": (1,), "granularities": (3,), "shared_start": True,
    },
    "An early and a late noise step": {
        "sampling": "singular", "noise_steps": (0, 4), "granularities": (1, 2), "shared_start": True,
    },
    "Initial noise not shared": {
        "sampling": "singular", "noise_steps": (1,), "granularities": (1, 2, 3), "shared_start": False,
    },
}  # fmt: skip
"""Title -> fields of the request that the preset sets."""


@dataclass(frozen=True)
class AnchorPath:
    """The ODE path of a group, decoded at every position.

    With individual noise it is the path of the first member.

    Attributes:
        states: [T + 1, 3, H, W], uint8, the decoded states x_0, ..., x_T; the last is the image.
        predictions: [T + 1, 3, H, W], uint8, the decoded image predictions x - sigma v.
    """

    states: Tensor
    predictions: Tensor


@dataclass(frozen=True)
class Push:
    """Where the update pushes a noise step: its mean is moved along the direction of the update.

    The direction is the negative gradient of the loss of training with respect to the velocity at x_k. The
    mean moves by one standard deviation of the step's noise, root mean square over the latent dimensions; an
    optimizer step moves it far less. An ODE tail of stride 1 follows.

    Attributes:
        images: [3, 3, H, W], uint8: against the direction, unchanged mean, along the direction.
        rewards: [R, 3], their scores; NaN for a reward that judges groups only.
    """

    images: Tensor
    rewards: Tensor


@dataclass(frozen=True)
class Cell:
    """The branches of one noise step, or of all noise steps of a path.

    Attributes:
        noise_steps: one index k, or all those of a path.
        granularities: strides of the tails, J of them; of a path (1,).
        images: [J, G, 3, H, W], uint8.
        rewards: [R, J, G].
        parts: [J, G], the advantages that each granularity would give alone, not clipped. Their sum, clipped
            to +-5, is the advantage.
        advantages: [G].
        valid: [G], bool; other members have advantage 0.
        push: None if the members have no common state, or if no member has an advantage.
    """

    noise_steps: tuple[int, ...]
    granularities: tuple[int, ...]
    images: Tensor
    rewards: Tensor
    parts: Tensor
    advantages: Tensor
    valid: Tensor
    push: Push | None

    @property
    def order(self) -> list[int]:
        """Members by advantage, the largest first."""
        return [int(g) for g in self.advantages.argsort(descending=True, stable=True)]

    @property
    def agreement(self) -> float | None:
        """Rank correlation of the granularities' rankings of the members, in [-1, 1]; None with only one."""
        return rank_correlation(self.parts).item() if len(self.parts) > 1 else None

    @property
    def has_advantages(self) -> bool:
        """Whether any member has an advantage."""
        return bool((self.advantages != 0).any())

    def mean_image(self, favoured: bool) -> Tensor | None:
        """Returns the mean image of the favoured or of the disfavoured branches, [3, H, W] in [0, 1].

        Branches are weighted by the size of their advantages; None if there is no such branch.
        """
        weight = self.advantages.clamp(min=0) if favoured else (-self.advantages).clamp(min=0)
        if not bool((weight > 0).any()):
            return None
        images = self.images.float().mean(0) / 255  # over granularities
        return (weight[:, None, None, None] * images).sum(0) / weight.sum()


@dataclass(frozen=True)
class ExploredGroup:
    """A group with everything that the page shows.

    Attributes:
        request: what was asked.
        anchor: the ODE path.
        anchor_rewards: [R] of the anchor's image.
        cells: one per noise step; one for a path.
        nfe: counted forwards of the rollout, as `Plan.nfe` predicts them.
        seconds: of everything.
        problems: reward name -> why samples have no score.
    """

    request: ExploreRequest
    anchor: AnchorPath
    anchor_rewards: Tensor
    cells: tuple[Cell, ...]
    nfe: dict[str, int]
    seconds: float
    problems: dict[str, str]


class WatchedPolicy(Policy):
    """A policy that reports every forward, so that progress shows and a request can be cancelled."""

    def __init__(self, policy: Policy, report: Callable[[int], None]) -> None:
        """Wraps `policy`; `report` receives the number of samples of each call, before it."""
        self._policy, self._report = policy, report
        self.latent_shape, self.device, self.modules = policy.latent_shape, policy.device, policy.modules
        self.forwards_per_sample, self.resolution = policy.forwards_per_sample, policy.resolution
        self.negative_prompt, self.folder = policy.negative_prompt, policy.folder

    def encode(self, prompts: list[str]) -> Conditioning:
        """As the policy."""
        return self._policy.encode(prompts)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """As the policy, after a report."""
        self._report(len(x))
        return self._policy.velocity(x, sigma, cond)

    def decode(self, latents: Tensor) -> Tensor:
        """As the policy."""
        return self._policy.decode(latents)

    def expert_of(self, sigma: float) -> str:
        """As the policy."""
        return self._policy.expert_of(sigma)

    def tails(self) -> AbstractContextManager[None]:
        """As the policy."""
        return self._policy.tails()


@lru_cache(maxsize=16)
def cached_reward(name: str, device: torch.device) -> CheckedReward:
    """Loads a registered reward once; code of the user is not imported.

    Raises:
        ValueError: an unknown name, or a `module:attribute`.
    """
    if ":" in name:
        raise ValueError(f"{name}: this page imports no code; choose a registered reward")
    return load_reward(name, device)


@torch.no_grad()
def explore_group(
    policy: Policy,
    request: ExploreRequest,
    *,
    metadata: Mapping[str, Any] | None = None,
    rewards: Mapping[str, CheckedReward] | None = None,
    prompt_index: int = 0,
    progress: Progress = lambda done, total, text: None,
) -> ExploredGroup:
    """Explores one group as an iteration of training does, and what its update favours.

    The group is that of iteration 0 of a run with this seed, at position `prompt_index` of its prompts.

    Args:
        policy: the model.
        request: what to explore.
        metadata: fields of the prompt's record, for the rewards.
        rewards: name -> reward, of `request.rewards`; None: they are loaded by name.
        prompt_index: position of the prompt in a run's stream of prompts.
        progress: called before every forward; an exception of it ends the exploration.

    Raises:
        ValueError: a reward cannot be loaded, or the model and the request do not fit together.
    """
    began = time.perf_counter()
    plan, sigmas = request.plan(), request.sigmas
    if rewards is None:
        rewards = {name: cached_reward(name, policy.device) for name in request.rewards}
    for reward in rewards.values():
        reward.last_error = None
    counter = _Counter(progress, _total_forwards(plan, request))
    watched = WatchedPolicy(policy, counter.add)
    batch = max(1, min(24, TOKENS_PER_FORWARD // policy.latent_shape[0]))
    counter.now("encoding the prompt")
    if policy.negative_prompt is not None:
        policy.set_negative(policy.encode([policy.negative_prompt]))
    cond = policy.encode([request.prompt])
    counter.now("anchor path")
    anchor, end = _anchor_path(watched, request, cond, batch, prompt_index)
    counter.now("branches")
    exploration = explore(
        watched,
        plan,
        sigmas,
        cond,
        group_size=request.group_size,
        diffusion=DIFFUSION,
        eta=request.eta,
        seed=request.seed,
        iteration=0,
        prompt_indices=[prompt_index],
        rollout_batch=batch,
        noise=request.noise,
        tails=policy.tails,
    )
    counter.now("decoding and scoring")
    about: Metadata | None = None if metadata is None else [dict(metadata)]
    (rollout,) = score(
        policy, exploration, rewards, [request.prompt], about, decode_batch=batch, keep_images=True
    )
    (advantages,) = advantages_of([rollout], list(request.rewards.values()), clip=CLIP)
    counter.now("direction of the update")
    pushes = _pushes(watched, request, rollout, advantages, cond, rewards, about, batch)
    anchor_rewards = rollout.anchor_rewards
    if anchor_rewards is None:  # of a path, or of individual noise: its image is not part of the rollout
        anchor_rewards = _scores(rewards, end, request.prompt, about)[:, 0]
    counter.now("done")
    return ExploredGroup(
        request=request,
        anchor=anchor,
        anchor_rewards=anchor_rewards.cpu(),
        cells=tuple(_cells(request, plan, rollout, advantages, pushes)),
        nfe=exploration.nfe,
        seconds=time.perf_counter() - began,
        problems={name: e for name, reward in rewards.items() if (e := reward.last_error)},
    )


class _Counter:
    """Adds up forwards for `Progress`."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done, self._text = progress, total, 0, ""

    def now(self, text: str) -> None:
        self._text = text
        self._progress(min(self._done, self._total), self._total, text)

    def add(self, samples: int) -> None:
        self._progress(min(self._done, self._total), self._total, self._text)
        self._done += samples


def _total_forwards(plan: Plan, request: ExploreRequest) -> int:
    pushed = 3 * sum(request.num_steps - k - 1 for k in plan.noise_steps) if plan.shares_states else 0
    return request.num_steps + plan.nfe(request.group_size)["total"] + pushed


def _anchor_path(
    policy: WatchedPolicy, request: ExploreRequest, cond: Conditioning, batch: int, prompt_index: int
) -> tuple[AnchorPath, Tensor]:
    """Walks the ODE with the rollout's own function, and decodes every state and prediction.

    Returns:
        The path, and its image, [1, 3, H, W] in [0, 1].
    """
    # A plan whose branches start at every position makes walk_anchor keep every state.
    plan = Singular(tuple(range(request.num_steps - 1)), (1,)).plan(request.num_steps, request.seed, 0)
    levels = plan.levels(request.sigmas)
    key = (request.seed, 0, prompt_index)
    if request.shared_start:
        start = keyed_noise(policy.latent_shape, *key, "start")[None]
    else:
        start = member_starts(request.noise, policy.latent_shape, request.group_size, key)[:1]
    anchor = walk_anchor(CountedPolicy(policy, cond, batch), plan, levels, start.to(policy.device))
    assert anchor.latents is not None
    last = request.num_steps - 1
    states = [anchor.states[i] for i in range(last)]
    velocities = [anchor.velocities[i] for i in range(last)]
    states.append(states[-1] + velocities[-1] * (levels[last] - levels[last - 1]))
    # At the last step the prediction is the image itself: x - sigma v is the Euler step to sigma = 0.
    predictions = [x - levels[i] * v for i, (x, v) in enumerate(zip(states, velocities, strict=False))]
    shown = torch.cat([*states, anchor.latents, *predictions, anchor.latents, anchor.latents])
    pixels = torch.cat([policy.decode(part) for part in shown.split(batch)])
    images = _bytes(pixels)
    count = request.num_steps + 1
    return AnchorPath(images[:count], images[count:]), pixels[count - 1 : count]


def _pushes(
    policy: WatchedPolicy,
    request: ExploreRequest,
    rollout: Rollout,
    advantages: Tensor,
    cond: Conditioning,
    rewards: Mapping[str, CheckedReward],
    metadata: Metadata | None,
    batch: int,
) -> list[Push | None]:
    """Returns a push per noise step; None where there is no direction."""
    if rollout.velocity is None or not bool((advantages != 0).any()):
        return [None] * len(advantages)
    velocity = rollout.velocity[:, 0]  # [K, L, C]
    direction = update_direction(request, rollout, advantages)
    levels, pushed = request.sigmas, []
    for k, step in enumerate(rollout.step.flatten().tolist()):
        x, v = rollout.x[k], velocity[k : k + 1]
        mean, std = transition(DIFFUSION, x, v, levels.to(x.device), step, request.eta)
        moved, _ = transition(DIFFUSION, x, v + direction[k : k + 1], levels.to(x.device), step, request.eta)
        shift = moved - mean
        size = shift.square().mean().sqrt()
        unit = torch.zeros_like(shift) if float(size) == 0 else shift / size
        pushed.append(torch.cat([mean - std * unit, mean, mean + std * unit]))
    latents = _finish(policy, pushed, rollout.step.flatten().tolist(), levels, cond, batch)
    pixels = torch.cat([policy.decode(part) for part in latents.split(batch)])
    scores = _scores(rewards, pixels, request.prompt, metadata).unflatten(1, (-1, 3))
    images = _bytes(pixels).unflatten(0, (-1, 3))
    flat = (advantages == 0).all(1).tolist()
    return [None if flat[k] else Push(images[k], scores[:, k].cpu()) for k in range(len(images))]


def update_direction(request: ExploreRequest, rollout: Rollout, advantages: Tensor) -> Tensor:
    """Returns the negative gradient of the loss of training by the velocity at each noise step, [K, L, C].

    The loss is the clipped surrogate on the rows that training makes of this group.

    Args:
        request: gives sigmas, eta and seed.
        rollout: of a plan whose noise steps start at the anchor's states.
        advantages: [K, G].
    """
    assert rollout.velocity is not None
    objective = GrpoObjective(DIFFUSION, request.eta, clip_range=1e-4)
    context = Context(request.sigmas.to(rollout.x.device), DIFFUSION, request.eta, request.seed, 0)
    rows = objective.rows([rollout], [advantages], context)
    assert isinstance(rows, GrpoRows)
    with torch.enable_grad():
        velocity = rollout.velocity[:, 0].detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(objective.loss(rows, velocity).value, velocity)
    return -gradient


def _finish(
    policy: WatchedPolicy,
    states: Sequence[Tensor],
    steps: Sequence[int],
    levels: Tensor,
    cond: Conditioning,
    batch: int,
) -> Tensor:
    """Integrates the ODE with stride 1 from the states after each noise step; returns latents [3 K, L, C]."""
    forwards = CountedPolicy(policy, cond, batch)
    current = list(states)
    for position in range(min(steps) + 1, len(levels) - 1):
        active = [n for n, step in enumerate(steps) if step < position]
        x = torch.cat([current[n] for n in active])
        sigma = levels[position].to(x.device).repeat(len(x))
        rows = torch.zeros(len(x), dtype=torch.int64)
        (velocity,) = forwards([x], sigma, rows, ("tails",), levels[position : position + 1])
        x = x + velocity * (levels[position + 1] - levels[position])
        for n, part in zip(active, x.split(3), strict=True):
            current[n] = part
    return torch.cat(current)


def _scores(
    rewards: Mapping[str, CheckedReward], pixels: Tensor, prompt: str, metadata: Metadata | None
) -> Tensor:
    """Scores images of one prompt with 8-bit values, [R, N]; NaN for a groupwise reward."""
    pixels = _bytes(pixels).float().to(pixels.device) / 255
    about = None if metadata is None else [metadata[0]] * len(pixels)
    scores = [
        torch.full((len(pixels),), torch.nan)
        if reward.groupwise
        else reward(pixels, [prompt] * len(pixels), about).cpu()
        for reward in rewards.values()
    ]
    return torch.stack(scores)


def _cells(
    request: ExploreRequest,
    plan: Plan,
    rollout: Rollout,
    advantages: Tensor,
    pushes: Sequence[Push | None],
) -> list[Cell]:
    assert rollout.images is not None
    weight = torch.tensor(list(request.rewards.values()), dtype=torch.float32, device=rollout.rewards.device)
    is_path = rollout.rewards.shape[1] == 1 and len(plan.noise_steps) > 1
    valid = rollout.valid.all(0, keepdim=True) if is_path else rollout.valid
    parts = torch.stack(
        [
            group_advantages(rollout.rewards[:, :, j : j + 1], weight, None, valid=valid)
            for j in range(rollout.rewards.shape[2])
        ],
        1,
    )  # [K, J, G]
    granularities = (1,) if request.sampling == "path" else tuple(sorted(request.granularities))
    return [
        Cell(
            noise_steps=branch.noise_steps,
            granularities=granularities,
            images=rollout.images[list(rollout.image_of_tail[b])],
            rewards=rollout.rewards[:, b].cpu(),
            parts=parts[b].cpu(),
            advantages=advantages[0 if is_path else b].cpu(),
            valid=valid[b].cpu(),
            push=None if is_path else pushes[b],
        )
        for b, branch in enumerate(plan.branches)
    ]


def _bytes(pixels: Tensor) -> Tensor:
    """Converts images in [0, 1] to uint8 on the CPU; what is not finite becomes black."""
    finite = pixels.nan_to_num(0.0, 0.0, 0.0).clamp(0, 1)
    return (finite * 255).round().to(torch.uint8).cpu()


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; use one of {', '.join(allowed)}")


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value:,}; give a whole number from {low} to {high:,}")


def _check_list(name: str, values: Sequence[int], low: int, high: int, count: int) -> None:
    if not 1 <= len(values) <= count:
        raise ValueError(f"{len(values)} values of {name} are given; give 1 to {count}")
    if len(set(values)) != len(values):
        raise ValueError(f"{name} {', '.join(map(str, values))}: give each value once")
    for value in values:
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}; with these denoising steps it must be from {low} to {high}")
