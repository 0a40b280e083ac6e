"""Trains with granularity as a control variate: many coarse tails, few fine ones (signal_arms.controlled).

    python benchmarks/control_variate.py results/compare/joint.toml lr=3e-5 eta=1.0 train_steps=5 \\
        lr_schedule=cosine iterations=48 eval_every=6 --coarse 3 --group-size 24 --fine 6 \\
        --seeds 0,1,2 --jobs 3 --out /tmp/controlled

This is one arm of `g2rpo compare`, over --seeds. All members of a group have the coarse tail, and --fine of
them also the fine one (stride 1). This script computes both tails of all members, but neither uses nor counts
those that the method does not need, so results per forward are those of the method and results per second are
not. To compare it with other arms, use `g2rpo compare --run NAME=OUT/runs/controlled/SEED ...`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from signal_arms import controlled, controlled_nfe
from torch import Tensor

from g2rpo.algorithms.base import Algorithm
from g2rpo.comparison.arms import Arm
from g2rpo.comparison.compare import compare
from g2rpo.rollouts.explore import Exploration
from g2rpo.rollouts.score import Rollout

FINE = "G2RPO_BENCHMARK_FINE"  # read by the training processes


def advantages_of(
    rollouts: Sequence[Rollout], algorithm: Algorithm, weights: Sequence[float]
) -> list[Tensor]:
    """Replaces advantages_of by the weighted sum of controlled advantages, [K, G] per group."""
    advantages = []
    for rollout in rollouts:
        if not (rollout.rewards.isfinite().all() and rollout.valid.all()):
            raise ValueError("a reward is invalid: the control variate's estimate has no rule for that")
        parts = [controlled(rewards, int(os.environ[FINE])) for rewards in rollout.rewards]
        both = sum((weight * part for weight, part in zip(weights, parts, strict=True)), start=0 * parts[0])
        advantages.append(both.clamp(-algorithm.advantage_clip, algorithm.advantage_clip))
    return advantages


def train_with_it() -> None:
    """Patches the trainer; runs in each process before training."""
    from g2rpo.training import trainer

    plain = trainer.explore

    def explore(*given: Any, **settings: Any) -> Exploration:
        samples = plain(*given, **settings)
        size, total = settings["group_size"], samples.nfe["total"]  # guidance multiplies it
        needed = controlled_nfe(samples.plan, size, int(os.environ[FINE]))["total"]
        counted = total * needed // samples.plan.nfe(size)["total"]
        return replace(samples, nfe=samples.nfe | {"total": counted})

    trainer.explore, trainer.advantages_of = explore, advantages_of


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--coarse", type=int, default=3, help="stride of the tail that all members have")
    parser.add_argument("--group-size", type=int, default=24)
    parser.add_argument("--fine", type=int, default=6, help="members that also have the tail of stride 1")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if not 2 <= given.fine <= given.group_size:
        parser.error(f"--fine must be in 2..{given.group_size}, got {given.fine}")
    os.environ[FINE] = str(given.fine)
    method = ("algorithm=g2rpo", f"granularities=[1,{given.coarse}]", f"group_size={given.group_size}")
    arm = Arm("controlled", given.recipe, (*given.settings, *method))
    seeds = [int(seed) for seed in given.seeds.split(",")]
    done = compare(given.out, [arm], seeds, jobs=given.jobs, prepare=train_with_it)
    if done.failed or done.interrupted:
        raise SystemExit(f"failed: {done.failed}" if done.failed else 130)


if __name__ == "__main__":
    main()
