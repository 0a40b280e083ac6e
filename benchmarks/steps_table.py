"""A table like the paper's Table 4: results of `g2rpo evaluate` by number of steps, averaged over seeds.

    python benchmarks/steps_table.py results/compare/joint_steps

Models are labelled ARM.SEED, or ARM for a single seed. For each number of steps and each reward, the table
has the base and the gain of each arm: mean ± standard error over seeds, or the bootstrap interval of a single
seed.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from g2rpo.comparison.curves import stat


def gain(differences: list[dict[str, Any]]) -> str:
    """Formats the gain of an arm from the paired differences of its seeds."""
    if len(differences) == 1:
        difference = differences[0]
        return f"{difference['mean']:+.4f} [{difference['low']:.4f}, {difference['high']:.4f}]"
    summary = stat([difference["mean"] for difference in differences])
    return f"{summary.mean:+.4f} ± {summary.se:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("evaluated", type=Path, help="OUT of g2rpo evaluate; its first model is the base")
    given = parser.parse_args()
    results = json.loads((given.evaluated / "results.json").read_text(encoding="utf-8"))
    base, *models = results["models"]
    arms: dict[str, list[str]] = {}
    for label in models:
        arms.setdefault(re.sub(r"\.\d+$", "", label), []).append(label)
    print("| steps | reward | base | " + " | ".join(f"{arm} ({len(of)})" for arm, of in arms.items()) + " |")
    print("| --- " * (3 + len(arms)) + "|")
    for steps, by_label in results["steps"].items():
        for reward in by_label[base]:
            cells = [
                gain([by_label[label][reward]["difference"] for label in labels]) for labels in arms.values()
            ]
            print(f"| {steps} | {reward} | {by_label[base][reward]['mean']:.4f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
