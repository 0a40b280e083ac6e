"""Is one checkout slower than another? Times of a forward, an iteration and `g2rpo --help`, as ratios.

    python tools/compare_speed.py BASE NEW [--repeats 5]

Both checkouts are measured in turn, so that a change of the machine's load meets both. A repeat trains the
embedded model for a few iterations; the first of them is left out, and the median of all others counts.
A forward is the time of the anchor and the tails over the number of forwards.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = ("train", "tiny")
SETTINGS = {
    "iterations": 6,
    "prompts_per_iteration": 2,
    "eval_every": 0,
    "sample_every": 0,
    "compare_images": 0,
    "num_sample_prompts": 1,
    "checkpoint_every": 100,
    "tensorboard": "false",
    "device": "cpu",
}


def run(checkout: Path, *words: str) -> float:
    """Seconds of `python -m g2rpo WORDS`."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "g2rpo", *words], env=environment, check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - began


def measure(checkout: Path, folder: Path) -> dict[str, list[float]]:
    """Seconds of each kind, one repeat."""
    out = folder / "run"
    help_seconds = run(checkout, "--help")
    settings = SETTINGS | {"out": out, "cache": folder / "cache"}
    run(checkout, *TRAIN, *(f"{key}={value}" for key, value in settings.items()))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1:]
    forwards = [(line["seconds_anchor"] + line["seconds_tails"]) / line["nfe"] for line in lines]
    return {"--help": [help_seconds], "iteration": [line["seconds"] for line in lines], "forward": forwards}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    times: dict[str, dict[str, list[float]]] = {"base": {}, "new": {}}
    for repeat in range(given.repeats):
        sides = [("base", given.base), ("new", given.new)]
        for side, checkout in sides if repeat % 2 == 0 else reversed(sides):
            with tempfile.TemporaryDirectory() as folder:
                for kind, values in measure(checkout.resolve(), Path(folder)).items():
                    times[side].setdefault(kind, []).extend(values)
    for kind in times["base"]:
        base, new = (statistics.median(times[side][kind]) for side in ("base", "new"))
        print(f"{kind:10} base {base:.4f} s   new {new:.4f} s   new / base {new / base:.3f}")


if __name__ == "__main__":
    main()
