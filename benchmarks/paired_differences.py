"""Differences of evaluations between arms, paired by seed, as in docs/comparison.md.

    python benchmarks/paired_differences.py results/compare/more/L2_constant \
        results/compare/joint/MixGRPO_4 results/compare/more/MixGRPO_cosine --at compute

ARM and each OTHER are folders of SEED/metrics.jsonl. Each row is an OTHER and an evaluated reward: ARM −
OTHER as mean ± standard error over the common seeds, and the difference of each seed. Runs are compared at
their ends. With --at nfe, compute, step or seconds they are compared at equal cost, by linear interpolation:
at --cost, or at the largest cost that all runs of both arms reached.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from g2rpo.comparison.curves import AXES, Curve, common_end, curves_of, stat
from g2rpo.run.metrics import read_metrics

Runs = Mapping[int, Mapping[str, Curve]]


def runs_of(arm: Path) -> Runs:
    """Reads the curves of an arm: seed -> name -> curve."""
    paths = {int(path.parent.name): path for path in sorted(arm.glob("[0-9]*/metrics.jsonl"))}
    if not paths:
        raise SystemExit(f"{arm} holds no SEED/metrics.jsonl")
    return {seed: curves_of(read_metrics(path)) for seed, path in paths.items()}


def differences(arm: Runs, other: Runs, name: str, axis: str | None, cost: float | None) -> dict[int, float]:
    """Computes arm − other in `name` for each common seed; NaN if a run did not reach the cost."""
    seeds = [seed for seed in arm if name in arm[seed] and name in other.get(seed, {})]
    if axis is None:
        return {seed: float(arm[seed][name].y[-1] - other[seed][name].y[-1]) for seed in seeds}
    both = [[runs[seed][name] for seed in seeds] for runs in (arm, other)]
    shared_cost = common_end(both, axis) if cost is None else cost
    return {
        seed: arm[seed][name].at(axis, shared_cost) - other[seed][name].at(axis, shared_cost)
        for seed in seeds
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arm", type=Path)
    parser.add_argument("others", type=Path, nargs="+", metavar="other")
    parser.add_argument("--at", choices=AXES, help="the same cost for both, on this axis")
    parser.add_argument("--cost", type=float, help="that cost, instead of the largest that both reached")
    given = parser.parse_args()
    if given.cost is not None and given.at is None:
        parser.error(f"--cost {given.cost:g} is a cost on which axis? Give --at {'|'.join(AXES)} with it")
    arm = runs_of(given.arm)
    others = {folder: runs_of(folder) for folder in given.others}
    for folder, other in others.items():
        if not set(arm) & set(other):
            seeds = f"{sorted(arm)}, {sorted(other)}"
            raise SystemExit(f"{given.arm} and {folder} have no seed in common: {seeds}")
    names = sorted({name for curves in arm.values() for name in curves if name.startswith("eval/")})
    print(f"| {given.arm.name} − | reward | difference | each seed |\n| --- | --- | --- | --- |")
    for folder, other in others.items():
        for name in names:
            by_seed = differences(arm, other, name, given.at, given.cost)
            if by_seed:
                summary = stat(list(by_seed.values()))
                each = ", ".join(f"{seed}: {value:+.4f}" for seed, value in sorted(by_seed.items()))
                reward = name.removeprefix("eval/")
                print(f"| {folder.name} | {reward} | {summary.mean:+.4f} ± {summary.se:.4f} | {each} |")


if __name__ == "__main__":
    main()
