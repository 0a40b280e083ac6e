"""The shared, batched rollout against the naive one, on the embedded model.

    python benchmarks/wavefront.py --out results/performance/wavefront_cpu.json

One prompt at the paper's settings (T = 16, K = 8, G = 12, strides 1, 2, 3), with decoded images, in float32.

    naive        one sample per forward, nothing shared, images decoded one by one: 2,188 forwards
    batch of n   the package: 1,708 forwards, n samples at a time

The latents of the images must agree to 1e-5 of the largest latent; otherwise the comparison stops.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import date
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.flow.sde import transition
from g2rpo.models.policy import Policy
from g2rpo.models.registry import load_policy
from g2rpo.rollouts.explore import explore
from g2rpo.rollouts.rules import Singular
from g2rpo.runtime.processes import resolve_device
from g2rpo.runtime.random import keyed_noise

PROMPT, NUM_STEPS, ETA = "two red circles above a blue star", 16, 0.7


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 12, 32, 96, 288])
    parser.add_argument("--group-size", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    policy = load_policy("tiny", device=resolve_device(given.device))
    sigmas = shifted_sigmas(NUM_STEPS, 3.0)
    plan = Singular().plan(NUM_STEPS, 0, 0)
    cond = policy.encode([PROMPT])
    policy.velocity(torch.zeros(1, *policy.latent_shape, device=policy.device), sigmas[:1], cond)  # warm up

    began = time.perf_counter()
    slow, forwards = naive(policy, given.group_size, sigmas)
    for latents in slow:
        policy.decode(latents[None])
    seconds = {"naive": time.perf_counter() - began}
    counts, differences = {"naive": forwards}, {}
    for batch in given.batches:
        began = time.perf_counter()
        samples = explore(
            policy,
            plan,
            sigmas,
            cond,
            group_size=given.group_size,
            diffusion="flow",
            eta=ETA,
            seed=0,
            iteration=0,
            prompt_indices=[0],
            rollout_batch=batch,
        )
        assert samples.anchor_latents is not None
        fast = torch.cat([samples.latents[:, 0].flatten(0, 1), samples.anchor_latents])
        for part in fast.split(batch):
            policy.decode(part)
        name = f"batch of {batch}"
        seconds[name] = time.perf_counter() - began
        counts[name] = samples.nfe["total"]
        differences[name] = float((fast - slow).abs().max() / slow.abs().max())
        if differences[name] > 1e-5:
            raise SystemExit(f"{name}: the images' latents differ by {differences[name]:.1e} of the largest")
    print(f"{given.device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("| rollout | forwards | seconds | naive / it | largest difference |")
    print("| --- | --- | --- | --- | --- |")
    for name, elapsed in seconds.items():
        difference = f"{differences[name]:.0e}" if name in differences else ""
        print(
            f"| {name} | {counts[name]:,} | {elapsed:.1f} | {seconds['naive'] / elapsed:.2f} | {difference} |"
        )
    if given.out is not None:
        report = {
            "date": str(date.today()),
            "device": given.device,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "seconds": seconds,
            "forwards": counts,
            "differences": differences,
        }
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(report, indent=1) + "\n")


@torch.no_grad()
def naive(policy: Policy, group_size: int, sigmas: Tensor) -> tuple[Tensor, int]:
    """Returns latents [8 steps * 3 strides * G + 1, L, C] in the package's order, and the forwards."""
    plan, cond, forwards = Singular().plan(NUM_STEPS, 0, 0), policy.encode([PROMPT]), 0

    def velocity(x: Tensor, position: int) -> Tensor:
        nonlocal forwards
        forwards += 1
        return policy.velocity(x, sigmas[position : position + 1].to(policy.device), cond)

    x = keyed_noise(policy.latent_shape, 0, 0, 0, "start")[None].to(policy.device)
    states = []
    for position in range(NUM_STEPS):
        states.append(x)
        x = x + velocity(x, position) * (sigmas[position + 1] - sigmas[position])
    images = []
    for branch in plan.branches:
        (step,) = branch.noise_steps
        members = []
        for member in range(group_size):
            mean, std = transition("flow", states[step], velocity(states[step], step), sigmas, step, ETA)
            noise = keyed_noise(policy.latent_shape, 0, 0, 0, "step", step, member)
            members.append(mean + std * noise.to(policy.device))
        for positions in branch.tails:
            for noisy in members:
                y = noisy
                for position, following in pairwise(positions):
                    y = y + velocity(y, position) * (sigmas[following] - sigmas[position])
                images.append(y[0])
    return torch.stack([*images, x[0]]), forwards


if __name__ == "__main__":
    main()
