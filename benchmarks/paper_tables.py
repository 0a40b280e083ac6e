"""The paper's Table 1 in kind, from committed runs: every arm's last evaluation, mean over seeds.

    python benchmarks/paper_tables.py results/compare/joint [--at compute]

Rows: the base (evaluations before training), then a row an arm: mean ± standard error over seeds of each
evaluated reward; the share of advantages at the clamp and the rank correlation of granularities, as means
over iterations. --at nfe, compute or seconds takes each run where the cheapest run ended on that axis, by
linear interpolation, instead of at its own end.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from g2rpo.comparison.curves import AXES, Curve, common_end, curves_of, stat
from g2rpo.run.metrics import read_metrics


def cell(values: list[float]) -> str:
    found = stat([value for value in values if value == value])
    return f"{found.mean:.4f} ± {found.se:.4f}" if found.n else "–"


def mean_of(lines: list[dict[str, Any]], name: str) -> list[float]:
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
        {name for runs in curves.values() for one in runs for name in one if name.startswith("eval/")}
    )
    end = None
    if given.at:
        every = [[one[name] for one in runs for name in names if name in one] for runs in curves.values()]
        end = common_end(every, given.at)
        print(f"at {end:,.0f} ({given.at})\n")

    def value(curve: Curve) -> float:
        return float(curve.y[-1]) if end is None else curve.at(given.at, end)

    heads = [
        "arm",
        "seeds",
        *(name.removeprefix("eval/") for name in names),
        "at the clamp",
        "rank correlation",
    ]
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
    first = [one for runs in curves.values() for one in runs]
    base = [f"{stat([float(one[name].y[0]) for one in first if name in one]).mean:.4f}" for name in names]
    print("| base | | " + " | ".join(base) + " | | |")
    for arm, runs in curves.items():
        cells = [cell([value(one[name]) for one in runs if name in one]) for name in names]
        for extra in ("advantage_clipped", "granularity_rank_correlation"):
            shares = [share for lines in arms[arm] for share in mean_of(lines, extra)]
            cells.append(f"{stat(shares).mean:.2f}" if shares else "")
        print(f"| {arm} | {len(runs)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
