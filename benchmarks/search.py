"""A grid search: one recipe with every combination of some settings, over seeds.

    python benchmarks/search.py tiny lr=3e-5,6e-5 eta=0.4,0.7 --seeds 0 1 2 --workers 8 --out /tmp/search

Settings with several comma-separated values are searched (a list in brackets is one value); the others apply
to all runs. Every run is an ordinary `g2rpo train`. The table contains the changes of all rewards by the
training, in standard deviations of the base: the mean over seeds and the smallest. `--out` keeps the run
folders and results.json; existing runs are not repeated.
"""

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path

COMMA = re.compile(r",(?![^\[{]*[\]}])")  # not inside brackets or braces


def combinations(overrides: list[str]) -> list[dict[str, str]]:
    """Returns the settings of every combination of values."""
    pairs = [override.split("=", 1) for override in overrides]
    for pair in pairs:
        if len(pair) != 2:
            raise SystemExit(f"{pair[0]!r} is not key=value[,value]")
    values = [[(key, value) for value in COMMA.split(text)] for key, text in pairs]
    return [dict(choice) for choice in itertools.product(*values)]


def run(recipe: str, overrides: dict[str, str], seed: int, out: str, threads: int) -> list[dict]:
    """Trains, or reads a finished run, and returns the changes of the rewards."""
    import torch

    from g2rpo.config.load import load_settings
    from g2rpo.training.trainer import train

    torch.set_num_threads(threads)
    done = Path(out) / "changes.json"
    if not done.is_file():
        arguments = [*(f"{key}={value}" for key, value in overrides.items()), f"seed={seed}", f"out={out}"]
        settings = load_settings(recipe, [*arguments, "tensorboard=false"])
        with (Path(f"{out}.log")).open("w") as log, redirect_stdout(log), redirect_stderr(log):
            changes = train(settings).changes
        done.write_text(json.dumps([asdict(change) for change in changes]), encoding="utf-8")
    return json.loads(done.read_text(encoding="utf-8"))


def row(name: str, runs: list[list[dict]]) -> str:
    """Formats the changes of the runs of all seeds as a row of the table."""
    cells = []
    for first in runs[0]:
        same = [
            change
            for changes in runs
            for change in changes
            if (change["pictures"], change["reward"]) == (first["pictures"], first["reward"])
        ]
        gains = [change["difference"] / max(change["base_std"], 1e-12) for change in same]
        errors = [change["difference"] / max(change["difference_se"], 1e-12) for change in same]
        cells.append(f"{sum(gains) / len(gains):+.2f} (min {min(gains):+.2f}, {min(errors):+.1f} SE)")
    return f"| {name} | {len(runs)} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("settings", nargs="*", metavar="key=value[,value]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--threads", type=int, default=0, help="threads per worker; 0 = an equal share of the cores"
    )
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    settings = combinations(given.settings)
    threads = given.threads or max(1, (os.cpu_count() or 1) // given.workers)
    varied = [key for key in settings[0] if len({str(choice[key]) for choice in settings}) > 1]
    names = [" ".join(f"{key}={choice[key]}" for key in varied) or given.recipe for choice in settings]
    results: dict[str, dict[int, list[dict]]] = {}
    Path(given.out).mkdir(parents=True, exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=spawn) as pool:
        jobs = {}
        for seed in given.seeds:  # the first seed of all settings comes before the second of any
            for name, choice in zip(names, settings, strict=True):
                digest = hashlib.sha256(json.dumps([given.recipe, choice]).encode()).hexdigest()[:8]
                folder = str(Path(given.out) / re.sub(r"[^\w.=-]+", "_", f"{name}_{digest}_seed{seed}"))
                jobs[pool.submit(run, given.recipe, choice, seed, folder, threads)] = (name, seed)
        for job in as_completed(jobs):
            name, seed = jobs[job]
            try:
                results.setdefault(name, {})[seed] = job.result()
            except Exception as error:
                print(f"{name}, seed {seed}: {type(error).__name__}: {error}", flush=True)
                continue
            (Path(given.out) / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
            print(row(f"{name} seed {seed}", [results[name][seed]]), flush=True)
    if not results:
        raise SystemExit("no run ended well")
    headers = [
        f"{change['reward']}, {change['pictures']}"
        for change in next(iter(next(iter(results.values())).values()))
    ]
    print("\n| settings | seeds | " + " | ".join(headers) + " |\n|" + " --- |" * (len(headers) + 2))
    for name in names:
        if name in results:
            print(row(name, list(results[name].values())))


if __name__ == "__main__":
    main()
