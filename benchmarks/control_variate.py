"""Trains with granularity as a control variate: many coarse tails, few fine ones (signal_arms.controlled).

    python benchmarks/control_variate.py results/compare/joint.toml lr=3e-5 eta=1.0 train_steps=5 \\
        lr_schedule=cosine iterations=48 eval_every=6 --coarse 3 --group-size 24 --fine 6 \\
        --seeds 0,1,2 --jobs 3 --out /tmp/controlled

This is one arm of `g2rpo compare`, over --seeds. All members of a group have the coarse tail, and --fine of
them also the fine one (stride 1). The runs in OUT compute both tails of all members, of which the method does
not use all. OUT/counted has their metrics with the forwards that the method needs, so results per forward are
those of the method and results per second are not. To compare it with other arms, use
`g2rpo compare --run NAME=OUT/counted/SEED ...`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from signal_arms import controlled, controlled_nfe
from torch import Tensor

from g2rpo.algorithms.g2rpo import G2RPO
from g2rpo.algorithms.options import Count, options
from g2rpo.comparison.arms import Arm
from g2rpo.comparison.compare import compare
from g2rpo.config.load import read_settings
from g2rpo.rollouts.score import Rollout


@options
class Controlled(G2RPO):
    """G2RPO whose last granularity is a control variate of the first one."""

    fine: Count = 6
    """Number of members of which the tail with the first stride is used."""

    def advantages(self, rollouts: Sequence[Rollout], weights: Sequence[float]) -> list[Tensor]:
        """Returns the weighted sum of controlled advantages, [K, G] per group."""
        advantages = []
        for rollout in rollouts:
            if not (rollout.rewards.isfinite().all() and rollout.valid.all()):
                raise ValueError("a reward is invalid: the control variate's estimate has no rule for that")
            parts = [controlled(rewards, self.fine) for rewards in rollout.rewards]
            both = sum(
                (weight * part for weight, part in zip(weights, parts, strict=True)), start=0 * parts[0]
            )
            advantages.append(
                both if self.advantage_clip is None else both.clamp(-self.advantage_clip, self.advantage_clip)
            )
        return advantages


def write_counted(run: Path, out: Path) -> None:
    """Copies the settings and metrics of a run; `nfe` becomes what the method needs."""
    settings = read_settings(run)
    size = settings.group_size
    algorithm = settings.make_algorithm()
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(run / "config.toml", out / "config.toml")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "nfe" in line:  # guidance multiplies it
            plan = algorithm.plan(settings.seed, line["step"] - 1)
            needed = controlled_nfe(plan, size, algorithm.fine)["total"]
            line["nfe"] = line["nfe"] * needed // plan.nfe(size)["total"]
    (out / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


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
    method = ("algorithm=control_variate:Controlled", f"granularities=[1,{given.coarse}]")
    method += (f"group_size={given.group_size}", f"fine={given.fine}")
    arm = Arm("controlled", given.recipe, (*given.settings, *method))
    seeds = [int(seed) for seed in given.seeds.split(",")]
    done = compare(given.out, [arm], seeds, jobs=given.jobs)
    for seed in seeds:
        run = given.out / "runs" / arm.folder / str(seed)
        if (run / "metrics.jsonl").is_file():
            write_counted(run, given.out / "counted" / str(seed))
    if done.failed or done.interrupted:
        raise SystemExit(f"failed: {done.failed}" if done.failed else 130)


if __name__ == "__main__":
    main()
