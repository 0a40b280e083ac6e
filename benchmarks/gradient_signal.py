"""Signal-to-noise ratio of gradients by method and group noise, on the embedded model at equal forwards.

    python benchmarks/gradient_signal.py --out results/signal.json                            # one GPU
    python benchmarks/gradient_signal.py --prompts 2 --repeats 4 --reference-group 12         # a quick check

T = 8, shift 3. Prompts and initial noise are fixed and only the noise of the steps is resampled, so all
repeats of an arm estimate the same gradient. Arms share noise, so their differences are paired. Three
quantities are measured:

    share      the share of the variance of rewards in a group that is due to one step: the correlation of two
               paths that share only the noise of that step (first-order Sobol index), and the variance with
               singular noise at that step over that of the path. With singular noise and one tail it is 1.
    advantage  the advantage of a given noise at step k from a given state, when everything else is resampled.
               Its reliability is the share of its variance that is due to the given noise.
    gradient   the gradient of the loss at ratio 1, as in `update`, of all weights and prompts of a rollout:
               its signal-to-noise ratio (signal_to_noise.py). It is proportional to the number of rollouts
               and therefore given per 1,000 forwards, without or with the update, where a row counts as 3.

Errors are jackknife standard errors over repeats, or over prompts for advantages; --first selects other
prompts. No repeat starts that would exceed --seconds. Cosines are to {1} in large groups; "along it" is SNR
cosine^2.

With --fresh, each repeat has new prompts and new initial noise: the signal is then the gradient over all
prompts, which training follows, and differences between prompts and initial noises count as noise. Shares and
advantages need a given state and are omitted, as with --gradients.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from signal_arms import PLAIN, REFERENCE, STEPS, Arm, T, make_arms
from signal_tables import show
from signal_to_noise import cosine, cosine_error, error, inner, jackknife, snr, snr_without
from torch import Tensor

from g2rpo.algorithms.base import Algorithm
from g2rpo.data.prompts import Prompt, read_prompts
from g2rpo.flow.group_noise import group_noise, orthogonal
from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.models.options import PolicyOptions
from g2rpo.models.policy import Conditioning, Policy, trained_parameters
from g2rpo.models.registry import load_policy
from g2rpo.objectives.base import Context
from g2rpo.rewards.registry import load_rewards
from g2rpo.rollouts.explore import Anchor, CountedPolicy, run_branches, walk_anchor
from g2rpo.rollouts.plan import Plan
from g2rpo.rollouts.rules import Singular
from g2rpo.rollouts.score import Rollout, score
from g2rpo.runtime.processes import resolve_device
from g2rpo.runtime.random import keyed_noise
from g2rpo.training.update import update

REWARDS = ("tiny_preference", "tiny_clip")
WEIGHTS = ([1.0, 0.0], [0.0, 1.0])  # each reward separately
SHIFT, CHUNK = 3.0, 4
REFERENCE_FROM, GIVEN_FROM, OTHER = 10**6, 2 * 10**6, 10**7  # iterations that seed noise which no arm uses


class Captured(torch.optim.Optimizer):
    """An optimizer that stores the gradient and changes no weight."""

    gradient: Tensor

    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        self.gradient = torch.cat([gradient.flatten() for gradient in gradients])


@dataclass
class Bench:
    """Objects shared by all arms: policy, rewards, and P prompts with one initial noise each."""

    policy: Policy
    rewards: dict[str, Any]
    texts: list[str]
    metadata: list[Any]
    cond: Conditioning
    start: Tensor
    sigmas: Tensor
    optimizer: Captured
    batch: int
    seed: int
    prompts: int  # P of one rollout
    fresh: int = 0  # number of repeats with their own prompts and initial noise; 0 = all share them

    def noise(self, arm: Arm, iterations: Iterable[int]) -> Tensor:
        """Samples noise [K, iterations * P, G, L, C] on the CPU, with the keys of `explore`."""
        keys = [(self.seed, i, p) for i in iterations for p in range(self.prompts)]
        shape, steps = self.policy.latent_shape, arm.plan.noise_steps
        drawn = [group_noise(arm.noise, shape, arm.group_size, key, step) for step in steps for key in keys]
        return torch.stack(drawn).unflatten(0, (len(steps), len(keys)))

    def rows(self, iterations: Iterable[int]) -> Tensor:
        """Returns the prompt indices of each repeat: [iterations * P]; the reference comes last."""
        groups = [i - REFERENCE_FROM + self.fresh if i >= REFERENCE_FROM else i for i in iterations]
        first = torch.tensor(groups)[:, None] * (self.prompts if self.fresh else 0)
        return (first + torch.arange(self.prompts)).flatten().to(self.policy.device)

    @torch.no_grad()
    def rollouts(
        self, algorithm: Algorithm, plan: Plan, noise: Tensor, rows: Tensor | None = None
    ) -> list[Rollout]:
        """Samples and scores a group for each noise [K, V * P, G, L, C]; `rows` are their prompt indices."""
        if rows is None:
            rows = self.rows(range(1)).repeat(noise.shape[1] // self.prompts)
        levels = plan.levels(self.sigmas)
        with self.policy.resident():
            kept, again = rows.unique(return_inverse=True)  # equal starts share one anchor
            once, many = (CountedPolicy(self.policy, self.cond[r], self.batch) for r in (kept, rows))
            walked = walk_anchor(once, plan, levels, self.start[kept])
            states, velocities = (
                {k: value[again] for k, value in some.items()} for some in (walked.states, walked.velocities)
            )
            keys = tuple((self.seed, 0, p) for p in rows.tolist())
            samples = run_branches(
                many,
                plan,
                levels,
                Anchor(states, velocities, None),
                noise.to(self.policy.device),
                keys,
                diffusion=algorithm.diffusion,
                eta=algorithm.eta,
            )
            texts, metadata = ([every[r] for r in rows.tolist()] for every in (self.texts, self.metadata))
            return score(self.policy, samples, self.rewards, texts, metadata, decode_batch=self.batch)

    def gradients(self, arm: Arm, iterations: Iterable[int]) -> list[Tensor]:
        """Computes, per reward, the gradients of the iterations: [iterations, number of weights]."""
        iterations, taken = list(iterations), self.rows(iterations)
        every = self.rollouts(arm.algorithm, arm.plan, self.noise(arm, iterations), taken)
        found: list[list[Tensor]] = [[] for _ in self.rewards]
        for low in range(0, len(every), self.prompts):
            groups, mine = every[low : low + self.prompts], self.cond[taken[low : low + self.prompts]]
            for rows, weights in zip(found, WEIGHTS, strict=True):
                objective, algorithm = arm.algorithm.objective(), arm.algorithm
                context = Context(
                    self.sigmas.to(self.policy.device), algorithm.diffusion, algorithm.eta, self.seed, 0
                )
                given = objective.rows(groups, arm.advantages(groups, weights), context)
                update(
                    self.policy,
                    objective,
                    given.split(algorithm.update, arm.group_size),
                    mine,
                    self.optimizer,
                    max_grad_norm=math.inf,
                    update_batch=self.batch,
                )
                rows.append(self.optimizer.gradient)
        return [torch.stack(rows) for rows in found]


def shares(bench: Bench, arm: Arm, repeats: int) -> dict[str, Tensor]:
    """Computes share and variance ratio of a path method, with errors, by reward and step: [R, K]."""
    plan, prompts = arm.plan, bench.prompts
    single_step = Singular(plan.noise_steps, (1,)).plan(T, 0, 0)
    covariance, singular, variance = [], [], []
    for i in range(repeats):
        paths = [base := bench.noise(arm, [i])]
        for k in range(len(base)):
            paths.append(bench.noise(arm, [OTHER * (k + 1) + i]))
            paths[-1][k] = base[k]
        rewards = [r.rewards[:, 0, 0] for r in bench.rollouts(arm.algorithm, plan, torch.cat(paths, 1))]
        path = _centred(torch.stack(rewards).unflatten(0, (-1, prompts)))  # [1 + K, P, R, G]
        rewards = [r.rewards[:, :, 0] for r in bench.rollouts(arm.algorithm, single_step, base)]
        covariance.append((path[:1] * path[1:]).mean((1, 3)).T)
        singular.append(_centred(torch.stack(rewards)).square().mean((0, 3)))  # [P, R, K, G] -> [R, K]
        variance.append(path.square().mean((0, 1, 3))[:, None].expand_as(covariance[-1]))
    tops, below = torch.stack([torch.stack(covariance), torch.stack(singular)]), torch.stack(variance)

    def ratios(kept: Tensor) -> Tensor:
        return tops[:, kept].sum(1) / below[kept].sum(0)

    (share, ratio), wrong = ratios(torch.arange(repeats)), error(jackknife(ratios, repeats))
    return {"share": share, "share_error": wrong[0], "ratio": ratio, "ratio_error": wrong[1]}


def _centred(rewards: Tensor) -> Tensor:
    """Subtracts the group's mean and scales so that means of products over G are unbiased covariances."""
    r = rewards.double().cpu()
    return (r - r.mean(-1, keepdim=True)) * math.sqrt(r.shape[-1] / (r.shape[-1] - 1))


def credited(bench: Bench, arm: Arm, draws: int, redraws: int) -> dict[str, Tensor]:
    """Computes the std over redraws and the reliability of member 0's advantage for given noise: [R, K + 1].

    On a path, the noise of the member before step k is given too, because it determines the state at k.
    """
    plan, shape, prompts, advantages = arm.plan, bench.policy.latent_shape, bench.prompts, []
    for k in range(STEPS):
        if k == 0 or not plan.shares_states:
            noise = bench.noise(arm, range(GIVEN_FROM, GIVEN_FROM + draws * redraws))
            cells = noise.unflatten(1, (draws, redraws, prompts))
            for step in range(STEPS if plan.shares_states else k + 1):
                for d, p in itertools.product(range(draws), range(prompts)):
                    draw = d if plan.shares_states or step == k else draws  # one noise for the steps before k
                    cells[step, d, :, p, 0] = keyed_noise(shape, bench.seed, draw, p, "given", step)
            if arm.noise == "antithetic":
                noise[:, :, 1] = -noise[:, :, 0]
            if arm.noise == "orthogonal":  # does not change the first member
                noise = torch.stack([orthogonal(group) for group in noise.flatten(0, 1)]).view_as(noise)
            rollouts = bench.rollouts(arm.algorithm, plan, noise)
        by_reward = [arm.algorithm.advantages(rollouts, weights) for weights in WEIGHTS]
        advantages.append(torch.stack([torch.stack(groups)[:, k, 0] for groups in by_reward]).double().cpu())
    a = torch.stack(advantages, 1).unflatten(2, (draws, redraws, prompts))  # [R, K, D, M, P]

    def parts(kept: Tensor) -> Tensor:
        """Computes both by a one-way analysis of variance: [2, R, K + 1], with the mean last."""
        within = a[..., kept].var(3).mean((2, 3))
        between = a[..., kept].mean(3).var(2).mean(-1) - within / redraws
        both = torch.stack([within.sqrt(), between / (between + within)])
        return torch.cat([both, both.mean(-1, keepdim=True)], -1)

    (std, reliability), wrong = parts(torch.arange(prompts)), error(jackknife(parts, prompts))
    return {"std": std, "std_error": wrong[0], "reliability": reliability, "reliability_error": wrong[1]}


def compared(grads: dict[str, Tensor], arms: dict[str, Arm], prompts: int) -> dict[str, dict[str, float]]:
    """Computes SNR, SNR per 1,000 forwards, its ratio to the plain arm, and cosines, with errors."""
    grams, table = {name: inner(rows, rows) for name, rows in grads.items()}, {}
    without = {name: snr_without(gram) for name, gram in grams.items()}
    costs = {name: arms[name].nfe for name in grads}
    for name, gram in grams.items():
        cost, cross, other = costs[name], inner(grads[name], grads[REFERENCE]), grams[REFERENCE]
        thousands, equal = prompts * cost["total"] / 1000, costs[PLAIN]["total"] / cost["total"]
        row = {"repeats": len(gram), "forwards": cost["total"], "update_rows": cost["update"]}
        row |= {"snr": snr(gram), "snr_error": error(without[name])}
        row |= {"per_1000": row["snr"] / thousands, "per_1000_error": row["snr_error"] / thousands}
        row["with_update"] = row["snr"] * 1000 / prompts / (cost["total"] + 3 * cost["update"])
        if name != REFERENCE:
            row["gain"] = equal * snr(gram) / snr(grams[PLAIN])
            row["gain_error"] = error(equal * without[name] / without[PLAIN])
            row["cosine"] = cosine(gram, cross, other)
            row["cosine_error"] = cosine_error(gram, cross, other)
            row["aligned"] = row["per_1000"] * row["cosine"] ** 2
        table[name] = {key: float(value) for key, value in row.items()}
    return table


def parse_arguments() -> tuple[argparse.Namespace, list[Prompt]]:
    """Reads the command line, and the prompts that it asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(make_arms(2))[:-1]
    parser.add_argument("--prompts", type=int, default=8, help="in one rollout, at least 2")
    parser.add_argument("--first", type=int, default=0, help="of world:train's prompts; seeds the noise")
    parser.add_argument("--repeats", type=int, default=48, help="gradients of an arm; multiple of 4")
    parser.add_argument("--fresh", action="store_true", help="other prompts and initial noise each repeat")
    parser.add_argument("--gradients", action="store_true", help="neither shares nor advantages")
    parser.add_argument("--arms", nargs="+", choices=names, default=names, help=f"beside {PLAIN!r}")
    parser.add_argument("--reference-group", type=int, default=96, help="members of the reference's groups")
    parser.add_argument("--guidance", type=float, default=1.0, help="1.0 as in the recipe tiny")
    parser.add_argument("--seconds", type=float, default=125, help="after which no more repeats start")
    parser.add_argument("--batch", type=int, default=1024, help="samples of one forward")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.prompts < 2:
        parser.error(f"an error is over prompts too: --prompts must be >= 2, got {given.prompts}")
    given.references = max(3, given.repeats // 8)
    number = given.prompts * (given.repeats + given.references if given.fresh else 1)
    prompts = read_prompts("world:train")[0][given.first :][:number]
    if len(prompts) < number:
        parser.error(f"--first {given.first} leaves {len(prompts)} prompts, {number} are needed")
    return given, prompts


def main() -> None:
    """Runs the benchmark."""
    began = time.perf_counter()
    given, prompts = parse_arguments()
    all_arms, wanted = make_arms(given.reference_group), (*given.arms, PLAIN, REFERENCE)
    arms = {name: arm for name, arm in all_arms.items() if name in wanted}
    torch.set_float32_matmul_precision("high")  # TF32: its rounding is far below the noise
    device = resolve_device(given.device)
    policy = load_policy("tiny", PolicyOptions(guidance=given.guidance), device=device)
    texts = [prompt.text for prompt in prompts]
    shape, seed = policy.latent_shape, given.first
    start = torch.stack([keyed_noise(shape, seed, 0, p, "start") for p in range(len(texts))])
    bench = Bench(
        policy,
        load_rewards(list(REWARDS), device),
        texts,
        [prompt.metadata for prompt in prompts],
        policy.encode(texts),
        start.to(device),
        shifted_sigmas(T, SHIFT),
        Captured(list(trained_parameters(policy).values()), {}),
        given.batch,
        seed,
        given.prompts,
        given.repeats if given.fresh else 0,
    )
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    report: dict[str, Any] = {"machine": machine, "torch": torch.__version__}
    report |= {
        key: getattr(given, key) for key in ("prompts", "first", "fresh", "guidance", "reference_group")
    }
    print(report)
    several, draws = max(2, given.repeats // 4), max(2, given.repeats // 12)
    if not (given.fresh or given.gradients):
        report["shares"] = {n: shares(bench, a, several) for n, a in arms.items() if not a.plan.shares_states}
        report["advantages"] = {
            n: credited(bench, a, draws, draws) for n, a in arms.items() if n != REFERENCE and not a.fine
        }
    gradients: dict[str, list[list[Tensor]]] = {name: [] for name in arms}
    last = REFERENCE_FROM + given.references
    gradients[REFERENCE].append(bench.gradients(arms[REFERENCE], range(REFERENCE_FROM, last)))
    print(f"{time.perf_counter() - began:.0f} s before the repeats", flush=True)
    for low in range(0, given.repeats, CHUNK):
        chunk = time.perf_counter()
        for name in [name for name in arms if name != REFERENCE]:
            gradients[name].append(bench.gradients(arms[name], range(low, low + CHUNK)))
        if 2 * time.perf_counter() - chunk - began > given.seconds:
            break
    report |= {"gradients": {}, "seconds": time.perf_counter() - began}
    for r, reward in enumerate(REWARDS):
        report["gradients"][reward] = (
            compared(  # popping frees the gradients of one reward before the next is joined
                {
                    name: torch.cat([chunk_gradients.pop(0) for chunk_gradients in chunks])
                    for name, chunks in gradients.items()
                },
                arms,
                given.prompts,
            )
        )
        show(reward, r, report, T, STEPS)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(report, indent=1, default=Tensor.tolist) + "\n")


if __name__ == "__main__":
    main()
