"""Run folders made small enough to commit: their settings, and metrics of which `g2rpo compare --run` reads.

    python benchmarks/slim_runs.py compared/joint/runs results/compare/joint --every 5

RUNS/<arm>/<seed> becomes OUT/<arm>/<seed>: config.toml, without the place where it ran, and metrics.jsonl.
--every n iterations, or fewer up to an evaluation, become one line at the last of them: costs are their sums,
everything else the mean of what is there; evaluations stay as they are. Numbers have five significant digits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from g2rpo.config.load import read_settings
from g2rpo.run.metrics import read_metrics

SUMS = ("nfe", "nfe_update", "seconds")
RATES = ("reward", "eval", "advantage_clipped", "granularity_rank", "clip_fraction", "grad_norm", "kl")
KEPT = ("step", *SUMS, *RATES, "invalid_fraction", "ratio_max_dev")


def short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def merged(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of several iterations."""
    told: dict[str, Any] = {"step": lines[-1]["step"]}
    for name in dict.fromkeys(name for line in lines for name in line if name != "step"):
        values = [line[name] for line in lines if line.get(name) is not None]
        if values:
            told[name] = sum(values) / (1 if name in SUMS or name.startswith("seconds") else len(values))
    return told


def slim(lines: list[dict[str, Any]], every: int) -> list[dict[str, Any]]:
    kept = [{key: value for key, value in line.items() if key.startswith(KEPT)} for line in lines]
    trained = [line for line in kept if "nfe" in line]
    others = [line for line in kept if "nfe" not in line]
    judged = {line["step"] for line in others}
    parts: list[list[dict[str, Any]]] = [[]]
    for line in trained:
        parts[-1].append(line)
        if line["step"] in judged or len(parts[-1]) == every:  # an evaluation keeps its exact cost
            parts.append([])
    found = sorted(
        [*(merged(part) for part in parts if part), *others],
        key=lambda line: (line["step"], "nfe" not in line),
    )
    return [{key: short(value) for key, value in line.items()} for line in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=5)
    given = parser.parse_args()
    for metrics in sorted(given.runs.glob("*/*/metrics.jsonl")):
        there = given.out / metrics.parent.relative_to(given.runs)
        there.mkdir(parents=True, exist_ok=True)
        settings = read_settings(metrics.parent).model_copy(update={"out": "/".join(there.parts[-2:])})
        (there / "config.toml").write_text(settings.to_toml(), encoding="utf-8")
        lines = slim(read_metrics(metrics), given.every)
        (there / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"{there}: {len(lines)} lines")


if __name__ == "__main__":
    main()
