"""What each knob costs and what it does to learning, on the embedded model at equal forwards.

    python benchmarks/knobs.py --seeds 1 2 3 4 --workers 12 --out /tmp/knobs

Every arm is the demo's recipe with some settings changed and so many iterations that all arms run as many
forwards as the recipe does. The table: forwards of an iteration against the recipe's, iterations, and the
gain of the trained reward in the base's standard deviations (mean over seeds, its standard error, smallest
seed), on the run's own prompts with fresh seeds and on unseen prompts.
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
"""All or nothing, on 16 prompts: many of its groups are all right or all wrong."""

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
    """Of an iteration, and the iterations that the settings ask for."""
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
    parser.add_argument(
        "--table", action="store_true", help="of the results.json that lies in --out, at once"
    )
    given = parser.parse_args()
    if given.table:
        print(table(json.loads((given.out / "results.json").read_text(encoding="utf-8"))))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    few = given.out / "16.txt"
    few.write_text("".join(prompt.text + "\n" for prompt in read_prompts("world:train")[0][:16]))
    common = dict(pair.split("=", 1) for pair in given.settings)
    asked, iterations = forwards(given.recipe, common)
    arms, cost = {}, {}
    for name in given.arms:
        arm = {**common, **ARMS[name]}
        if arm.get("prompts") == few.name:
            arm["prompts"] = str(few)
        cost[name] = forwards(given.recipe, arm)[0] / asked
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
            told = {"arms": arms, "cost": cost, "results": results}
            (given.out / "results.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    print(table({"arms": arms, "cost": cost, "results": results}))


def table(told: dict) -> str:
    """Markdown: gains in the base's standard deviations, mean over seeds ± standard error [smallest]."""
    lines = [
        "| arm | forwards an iteration | iterations | seeds | own prompts | unseen prompts |",
        "|" + " --- |" * 6,
    ]
    for name, by_seed in told["results"].items():
        cells = [f"{told['cost'][name]:.2f}", told["arms"][name]["iterations"], str(len(by_seed))]
        for pictures in ("own prompts", "unseen prompts"):
            gains = [
                change["difference"] / max(change["base_std"], 1e-12)
                for one in by_seed.values()
                for change in one
                if change["trained"] and change["pictures"].startswith(pictures)
            ]
            error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
            cells.append(f"{statistics.mean(gains):+.2f} ± {error:.2f} [{min(gains):+.2f}]")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
