"""A table like the paper's Table 1 from committed runs: the last evaluation of each arm, averaged over seeds.

    python benchmarks/paper_tables.py results/compare/joint [--at compute]

The first row is the base (evaluations before training), followed by one row per arm: mean ± standard error
over seeds of each evaluated reward, and the share of clamped advantages and the rank correlation of
granularities as means over iterations. With --at nfe, compute or seconds, runs are compared where the
cheapest one ended on that axis, by linear interpolation, instead of at their own ends.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from g2rpo.comparison.curves import AXES, Curve, common_end, curves_of, stat
from g2rpo.run.metrics import read_metrics


def cell(values: list[float]) -> str:
    """Formats the mean ± standard error of the values that are not NaN."""
    summary = stat([value for value in values if value == value])
    return f"{summary.mean:.4f} ± {summary.se:.4f}" if summary.n else "–"


def mean_of(lines: list[dict[str, Any]], name: str) -> list[float]:
    """Returns the mean of a metric over iterations; empty if no line has it."""
    values = [line[name] for line in lines if line.get(name) is not None]
    return [sum(values) / len(values)] if values else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", type=Path, help="a folder of ARM/SEED/metrics.jsonl")
    parser.add_argument("--at", choices=AXES, help="the same cost for all, on this axis")
    given = parser.parse_args()
    arms: dict[str, list[list[dict[str, Any]]]] = {}
    for path in sorted(given.stage.glob("*/*/metrics.jsonl")):
        arms.setdefault(path.parent.parent.name, []).append(read_metrics(path))
    if not arms:
        raise SystemExit(f"{given.stage} holds no ARM/SEED/metrics.jsonl")
    curves = {arm: [curves_of(lines) for lines in runs] for arm, runs in arms.items()}
    names = sorted(
        {name for runs in curves.values() for run in runs for name in run if name.startswith("eval/")}
    )
    end = None
    if given.at:
        all_curves = [
            [run[name] for run in runs for name in names if name in run] for runs in curves.values()
        ]
        end = common_end(all_curves, given.at)
        print(f"at {end:,.0f} ({given.at})\n")

    def value(curve: Curve) -> float:
        return float(curve.y[-1]) if end is None else curve.at(given.at, end)

    headers = [
        "arm",
        "seeds",
        *(name.removeprefix("eval/") for name in names),
        "at the clamp",
        "rank correlation",
    ]
    print("| " + " | ".join(headers) + " |\n|" + " --- |" * len(headers))
    all_runs = [run for runs in curves.values() for run in runs]
    base = [f"{stat([float(run[name].y[0]) for run in all_runs if name in run]).mean:.4f}" for name in names]
    print("| base | | " + " | ".join(base) + " | | |")
    for arm, runs in curves.items():
        cells = [cell([value(run[name]) for run in runs if name in run]) for name in names]
        for extra in ("advantage_clipped", "granularity_rank_correlation"):
            shares = [share for lines in arms[arm] for share in mean_of(lines, extra)]
            cells.append(f"{stat(shares).mean:.2f}" if shares else "")
        print(f"| {arm} | {len(runs)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
