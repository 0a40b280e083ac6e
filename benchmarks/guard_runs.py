"""The guard on the embedded model: four runs that are made to fail, and healthy runs of five methods.

    python benchmarks/guard_runs.py run OUT --seeds 101,102 --jobs 14    trains, then reports
    python benchmarks/guard_runs.py report OUT                         reads the same folders again
    python benchmarks/guard_runs.py report OUT --replay                the present rule on the stored records

A failing run is trained with the first seed, a healthy one with every seed. All of them share
results/compare/joint.toml. OUT gets a folder per run, guard_runs.json, guard_runs.md and guard_runs.tar.gz
(metrics and warnings of all runs, evaluation records of the healthy ones, no weights). Finished runs are not
repeated, and interrupted ones go on.

The thresholds in g2rpo/training/guard_rule.py were set on other seeds than those of the final evidence
(docs/guard.md).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tarfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASE = ROOT / "results" / "compare" / "joint.toml"
HELD_OUT = "verifier"

FAILING = {
    "hacked_reward": "algorithm=g2rpo granularities=[2] train_steps=5 eta=1.0 lr=3e-5 warmup_iterations=25 "
    "iterations=180 eval_every=3 rewards={tiny_preference=1.0} "
    'eval_rewards=["tiny_clip","verifier","verifier_strict"]',
    "rate_too_high": "algorithm=g2rpo granularities=[2] train_steps=5 eta=1.0 lr=1e-4 iterations=100 "
    "eval_every=2",
    "tails_too_coarse": "algorithm=g2rpo granularities=[3] train_steps=5 eta=1.0 lr=3e-5 iterations=90 "
    "eval_every=2",
    "growing_reward": "algorithm=g2rpo granularities=[2] train_steps=5 eta=1.0 lr=3e-5 warmup_iterations=25 "
    'iterations=96 eval_every=2 rewards={"guard_rewards:Growing"=1.0} '
    'eval_rewards=["tiny_clip","verifier","verifier_strict"]',
}
"""Name -> settings of the runs that should trip the guard.

That half of a gain is lost can be told from noise, 2.5 standard errors, only if the gain has more than 5 of
them. So these are settings with which earlier runs gained 0.03 to 0.05 before they failed, and each is
evaluated on FAILING_IMAGES images: the standard error of a gain is about 0.007 with 512 images, 0.005 with
1,024 and 0.0025 with 4,000. The evaluations are so frequent that several fall into the first half of the
loss. The long warm-up keeps the first iterations from losing what they gained before the reward is hacked.
"""

FAILING_IMAGES = 4000
"""Images per evaluation of a failing run, of as many held-out prompts; world:heldout has 2,000."""

HEALTHY = {
    "g2rpo": "algorithm=g2rpo granularities=[2] train_steps=5 eta=1.0 lr=3e-5 lr_schedule=cosine "
    "iterations=72 eval_every=6",
    "mix_grpo": "algorithm=mix_grpo update=once window=3 eta=1.0 lr=2e-5 lr_schedule=cosine iterations=130 "
    "eval_every=13 warmup_iterations=25",
    "flow_grpo": "algorithm=flow_grpo eta=0.7 lr=2e-5 lr_schedule=cosine iterations=105 eval_every=15 "
    "warmup_iterations=25",
    "dance_grpo": "algorithm=dance_grpo update=3 clip_range=1e-3 lr=5e-6 lr_schedule=cosine iterations=105 "
    "eval_every=15 warmup_iterations=25",
    "nft": "algorithm=nft ema_decay=0.9 kl_beta=0 train_levels=4 nft_beta=0.1 advantage_std=group lr=3e-5 "
    "lr_schedule=cosine iterations=90 eval_every=10 warmup_iterations=5",
}
"""Name -> settings of the methods that should not, with the rates and schedules of docs/comparison.md."""

KEPT = ("config.toml", "metrics.jsonl", "warnings.jsonl")
RECORDS = "evaluations/*.json"
"""Records of the healthy runs; those of FAILING_IMAGES images are too large to copy."""


@dataclass
class Report:
    """What one run shows.

    Attributes:
        name, fails: the run, and whether it was made to fail.
        iterations: iterations with a complete line of metrics, of those that were asked for.
        complete: every line of metrics is there and holds finite numbers.
        fired: kind and metric of each warning -> its iteration.
        best_step, best_gain: of the held-out metric's highest evaluation.
        gain_then: its gain at the first warning.
        half_lost: the first evaluation after the best at which less than half of the gain is left.
        best_error: standard error of the best gain.
        margin: standard errors that were missing for a warning about a reward, at the closest evaluation; a
            negative one is beyond; None: no reward fell far enough. By the present rule, not the run's.
        closest: metric and iteration of that evaluation.
        gains: iteration -> gain of the held-out metric.
        findings: iteration -> kinds and metrics that the present rule finds there, also where a run
            warned of them before. Empty for a failing run without --replay.
    """

    name: str
    fails: bool
    iterations: str
    complete: bool
    fired: dict[str, int]
    best_step: int
    best_gain: float
    gain_then: float | None
    half_lost: int | None
    best_error: float
    margin: float | None
    closest: str
    gains: dict[int, float] = field(default_factory=dict)
    findings: dict[int, list[str]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """A failing run must be found before half of the gain is lost, and a healthy one be left alone."""
        if not self.complete:
            return False
        if not self.fails:
            return not self.fired
        first = min(self.fired.values(), default=None)
        return first is not None and (self.half_lost is None or first < self.half_lost)


def prompts_file(out: Path) -> Path:
    """Where the held-out prompts of the failing runs are."""
    return out / "heldout.txt"


def runs(seeds: list[int], only: str) -> dict[str, tuple[str, int, bool]]:
    """Name -> settings, seed, and whether the run is made to fail."""
    made = {name: (text, seeds[0], True) for name, text in FAILING.items()}
    made |= {f"{name}_{seed}": (text, seed, False) for name, text in HEALTHY.items() for seed in seeds}
    return {
        name: run for name, run in made.items() if not only or any(part in name for part in only.split(","))
    }


def settings_of(out: Path, name: str, text: str, seed: int, more: list[str]):
    """The settings of a run; `text` has key=value pairs that are separated by blanks."""
    from g2rpo.config.load import load_settings

    images = [f"eval_prompts={prompts_file(out)}", f"num_eval_prompts={FAILING_IMAGES}"]
    own = [*text.split(), *(images if name in FAILING else [])]
    return load_settings(str(BASE), [*own, f"seed={seed}", f"out={out / name}", *more])


def train_all(out: Path, chosen: dict[str, tuple[str, int, bool]], jobs: int, more: list[str]) -> None:
    """Trains what is not finished, `jobs` runs at a time."""
    from g2rpo.comparison.launcher import Job, train_side_by_side
    from g2rpo.run.run import is_finished
    from g2rpo.runtime.files import atomic_path
    from g2rpo.world.captions import generated_prompts

    out.mkdir(parents=True, exist_ok=True)
    if not prompts_file(out).is_file():
        with atomic_path(prompts_file(out)) as temporary:
            prompts = generated_prompts("heldout", FAILING_IMAGES)
            temporary.write_text("\n".join(prompts) + "\n", encoding="utf-8")
    waiting = []
    for name, (text, seed, _) in chosen.items():
        settings = settings_of(out, name, text, seed, more)
        if not is_finished(settings):
            waiting.append(Job(name, settings, out / f"{name}.log"))
    ended = train_side_by_side(waiting, jobs)
    for name, reason in ended.failed.items():
        print(f"{name} failed: {reason}")
    if ended.interrupted:
        raise SystemExit(130)


def report_of(folder: Path, fails: bool, replay: bool) -> Report:
    """Reads a run folder; with `replay` the present rule decides, not the warnings that the run wrote."""
    from g2rpo.config.load import read_settings
    from g2rpo.run.metrics import read_metrics
    from g2rpo.run.warnings_file import read_warnings

    settings = read_settings(folder)
    lines = read_metrics(folder / "metrics.jsonl")
    trained = [line for line in lines if "seconds" in line]
    evaluated = {line["step"]: line for line in lines if f"eval/{HELD_OUT}" in line}
    numbers = [v for line in lines for k, v in line.items() if not k.startswith("granularity_rank")]
    complete = [line["step"] for line in trained] == list(range(1, settings.iterations + 1))
    complete &= all(isinstance(v, int | float) and math.isfinite(v) for v in numbers)
    gains = {n: line[f"eval/{HELD_OUT}"] - evaluated[0][f"eval/{HELD_OUT}"] for n, line in evaluated.items()}
    best = max(gains, key=lambda n: gains[n])
    error = evaluated[best].get(f"eval_gain_se/{HELD_OUT}", 0.0)
    # The margin is shown of healthy runs only; a failing run from an archive has no records.
    needed = replay or not fails
    found, margin, closest = replayed(folder, settings, sorted(gains)) if needed else ([], None, "")
    warned = found if replay else read_warnings(folder)
    fired: dict[str, int] = {}
    for line in warned:
        fired.setdefault(_name(line), line["step"])
    findings: dict[int, list[str]] = {}
    for line in found:
        findings.setdefault(line["step"], []).append(_name(line))
    first = min(fired.values(), default=None)
    then = None if first is None else gains[max(n for n in gains if n <= first)]
    lost = next((n for n in sorted(gains) if n > best and gains[n] < gains[best] / 2), None)
    done = f"{len(trained)}/{settings.iterations}"
    ends = (error, margin, closest, gains, findings)
    return Report(folder.name, fails, done, complete, fired, best, gains[best], then, lost, *ends)


def _name(warning: dict) -> str:
    return f"{warning['kind']} ({warning['metric']})"


def replayed(folder: Path, settings, steps: list[int]) -> tuple[list[dict], float | None, str]:
    """The findings of the present rule at each evaluation of a run, from its records; the margin.

    Raises:
        FileNotFoundError: a record is missing, as those of the failing runs are in an archive.
    """
    missing = [step for step in steps if not (folder / "evaluations" / f"step_{step:06d}.json").is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} has no record of the evaluation after iteration {missing[0]}; use the folder in which "
            "the run was trained"
        )
    from g2rpo.training.guard import Guard
    from g2rpo.training.guard_rule import confirmations

    class Pointwise:
        groupwise = False

    names = dict.fromkeys([*settings.rewards, *settings.eval_rewards])
    guard = Guard(settings, dict.fromkeys(names, Pointwise()), {})
    found, beyond = [], (-math.inf, "")
    for step in range(1, max(steps) + 1):
        for finding in guard.findings(folder, step):
            found.append({"step": step, "kind": finding.kind, "metric": finding.metric})
        for name, (_, excess) in confirmations(*guard.compared(step)).items():
            beyond = max(beyond, (excess, f"{name} at {step}"))
    return (found, -beyond[0], beyond[1]) if math.isfinite(beyond[0]) else (found, None, "")


def table(reports: list[Report]) -> str:
    """The results as Markdown."""
    head = ["run", "made to fail", "iterations", "first warning", "held-out gain then", "its best gain"]
    head += ["half of it lost", "margin", "as required"]
    lines = ["# The guard on the embedded model", "", "| " + " | ".join(head) + " |"]
    lines.append("|" + " --- |" * len(head))
    for r in reports:
        then = "" if r.gain_then is None else f"{r.gain_then:+.4f}"
        cells = [r.name, "yes" if r.fails else "no", r.iterations + ("" if r.complete else " (incomplete)")]
        cells += [str(min(r.fired.values())) if r.fired else "none", then]
        cells += [f"{r.best_gain:+.4f} ± {r.best_error:.4f} at {r.best_step}", str(r.half_lost or "never")]
        near = "no fall" if r.margin is None else f"{r.margin:.1f} ({r.closest})"
        cells += ["" if r.fails else near, "yes" if r.passed else "**no**"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"The held-out metric is {HELD_OUT}. The margin of a healthy run is how many standard errors were "
        "missing for a warning about a reward, at the closest evaluation.",
        "",
        "Signals, with the iteration at which each fired first:",
        "",
    ]
    for r in reports:
        fired = ", ".join(f"{name} at {step}" for name, step in sorted(r.fired.items(), key=lambda x: x[1]))
        lines.append(f"- {r.name}: {fired or 'none'}")
    return "\n".join(lines) + "\n"


def pack(out: Path, reports: list[Report]) -> None:
    """Writes an archive that is small enough to copy from another machine.

    A report can be made from it again; with --replay of the healthy runs only, whose records it has.
    """
    with tarfile.open(out / "guard_runs.tar.gz", "w:gz") as archive:
        for report in reports:
            for pattern in KEPT if report.fails else (*KEPT, RECORDS):
                for path in sorted((out / report.name).glob(pattern)):
                    archive.add(path, path.relative_to(out))


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns 1 if a run did not behave as required."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--seeds", default="101,102", help="seeds of the healthy runs; failing ones have the first"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--only", default="", help="parts of the names of the runs, separated by commas")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="more settings for all runs"
    )
    parser.add_argument("--replay", action="store_true", help="apply the present rule to the stored records")
    given = parser.parse_args(arguments)
    out = given.out.absolute()
    chosen = runs([int(seed) for seed in given.seeds.split(",")], given.only)
    if given.action == "run":
        train_all(out, chosen, given.jobs, given.set)
    reports = [
        report_of(out / name, fails, given.replay)
        for name, (_, _, fails) in chosen.items()
        if (out / name / "metrics.jsonl").is_file()
    ]
    text = table(reports)
    (out / "guard_runs.md").write_text(text, encoding="utf-8")
    results = [asdict(r) | {"passed": r.passed} for r in reports]
    (out / "guard_runs.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    pack(out, reports)
    print(text)
    return 0 if len(reports) == len(chosen) and all(r.passed for r in reports) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # guard_rewards, for the runs as well
    sys.exit(main())
