"""Cost of settings and their effect on learning, on the embedded model at equal forwards.

    python benchmarks/knobs.py --seeds 1 2 3 4 --workers 12 --out /tmp/knobs

Every arm is the recipe of the demo with some settings changed, and with the number of iterations at which it
uses as many forwards as the recipe. The table contains the forwards per iteration relative to the recipe, the
iterations, and the gain of the trained reward in standard deviations of the base (mean over seeds, standard
error, smallest seed), on the prompts of the run with new seeds and on unseen prompts.
"""

import argparse
import json
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from search import run

from g2rpo.data.prompts import read_prompts

STRICT = {"rewards": "{verifier_strict=1.0}", "eval_rewards": "[]", "prompts": "16.txt"}
"""A binary reward on 16 prompts, for which many groups are completely right or completely wrong."""

ARMS: dict[str, dict[str, str]] = {
    "recipe": {},
    "2 of 3 steps, even": {"steps_per_iteration": "2"},
    "2 of 3 steps, by spread": {"steps_per_iteration": "2", "step_draw": "spread"},
    "1 of 3 steps, even": {"steps_per_iteration": "1"},
    "1 of 3 steps, by spread": {"steps_per_iteration": "1", "step_draw": "spread"},
    "granularity 1": {"granularities": "[1]"},
    "granularity 2": {"granularities": "[2]"},
    "granularities 1, 2, 3": {"granularities": "[1,2,3]"},
    "group of 6": {"group_size": "6"},
    "group of 24": {"group_size": "24"},
    "bfloat16": {"precision": "bfloat16"},
    "bfloat16, float8 tails": {"precision": "bfloat16", "tails_precision": "float8"},
    "strict": {**STRICT},
    "strict, skip_flat": {**STRICT, "skip_flat": "true"},
}


def forwards(recipe: str, overrides: dict[str, str]) -> tuple[float, int]:
    """Returns the forwards per iteration and the number of iterations of the settings."""
    from g2rpo.config.load import load_settings
    from g2rpo.costs.costs import plan_costs

    settings = load_settings(recipe, [f"{key}={value}" for key, value in overrides.items()])
    return plan_costs(settings).forwards["total"], settings.iterations


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="for every arm")
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="only print the table of OUT/results.json")
    given = parser.parse_args()
    if given.table:
        print(table(json.loads((given.out / "results.json").read_text(encoding="utf-8"))))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    prompt_file = given.out / "16.txt"
    prompt_file.write_text("".join(prompt.text + "\n" for prompt in read_prompts("world:train")[0][:16]))
    common = dict(pair.split("=", 1) for pair in given.settings)
    recipe_forwards, iterations = forwards(given.recipe, common)
    arms, cost = {}, {}
    for name in given.arms:
        arm = {**common, **ARMS[name]}
        if arm.get("prompts") == prompt_file.name:
            arm["prompts"] = str(prompt_file)
        cost[name] = forwards(given.recipe, arm)[0] / recipe_forwards
        arms[name] = {**arm, "iterations": str(round(iterations / cost[name]))}
    threads = max(1, (os.cpu_count() or 1) // given.workers)
    results: dict[str, dict[int, list[dict]]] = {}
    with ProcessPoolExecutor(given.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {
            pool.submit(run, given.recipe, arm, seed, str(given.out / f"{n:02d}_seed{seed}"), threads): (
                name,
                seed,
            )
            for seed in given.seeds
            for n, (name, arm) in enumerate(arms.items())
        }
        for job in as_completed(jobs):
            name, seed = jobs[job]
            try:
                results.setdefault(name, {})[seed] = job.result()
            except Exception as error:
                print(f"{name}, seed {seed}: {type(error).__name__}: {error}", flush=True)
                continue
            report = {"arms": arms, "cost": cost, "results": results}
            (given.out / "results.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(table({"arms": arms, "cost": cost, "results": results}))


def table(report: dict) -> str:
    """Formats the gains in standard deviations of the base: mean over seeds ± standard error [smallest]."""
    lines = [
        "| arm | forwards per iteration | iterations | seeds | own prompts | unseen prompts |",
        "|" + " --- |" * 6,
    ]
    for name, by_seed in report["results"].items():
        cells = [f"{report['cost'][name]:.2f}", report["arms"][name]["iterations"], str(len(by_seed))]
        for prompt_set in ("own prompts", "unseen prompts"):
            gains = [
                change["difference"] / max(change["base_std"], 1e-12)
                for changes in by_seed.values()
                for change in changes
                if change["trained"] and change["pictures"].startswith(prompt_set)
            ]
            error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
            cells.append(f"{statistics.mean(gains):+.2f} ± {error:.2f} [{min(gains):+.2f}]")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
