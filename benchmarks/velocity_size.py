"""Measures the root mean square of a model's velocity at each step of its own path, over held-out prompts.

    python benchmarks/velocity_size.py tiny exported --steps 10 --shift 3 --prompts 64

Models are names or diffusers folders (`g2rpo export RUN --out exported`); the noise is the same for all.
"""

from __future__ import annotations

import argparse

import torch

from g2rpo.data.prompts import read_prompts
from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.models.options import PolicyOptions
from g2rpo.models.registry import load_policy
from g2rpo.runtime.processes import resolve_device
from g2rpo.runtime.random import keyed_noise


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--shift", type=float, default=3.0)
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    device = resolve_device(given.device)
    texts = [prompt.text for prompt in read_prompts("world:heldout")[0][: given.prompts]]
    sigmas = shifted_sigmas(given.steps, given.shift).to(device)
    for name in given.models:
        policy = load_policy(name, PolicyOptions(guidance=given.guidance), device=device)
        cond = policy.encode(texts)
        noise = [keyed_noise(policy.latent_shape, 0, 0, p, "start") for p in range(len(texts))]
        x, sizes = torch.stack(noise).to(device), []
        for step in range(given.steps):
            v = policy.velocity(x, sigmas[step].expand(len(x)), cond)
            sizes.append(float(v.square().mean().sqrt()))
            x = x + v * (sigmas[step + 1] - sigmas[step])
        text = " ".join(f"{size:.2f}" for size in sizes)
        print(f"{name}: velocity {text}; latents at the end {float(x.square().mean().sqrt()):.2f}")


if __name__ == "__main__":
    main()
