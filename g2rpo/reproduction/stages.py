"""The five stages of a reproduction, each of which measures and compares with the criteria.

    machine      this machine, the files and the prompts, what the run needs; nothing is loaded
    base         the untrained model on the benchmark prompts
    start        the first iterations of the training
    curve        the reward after the first hours
    evaluation   the rest of the training, and the tables

Training, evaluation, plan and report are those of the commands of these names. Every process calls a stage.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from g2rpo.config.settings import Settings
from g2rpo.costs.costs import Costs
from g2rpo.costs.disk import disk_problem, size_text
from g2rpo.costs.estimate import plan_here
from g2rpo.costs.table import verdict_lines
from g2rpo.data.prompts import Prompt, is_absent, read_prompts
from g2rpo.models.options import as_resolution
from g2rpo.report.page import write_report
from g2rpo.reproduction.checks import (
    Check,
    check,
    level_check,
    not_applicable,
    reach_check,
    rise_check,
)
from g2rpo.reproduction.criteria import TRAINING, Criteria, Gain, Row
from g2rpo.reproduction.records import Stage
from g2rpo.reproduction.scores import BASE, TRAINED, Scores, evaluated, option_words, request_of
from g2rpo.rewards.registry import groupwise_names
from g2rpo.run.environment import environment
from g2rpo.run.folder import latest_checkpoint, read_state, step_name
from g2rpo.run.metrics import read_metrics
from g2rpo.run.run import RunStopped
from g2rpo.runtime.files import free_bytes
from g2rpo.runtime.processes import barrier, gathered, rank, resolve_device, world_size
from g2rpo.runtime.records import read_record
from g2rpo.setup.doctor import report as doctor_rows
from g2rpo.setup.fetch import absent_model, absent_reward
from g2rpo.training.preflight import PREFLIGHT
from g2rpo.training.run_prompts import RunPrompts, planned_texts
from g2rpo.training.trainer import train

RUN, CURVE, TABLES = "run", "curve", "evaluation"
"""Folders within the folder of a reproduction: the run, and the two evaluations."""


@dataclass(frozen=True)
class Plan:
    """What is reproduced, and how.

    Attributes:
        recipe: name or path of the recipe.
        out: the folder of the reproduction.
        settings: of the run, whose folder is OUT/run.
        criteria: what is expected.
        prompts: source of the benchmark prompts.
        limit: number of benchmark prompts; None: as many as the criteria say.
        options: of rewards, NAME.KEY=VALUE.
        before: the stages that are done, by name.
    """

    recipe: str
    out: Path
    settings: Settings
    criteria: Criteria
    prompts: str
    limit: int | None
    options: tuple[str, ...]
    before: Mapping[str, Stage]

    @property
    def run(self) -> Path:
        """The run folder."""
        return Path(self.settings.out)

    def shown(self, path: Path) -> Path:
        """A path for the report, which others read: relative to the current folder, if it is in it."""
        here = Path.cwd()
        return path.relative_to(here) if path.is_relative_to(here) else path

    @property
    def num_prompts(self) -> int:
        """Number of benchmark prompts."""
        return self.limit or self.criteria.evaluation.num_prompts

    @property
    def rewards(self) -> list[str]:
        """Rewards that could be evaluated when the reproduction began."""
        return list(self.before["machine"].facts["rewards"])

    @property
    def absent(self) -> Mapping[str, str]:
        """Rewards of the tables that could not be evaluated, and why."""
        facts: Mapping[str, str] = self.before["machine"].facts["absent"]
        return facts


# ------------------------------------------------------------------------------------------ 1. machine


def machine(plan: Plan) -> Stage:
    """Checks the machine, the files and the prompts, and plans the run."""
    checks, facts = gathered(_machine(plan))[0]  # what the first process found counts for all
    return Stage("machine", tuple(checks), facts)


def _machine(plan: Plan) -> tuple[list[Check], dict[str, Any]]:
    settings = plan.settings
    rows = doctor_rows(plan.shown(plan.out))
    missing = [f"{row.name}: {row.detail} ({row.advice})" for row in rows if row.status == "missing"]
    checks = [
        check(
            "installation",
            not missing,
            "; ".join(missing) or "nothing is missing",
            "nothing that every run needs is missing",
            "g2rpo doctor",
            "install what is missing",
        )
    ]
    checks += _files(plan)
    absent = _absent_rewards(plan)
    rewards = [name for name in plan.criteria.evaluation.rewards if name not in absent]
    table = f"evaluated for the tables of {plan.criteria.source}"
    for name, reason in absent.items():
        needed = f"its weights on this machine, or a server: {_fetch_command(name)}"
        checks.append(not_applicable(f"reward {name}", needed, table, reason))
    checks += [_prompt_check(plan, "training prompts", settings.prompts, 1)]
    checks += [_prompt_check(plan, "benchmark prompts", plan.prompts, plan.num_prompts)]
    costs = plan_here(settings, num_processes=world_size(), num_texts=planned_texts(settings)[0])
    checks += [*_cost_checks(settings, costs), _image_check(plan, costs)]
    facts = {
        "environment": environment(resolve_device(settings.device)),
        "doctor": [f"{row.name}: {row.status}, {row.detail}" for row in rows],
        "plan": verdict_lines(costs),
        "rewards": rewards,
        "absent": absent,
    }
    return checks, facts


def _fetch_command(reward: str) -> str:
    return (
        f"g2rpo fetch tiny rewards.{reward}=1 (servers: --option {reward}.servers=ADDRESS, docs/rewards.md)"
    )


def _files(plan: Plan) -> list[Check]:
    settings = plan.settings
    problem = absent_model(settings.model, settings.family)
    absent = {name: why for name in settings.rewards if (why := _absent_reward(plan, name))}
    fetch = f"g2rpo fetch {plan.recipe}"
    return [
        check("model files", not problem, problem or "complete", "complete", settings.model, fetch),
        check(
            "files of the trained rewards",
            not absent,
            "; ".join(f"{name}: {why}" for name, why in absent.items()) or "complete",
            "complete",
            ", ".join(settings.rewards),
            fetch,
        ),
    ]


def _absent_reward(plan: Plan, name: str) -> str:
    given = dict(plan.settings.reward_options.get(name, {}))
    for option in plan.options:
        key, _, value = option.partition("=")
        if key.startswith(f"{name}."):
            given[key.removeprefix(f"{name}.")] = value
    return absent_reward(name, given)


def _absent_rewards(plan: Plan) -> dict[str, str]:
    names = plan.criteria.evaluation.rewards
    return {name: why for name in names if (why := _absent_reward(plan, name))}


def _prompt_check(plan: Plan, name: str, source: str, needed: int) -> Check:
    count = 0 if is_absent(source) else len(read_prompts(source)[0])
    measured = f"{source} is absent" if is_absent(source) else f"{count:,} prompts in {source}"
    expected = f"at least {needed:,}" if needed > 1 else "present"
    remedy = "put the file there, or give --benchmark FILE" if needed > 1 else "give prompts=FILE"
    source_of_it = plan.criteria.source if needed > 1 else "the recipe"
    return check(name, count >= needed, measured, expected, source_of_it, remedy)


def _cost_checks(settings: Settings, costs: Costs) -> list[Check]:
    source = "g2rpo plan"
    if costs.fit is None or costs.device_bytes is None:
        memory = not_applicable(
            "memory", "the run fits into a device", source, "the memory of the device is not known (no GPU)"
        )
    else:
        fits = f"{size_text(costs.memory_bytes)} of {size_text(costs.device_bytes)}"
        measured = "; ".join(costs.fit) or f"about {fits} per device"
        memory = check("memory", not costs.fit, measured, "the run fits into a device", source, "see above")
    if costs.run_seconds is None or costs.released_gpu_hours is None:
        hours = not_applicable(
            "time", "at most the released code's", source, "no times are known for this model and device"
        )
    else:
        planned = costs.run_seconds * costs.num_processes / 3600
        measured = f"{planned:,.0f} device hours, {costs.run_seconds / 3600:,.1f} h"
        expected = f"at most the released code's {costs.released_gpu_hours:,.0f} device hours"
        hours = check("time", planned <= costs.released_gpu_hours, measured, expected, source)
    problem = disk_problem(settings)
    needed = sum(size for part, size in costs.disk.items() if part not in ("one checkpoint", "export"))
    measured = problem or f"{size_text(needed)} needed; enough is free"
    return [
        memory,
        hours,
        check("disk", not problem, measured, "room for the run", source, "free some space"),
    ]


def _image_check(plan: Plan, costs: Costs) -> Check:
    """Whether the images of the evaluations fit on the disk, uncompressed and beside the run."""
    evaluation, curve = plan.criteria.evaluation, plan.criteria.curve
    shape = costs.shape
    tables = 2 * len(evaluation.steps) * plan.num_prompts * evaluation.num_images
    size = as_resolution(evaluation.conditions.get("resolution")) or (shape.height_px, shape.width_px)
    needed = 3 * tables * size[0] * size[1]
    needed += 3 * 2 * curve.num_prompts * curve.num_images * shape.height_px * shape.width_px
    free = free_bytes(plan.out)
    measured = f"{size_text(needed)} needed at most, {size_text(free)} free"
    name, remedy = "disk for the evaluations", "free some space, or give a smaller --limit"
    return check(name, needed <= free, measured, "room for all images", "the criteria", remedy)


# --------------------------------------------------------------------------------------------- 2. base


def base(plan: Plan) -> Stage:
    """Evaluates the untrained model on the benchmark prompts."""
    steps = plan.criteria.evaluation.steps[0]
    # Where the tables were begun already, their folder holds the trained model too, and is evaluated whole.
    record = plan.out / TABLES / "evaluation.json"
    begun = rank() == 0 and record.is_file() and TRAINED in read_record(record)["models"]
    scores = _tables(plan, trained=gathered(begun)[0])
    rows = [row for row in plan.criteria.row if row.model == BASE and row.steps == steps]
    checks = [_scored_check(plan, scores, [BASE], [steps])]
    checks += [one for row in rows for one in _row_checks(plan, scores, row)]
    return Stage("base", tuple(checks), {"means": _means(plan, scores, [BASE], [steps])})


def _tables(plan: Plan, *, trained: bool) -> Scores:
    """The evaluation of the tables: of the base with the first number of steps, or of both with all."""
    evaluation = plan.criteria.evaluation
    steps = evaluation.steps if trained else evaluation.steps[:1]
    request = request_of(
        plan.settings,
        read_prompts(plan.prompts)[0][: plan.num_prompts],
        steps,
        shift=None if evaluation.shift == "pipeline" else evaluation.shift,
        conditions=evaluation.conditions,
        num_images=evaluation.num_images,
        seed=evaluation.seed,
        batch=evaluation.batch,
    )
    models = {BASE: plan.settings.weights or plan.settings.model}
    models |= {TRAINED: str(plan.run)} if trained else {}
    if not plan.rewards:
        raise ValueError(
            "none of the rewards of the tables is on this machine: "
            + "; ".join(f"{name}: {why}" for name, why in plan.absent.items())
        )
    options = option_words(plan.settings, plan.rewards, plan.options)
    return evaluated(plan.out / TABLES, models, request, plan.rewards, options)


def _scored_check(plan: Plan, scores: Scores, labels: Sequence[str], steps: Sequence[int]) -> Check:
    """Whether every image has a score of every reward."""
    means = [(name, scores.mean(label, n, name)) for label in labels for n in steps for name in plan.rewards]
    invalid = {name: sum(mean.invalid for own, mean in means if own == name) for name in plan.rewards}
    missing = ", ".join(f"{count} by {name}" for name, count in invalid.items() if count)
    measured = f"images without a score: {missing or 'none'}"
    remedy = "a score that is not finite: check the weights of the reward and of the model"
    return check("every image has its scores", not missing, measured, "none", "g2rpo evaluate", remedy)


def _row_checks(plan: Plan, scores: Scores, row: Row) -> list[Check]:
    """Compares our model with a row of a table: the base in both directions, the trained one from below."""
    source = f"{row.table}, {row.method}; {plan.criteria.source}"
    errors = plan.criteria.tolerance_errors
    checks = []
    for name, value in row.values.items():
        title = f"{name} of the {row.model} model in {row.steps} steps"
        if name in plan.absent:
            checks.append(not_applicable(title, str(value), source, plan.absent[name]))
            continue
        assert row.model is not None
        compare = level_check if row.model == BASE else reach_check
        mean = scores.mean(row.model, row.steps, name)
        checks.append(compare(title, mean, value, row.errors.get(name), errors, source))
    return checks


def _gain_checks(plan: Plan, scores: Scores, gain: Gain) -> list[Check]:
    checks = []
    for name, value in gain.values.items():
        title = f"paired gain of {name} in {gain.steps} steps"
        if name in plan.absent:
            checks.append(not_applicable(title, f"{value:+}", gain.source, plan.absent[name]))
            continue
        ours, error = scores.gain(gain.steps, name), gain.errors.get(name)
        errors = plan.criteria.tolerance_errors
        checks.append(reach_check(title, ours, value, error, errors, gain.source, "+"))
    return checks


def _means(plan: Plan, scores: Scores, labels: Sequence[str], steps: Sequence[int]) -> list[dict[str, Any]]:
    """Means of the evaluation as JSON values, one entry per model, number of steps and reward."""
    found = []
    for label in labels:
        for n in steps:
            for name in plan.rewards:
                mean = scores.mean(label, n, name)
                entry = {"model": label, "steps": n, "reward": name, "mean": mean.mean}
                entry |= {"standard_error": mean.standard_error, "prompts": mean.prompts}
                entry |= {"invalid": mean.invalid}
                found.append(entry)
    return found


# -------------------------------------------------------------------------------------------- 3. start


def start(plan: Plan) -> Stage:
    """Trains the first iterations and checks ratio, reward spread and gradients."""
    criteria, settings = plan.criteria.start, plan.settings
    last = min(criteria.iterations, settings.iterations)
    stopped = ""
    try:
        _train_to(plan, last)
    except RunStopped as error:
        stopped = str(error)
    barrier()
    lines = {line["step"]: line for line in _iterations(plan.run) if line["step"] <= last}
    preflight = _preflight(plan.run)
    checks = [
        check(
            f"the first {last} iterations",
            not stopped and len(lines) == last,
            stopped or f"{len(lines)} done",
            f"{last} done",
            "g2rpo train",
            "follow the advice of the message",
        ),
        _ratio_check(plan, preflight),
        *(_spread_check(plan, name, preflight) for name in settings.rewards),
        _finite_check(list(lines.values())),
    ]
    shown = ("step", "seconds", "loss", "grad_norm", "ratio_max_dev", "rollout_ratio_dev", "nfe")
    facts = {
        "iterations": [{key: line[key] for key in shown if key in line} for line in lines.values()],
        "preflight": preflight,
    }
    return Stage("start", tuple(checks), facts)


def _train_to(plan: Plan, last: int) -> None:
    """Trains until iteration `last` of the run, unless that is done.

    Raises:
        KeyboardInterrupt: a signal stopped the run, with a checkpoint.
        RunStopped, ValueError: as `train`.
    """
    checkpoint = latest_checkpoint(plan.run)
    done = gathered(0 if checkpoint is None else int(read_state(checkpoint)["iteration"]))[0]
    is_last = last == plan.settings.iterations
    if done >= last and not is_last:
        return
    try:
        run = train(plan.settings.model_copy(update={} if is_last else {"stop_after": last}))
    finally:
        gc.collect()  # a policy's hook may refer back to it, so reference counting does not free it
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if run.interrupted:
        raise KeyboardInterrupt


def _iterations(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics of iterations."""
    file = run / "metrics.jsonl"
    return [line for line in read_metrics(file) if "nfe" in line] if file.is_file() else []


def _preflight(run: Path) -> dict[str, Any]:
    """The content of the run's pre-flight; {} if there is none, or it cannot be read."""
    try:
        stored = json.loads((run / PREFLIGHT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _ratio_check(plan: Plan, preflight: Mapping[str, Any]) -> Check:
    criteria = plan.criteria.start
    name, expected = "first ratio is 1", f"|ratio - 1| at most {criteria.max_ratio_deviation:g}"
    if "ratio_noise" not in preflight:
        absent = f"no {PREFLIGHT} in {plan.shown(plan.run)}"
        return check(name, False, absent, expected, criteria.ratio_source)
    noise = preflight["ratio_noise"]
    if noise is None and preflight.get("clip_range") is None:
        return not_applicable(name, expected, criteria.ratio_source, "this objective has no ratio")
    holds = noise is not None and noise <= criteria.max_ratio_deviation
    measured = "not finite" if noise is None else f"|ratio - 1| at most {noise:.1e}"
    remedy = "rollout and update disagree: try compile_blocks=false, tails_precision=compute"
    return check(name, holds, measured, expected, criteria.ratio_source, remedy)


def _spread_check(plan: Plan, reward: str, preflight: Mapping[str, Any]) -> Check:
    limit = plan.criteria.start.max_flat_group_share
    found = preflight.get("rewards", {}).get(reward, {})
    spread, flat = found.get("spread"), found.get("flat_group_share")
    holds = spread is not None and flat is not None and spread > 0 and flat <= limit
    measured = "not measured"
    if spread is not None and flat is not None:
        measured = f"standard deviation within a group {spread:.3g}; {flat:.0%} of the groups without any"
    expected = f"above 0, and at most {limit:.0%} of the groups without any"
    remedy = "without spread there is no gradient: use prompts of another difficulty, or a larger eta"
    return check(f"spread of {reward}", holds, measured, expected, "pre-flight, docs/method.md", remedy)


def _finite_check(lines: Sequence[Mapping[str, Any]]) -> Check:
    def is_finite(value: Any) -> bool:
        return isinstance(value, int | float) and math.isfinite(value)

    wrong = [line["step"] for line in lines if not all(is_finite(line.get(k)) for k in ("loss", "grad_norm"))]
    norms = [line["grad_norm"] for line in lines if is_finite(line.get("grad_norm"))]
    measured = f"not finite in iterations {', '.join(map(str, wrong))}" if wrong else "no iteration"
    if norms and not wrong:
        measured = f"gradient norm {min(norms):.3g} to {max(norms):.3g}"
    holds = bool(lines) and not wrong
    return check("finite gradients", holds, measured, "loss and gradient norm finite", "g2rpo train")


# -------------------------------------------------------------------------------------------- 4. curve


def curve(plan: Plan) -> Stage:
    """Trains on, and compares the reward with the base on the same prompts and seeds."""
    criteria, settings = plan.criteria.curve, plan.settings
    last = min(criteria.iterations, settings.iterations)
    _train_to(plan, last)
    barrier()
    prompts = _curve_prompts(plan)
    groupwise = groupwise_names(settings.rewards)
    rewards = [name for name in settings.rewards if name not in groupwise]
    evaluation = plan.criteria.evaluation
    request = request_of(
        settings,
        prompts,
        [criteria.steps],
        shift=settings.option("shift"),
        num_images=criteria.num_images,
        seed=evaluation.seed,
        batch=evaluation.batch,
    )
    checkpoint = plan.run / "checkpoints" / step_name(last)
    models = {BASE: settings.weights or settings.model, TRAINED: str(checkpoint)}
    options = option_words(settings, rewards, plan.options)
    scores = evaluated(plan.out / CURVE, models, request, rewards, options)
    reason = "a groupwise reward scores the images of one group of the training"
    checks = [not_applicable(name, "a gain", criteria.source, reason) for name in groupwise]
    checks += [
        rise_check(
            f"{name} after {last} iterations",
            scores.gain(criteria.steps, name),
            criteria.standard_errors,
            criteria.source,
            must_rise=name in criteria.rises,
        )
        for name in rewards
    ]
    gains = {name: scores.gain(criteria.steps, name) for name in rewards}
    facts = {
        "iterations": last,
        "prompts": len(prompts),
        "num_images": criteria.num_images,
        "gains": {name: [gain.mean, gain.standard_error] for name, gain in gains.items()},
        "rewards": {name: _series(plan.run, f"reward/{name}", last) for name in rewards},
    }
    return Stage("curve", tuple(checks), facts)


def _curve_prompts(plan: Plan) -> list[Prompt]:
    criteria = plan.criteria.curve
    if criteria.prompts == TRAINING:
        trained = {prompt.text: prompt for prompt in RunPrompts.of(plan.settings).trained}
        return list(trained.values())[: criteria.num_prompts]
    source = plan.prompts if criteria.prompts == plan.criteria.evaluation.prompts else criteria.prompts
    return list(read_prompts(source)[0][: min(criteria.num_prompts, plan.limit or criteria.num_prompts)])


BLOCKS = 10


def _series(run: Path, name: str, last: int) -> list[list[float]]:
    """Means of a metric over up to ten equal parts of the iterations: [last iteration of the part, mean]."""
    lines = [line for line in _iterations(run) if line["step"] <= last and line.get(name) is not None]
    size = max(1, math.ceil(len(lines) / BLOCKS))
    parts = [lines[low : low + size] for low in range(0, len(lines), size)]
    return [[part[-1]["step"], sum(line[name] for line in part) / len(part)] for part in parts]


# --------------------------------------------------------------------------------------- 5. evaluation


def evaluation(plan: Plan) -> Stage:
    """Trains to the end, writes the report of the run, and evaluates the tables."""
    _train_to(plan, plan.settings.iterations)
    if rank() == 0:
        write_report(plan.run)
    barrier()
    scores = _tables(plan, trained=True)
    first = plan.criteria.evaluation.steps[0]
    rows = [
        row
        for row in plan.criteria.row
        if row.model is not None and not (row.model == BASE and row.steps == first)  # stage 2 has checked it
    ]
    steps = plan.criteria.evaluation.steps
    checks = [_scored_check(plan, scores, [BASE, TRAINED], steps)]
    checks += [one for row in rows for one in _row_checks(plan, scores, row)]
    checks += [one for gain in plan.criteria.gain for one in _gain_checks(plan, scores, gain)]
    for name in plan.settings.rewards:
        if name in plan.rewards:
            gain = scores.gain(first, name)
            source = "rule of the criteria"
            must_rise = name in plan.criteria.evaluation.rises
            title = f"{name} after {plan.settings.iterations} iterations, benchmark prompts"
            errors = plan.criteria.curve.standard_errors
            checks.append(rise_check(title, gain, errors, source, must_rise=must_rise))
    facts = {
        "means": _means(plan, scores, [BASE, TRAINED], steps),
        "gains": _gains(plan, scores, steps),
        "iterations": plan.settings.iterations,
        "rewards": {
            name: _series(plan.run, f"reward/{name}", plan.settings.iterations)
            for name in plan.settings.rewards
        },
    }
    return Stage("evaluation", tuple(checks), facts)


def _gains(plan: Plan, scores: Scores, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Paired gains of the trained model as JSON values."""
    found = []
    for n in steps:
        for name in plan.rewards:
            gain = scores.gain(n, name)
            entry = {"steps": n, "reward": name, "gain": gain.mean, "low": gain.low, "high": gain.high}
            found.append(entry | {"standard_error": gain.standard_error, "pairs": gain.prompts})
    return found


STAGES: dict[str, tuple[str, Callable[[Plan], Stage]]] = {
    "machine": ("machine, files and plan", machine),
    "base": ("base model", base),
    "start": ("first iterations", start),
    "curve": ("reward curve", curve),
    "evaluation": ("training and tables", evaluation),
}
"""Name -> title and function, in their order."""

BLOCKING = ("machine", "base", "start")
"""Stages before the long training: a failed check in them ends the command."""
