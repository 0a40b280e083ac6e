"""Effect of 8-bit tails on rewards, advantages and latents of the embedded model, on the same noise.

    python benchmarks/float8_tails.py --prompts 64 --out results/performance/float8_tails.json

Every group is sampled three times: with tails in bfloat16, in bfloat16 with another batch size (which changes
the rounding), and in float8. The table compares the last two with the first: the correlation of rewards
within groups and of advantages, the share of advantages with equal signs, and the relative distance of the
latents.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from g2rpo.algorithms.g2rpo import G2RPO
from g2rpo.data.prompts import read_prompts
from g2rpo.flow.schedule import shifted_sigmas
from g2rpo.models.options import PolicyOptions
from g2rpo.models.registry import load_policy
from g2rpo.rewards.registry import load_rewards
from g2rpo.rollouts.explore import Exploration, explore
from g2rpo.rollouts.score import Rollout, score
from g2rpo.runtime.processes import resolve_device

REWARDS = ("tiny_preference", "tiny_clip", "verifier")


def correlation(a: Tensor, b: Tensor) -> float:
    """Computes Pearson's correlation of the deviations from the mean of the last axis."""
    a, b = (value - value.mean(-1, keepdim=True) for value in (a.double(), b.double()))
    return float((a * b).sum() / (a.norm() * b.norm()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=8, help="prompts of one rollout")
    parser.add_argument("--rollout-batch", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = resolve_device(given.device)
    policy = load_policy("tiny", PolicyOptions(precision="bfloat16", tails_precision="float8"), device=device)
    rewards = load_rewards(list(REWARDS), device)
    algorithm = G2RPO()
    plan, sigmas = algorithm.plan(0, 0), shifted_sigmas(16, 3.0)
    prompts = read_prompts("world:train")[0][: given.prompts]
    runs: dict[str, list[tuple[Exploration, list[Rollout]]]] = {
        "bfloat16": [],
        "other batches": [],
        "float8": [],
    }
    with policy.resident():
        for low in range(0, len(prompts), given.at_once):
            batch = prompts[low : low + given.at_once]
            texts = [prompt.text for prompt in batch]
            cond = policy.encode(texts)
            for name, groups in runs.items():
                samples = explore(
                    policy,
                    plan,
                    sigmas,
                    cond,
                    group_size=12,
                    diffusion="flow",
                    eta=0.7,
                    seed=0,
                    iteration=0,
                    prompt_indices=range(low, low + len(batch)),
                    rollout_batch=given.rollout_batch if name != "other batches" else 37,
                    tails=policy.tails if name == "float8" else nullcontext,
                )
                judged = score(
                    policy, samples, rewards, texts, [prompt.metadata for prompt in batch], decode_batch=512
                )
                groups.append((samples, judged))
    table: dict[str, dict[str, float]] = {}
    first = [rollout for _, rollouts in runs["bfloat16"] for rollout in rollouts]
    for name in ("other batches", "float8"):
        other = [rollout for _, rollouts in runs[name] for rollout in rollouts]
        row: dict[str, float] = {}
        for r, reward in enumerate(REWARDS):
            a, b = (
                torch.stack([rollout.rewards[r] for rollout in groups]).cpu() for groups in (first, other)
            )
            row[f"reward correlation, {reward}"] = correlation(a, b)
            weights = [float(n == r) for n in range(len(REWARDS))]
            a, b = (torch.stack(algorithm.advantages(groups, weights)).cpu() for groups in (first, other))
            row[f"advantage correlation, {reward}"] = correlation(a, b)
            clear = a.abs() > 1e-6
            row[f"advantage sign agreement, {reward}"] = float((a.sign() == b.sign())[clear].float().mean())
        pairs = [(a.latents, b.latents) for (a, _), (b, _) in zip(runs["bfloat16"], runs[name], strict=True)]
        row["latents, relative distance"] = float(
            sum((a - b).norm() for a, b in pairs) / sum(a.norm() for a, _ in pairs)
        )
        table[name] = row
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{len(prompts)} groups of 12, {machine}, torch {torch.__version__}")
    for key in table["float8"]:
        print(f"| {key} | {table['other batches'][key]:.4f} | {table['float8'][key]:.4f} |")
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": machine, "torch": torch.__version__, "groups": len(prompts), **table}
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
