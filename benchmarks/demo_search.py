"""Searches settings of the demo: many small runs at once on one GPU, judged on prompts of their own.

    python benchmarks/demo_search.py run ARMS.json OUT --seeds 11,12,13 --jobs 14
    python benchmarks/demo_search.py report ARMS.json OUT

ARMS.json maps a name to settings on top of the recipe `tiny`. Where they do not name `eval_prompts`, the runs
are judged on held-out prompts that the demo's own comparison does not use; {out}/many_train.txt and
{out}/many_heldout.txt are prompts of three objects or more.
results/demo_search/sweep8.json (seeds 11, 12) and
sweep9.json (seeds 21, 22) have the settings and gains of the arms so far. For every arm
the table has the mean gain of each metric and its smallest number of standard errors over the seeds.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
from attribute_rewards import ATTRIBUTES

from g2rpo.world.captions import parse, prompt_set

SEARCH_PROMPTS = slice(1024, 1536)
"""Of world:heldout; the demo's comparison uses the first ones."""

COMMON = [
    "rollout_batch=512",
    "decode_batch=256",
    "update_batch=64",
    "tensorboard=false",
    "compare_images=0",
    "sample_every=0",
    "num_sample_prompts=1",
    "checkpoint_every=100000",
    "device=cuda" if torch.cuda.is_available() else "device=cpu",
]


def is_many(prompt: str) -> bool:
    """Whether a caption asks for one group of three objects or more."""
    scene = parse(prompt)
    return scene is not None and int(scene.count[0, 0]) >= 3 and int(scene.count[0, 1]) == 0


def train(arms: dict[str, str], out: Path, seeds: list[int], jobs: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in ("train", "heldout"):
        prompts = [text for text, _ in prompt_set(name, 20_000)]
        start = 0 if name == "train" else SEARCH_PROMPTS.start
        for kind, chosen in (
            ("all", prompts[start:]),
            ("many", [p for p in prompts if is_many(p)][start // 4 :]),
        ):
            (out / f"{kind}_{name}.txt").write_text("\n".join(chosen[:2000]) + "\n", encoding="utf-8")
    names = [
        "tiny_preference",
        "tiny_clip",
        "verifier",
        "verifier_strict",
        *(f"attribute_rewards:{a}" for a in ATTRIBUTES),
    ]
    waiting = [(name, seed) for seed in seeds for name in arms if not (out / f"{name}_{seed}.done").exists()]
    running: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    while waiting or running:
        while waiting and len(running) < jobs:
            name, seed = waiting.pop(0)
            given = arms[name].replace("{out}", str(out)).split()
            if not any(part.startswith("eval_prompts=") for part in given):
                given.append(f"eval_prompts={out}/all_heldout.txt")
            rewards = " ".join(part for part in given if part.startswith("rewards"))
            held_out = [n for n in names if not re.search(rf"\b{n}=(?!none)", rewards)]
            command = [
                *(sys.executable, "-m", "g2rpo", "train", "tiny", *COMMON),
                *("num_eval_prompts=512", "eval_every=10000", f"cache={out}/cache_{name}_{seed}"),
                *(f"eval_rewards={json.dumps(held_out)}", *given, f"seed={seed}", f"out={out}/{name}_{seed}"),
            ]
            with (out / f"{name}_{seed}.log").open("wb") as log:
                running[name, seed] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        for key, process in list(running.items()):
            if (code := process.poll()) is not None:
                del running[key]
                print(f"{key[0]} {key[1]}: exit code {code}", flush=True)
                if code == 0:
                    (out / f"{key[0]}_{key[1]}.done").touch()
        time.sleep(0.3)


def report(arms: dict[str, str], out: Path) -> dict[str, dict]:
    results: dict[str, dict] = {}
    for name in arms:
        gains: dict[str, list[tuple[float, float]]] = {}
        iterations, forwards = 0, 0
        for file in sorted(out.glob(f"{name}_*.done")):
            path = file.with_suffix("") / "metrics.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            iterations = max(line["step"] for line in lines)
            forwards = sum(line.get("nfe") or 0 for line in lines)
            last = [line for line in lines if "eval_gain/verifier" in line][-1]
            for key in (key for key in last if key.startswith("eval_gain/")):
                error = last[key.replace("eval_gain/", "eval_gain_se/")]
                gains.setdefault(key[10:].split(":")[-1], []).append((last[key], error))
        results[name] = {
            "settings": arms[name],
            "iterations": iterations,
            "forwards": forwards,
            "gains": gains,
        }
    return results


def table(results: dict[str, dict]) -> str:
    rows = []
    for name, result in sorted(
        results.items(),
        key=lambda item: -min((g / e for g, e in item[1]["gains"].get("verifier", []) if e), default=-9),
    ):
        cells = []
        for metric, values in result["gains"].items():
            values = [(g, e) for g, e in values if g is not None and e]
            if not values:
                continue
            mean = sum(g for g, _ in values) / len(values)
            least = min(g / e if e else 0.0 for g, e in values)
            cells.append(f"{metric} {mean:+.4f} ({least:+.1f})")
        rows.append(f"{name}: {result['iterations']} it, {result['forwards']} fw: " + ", ".join(cells))
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("run", "report"))
    parser.add_argument("arms", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="11,12,13")
    parser.add_argument("--jobs", type=int, default=14)
    given = parser.parse_args()
    arms = json.loads(given.arms.read_text())
    if given.action == "run":
        train(arms, given.out, [int(seed) for seed in given.seeds.split(",")], given.jobs)
    results = report(arms, given.out)
    (given.out / "results.json").write_text(json.dumps(results, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
