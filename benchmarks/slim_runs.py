"""Makes run folders small enough to commit: their settings, and the metrics that `g2rpo compare --run` reads.

    python benchmarks/slim_runs.py compared/joint/runs results/compare/joint --every 5

RUNS/<arm>/<seed> becomes OUT/<arm>/<seed> with config.toml, without the path of the run, and metrics.jsonl.
--every n iterations, or fewer before an evaluation, become one line with the index of the last one: costs are
summed, all other metrics averaged. Evaluations do not change. Numbers have five significant digits.
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
    """Rounds a float to five significant digits."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def merged(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the lines of several iterations into one."""
    merged_line: dict[str, Any] = {"step": lines[-1]["step"]}
    for name in dict.fromkeys(name for line in lines for name in line if name != "step"):
        values = [line[name] for line in lines if line.get(name) is not None]
        if values:
            merged_line[name] = sum(values) / (
                1 if name in SUMS or name.startswith("seconds") else len(values)
            )
    return merged_line


def slim(lines: list[dict[str, Any]], every: int) -> list[dict[str, Any]]:
    """Merges `every` iterations into one line each, and drops metrics that comparisons do not read."""
    kept = [{key: value for key, value in line.items() if key.startswith(KEPT)} for line in lines]
    trained = [line for line in kept if "nfe" in line]
    others = [line for line in kept if "nfe" not in line]
    evaluated = {line["step"] for line in others}
    parts: list[list[dict[str, Any]]] = [[]]
    for line in trained:
        parts[-1].append(line)
        if line["step"] in evaluated or len(parts[-1]) == every:  # an evaluation keeps its exact cost
            parts.append([])
    slimmed = sorted(
        [*(merged(part) for part in parts if part), *others],
        key=lambda line: (line["step"], "nfe" not in line),
    )
    return [{key: short(value) for key, value in line.items()} for line in slimmed]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=5)
    given = parser.parse_args()
    for metrics in sorted(given.runs.glob("*/*/metrics.jsonl")):
        folder = given.out / metrics.parent.relative_to(given.runs)
        folder.mkdir(parents=True, exist_ok=True)
        settings = read_settings(metrics.parent).model_copy(update={"out": "/".join(folder.parts[-2:])})
        (folder / "config.toml").write_text(settings.to_toml(), encoding="utf-8")
        lines = slim(read_metrics(metrics), given.every)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"{folder}: {len(lines)} lines")


if __name__ == "__main__":
    main()
