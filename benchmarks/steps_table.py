"""The paper's Table 4 in kind: what `g2rpo evaluate` found in several numbers of steps, as a mean over seeds.

    python benchmarks/steps_table.py results/compare/joint_steps

Models are labelled ARM.SEED, or ARM for one seed. For each number of steps and each reward: the base, then
an arm's gain over it, the mean over seeds ± its standard error; of one seed, with its bootstrap interval.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from g2rpo.comparison.curves import stat


def gain(differences: list[dict[str, Any]]) -> str:
    """Of one arm, from `evaluate`'s paired differences, a seed each."""
    if len(differences) == 1:
        one = differences[0]
        return f"{one['mean']:+.4f} [{one['low']:.4f}, {one['high']:.4f}]"
    found = stat([one["mean"] for one in differences])
    return f"{found.mean:+.4f} ± {found.se:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("evaluated", type=Path, help="OUT of g2rpo evaluate; its first model is the base")
    given = parser.parse_args()
    found = json.loads((given.evaluated / "results.json").read_text(encoding="utf-8"))
    base, *models = found["models"]
    arms: dict[str, list[str]] = {}
    for label in models:
        arms.setdefault(re.sub(r"\.\d+$", "", label), []).append(label)
    print("| steps | judge | base | " + " | ".join(f"{arm} ({len(of)})" for arm, of in arms.items()) + " |")
    print("| --- " * (3 + len(arms)) + "|")
    for steps, told in found["steps"].items():
        for reward in told[base]:
            cells = [
                gain([told[label][reward]["difference"] for label in labels]) for labels in arms.values()
            ]
            print(f"| {steps} | {reward} | {told[base][reward]['mean']:.4f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
