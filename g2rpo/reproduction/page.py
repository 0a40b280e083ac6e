"""The report of a reproduction: OUT/reproduction.md for readers and OUT/reproduction.json for programs.

Both are written anew after each stage, so that an interrupted reproduction has the report of what is done.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import g2rpo.reproduction
from g2rpo.config.identity import identity
from g2rpo.config.load import load_settings
from g2rpo.config.recipe import shipped_recipes
from g2rpo.config.settings import Settings
from g2rpo.reproduction.checks import Check
from g2rpo.reproduction.criteria import Row
from g2rpo.reproduction.records import Stage, finite
from g2rpo.reproduction.scores import BASE, TRAINED
from g2rpo.reproduction.stages import CURVE, RUN, STAGES, TABLES, Plan
from g2rpo.run.environment import read_starts
from g2rpo.runtime.files import write_atomic
from g2rpo.runtime.records import write_record
from g2rpo.runtime.version import __version__

MARKDOWN, JSON = "reproduction.md", "reproduction.json"

IMAGES = (
    (f"{TABLES}/grid_{{steps}}.png", "The first benchmark prompts: base and trained model, equal seeds"),
    (f"{RUN}/before_after.png", "Before and after training, equal seeds"),
    (f"{RUN}/curve.png", "Rewards during training"),
)
"""File in the folder of a reproduction, and its caption."""


@dataclass(frozen=True)
class Record:
    """The content of the report.

    Attributes:
        title, source, licence: of the criteria.
        state: what is done, in a sentence.
        version, commit: of g2rpo; the commit is "" where it is not known.
        commands: that make this reproduction, and parts of it by themselves.
        stages: that are done, in order.
        rows: the published tables with our means.
        starts: machine and versions of each start of the run.
        deviations: settings that differ from the recipe, and conditions that differ from the criteria.
        open_questions: what the source leaves open.
        images: file, and caption.
        files: further files, and what they hold.
    """

    title: str
    source: str
    licence: str
    state: str
    version: str
    commit: str
    commands: tuple[str, ...]
    stages: tuple[Stage, ...]
    rows: tuple[Mapping[str, Any], ...]
    starts: tuple[Mapping[str, Any], ...]
    deviations: tuple[str, ...]
    open_questions: tuple[str, ...]
    images: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, str], ...]

    @property
    def checks(self) -> list[Check]:
        """The checks of all stages."""
        return [check for stage in self.stages for check in stage.checks]


def record_of(plan: Plan, stages: Sequence[Stage], state: str, command: str) -> Record:
    """Gathers the content of the report from the stages that are done and the files in the folder."""
    files = (
        (f"{RUN}/report.html", "the report of the run: one page with images, curves, health and settings"),
        (f"{TABLES}/scores.csv", "every score of the tables, one row per image"),
        (f"{CURVE}/scores.csv", "every score of the reward curve, one row per image"),
        (f"{RUN}/config.toml", "all settings of the run"),
        (f"{RUN}/metrics.jsonl", "one line per iteration"),
        ("criteria.toml", "the criteria of these checks"),
    )
    first = plan.criteria.evaluation.steps[0]
    images = [(file.format(steps=first), caption) for file, caption in IMAGES]
    return Record(
        title=plan.criteria.title,
        source=plan.criteria.source,
        licence=plan.criteria.licence,
        state=state,
        version=__version__,
        commit=source_commit(),
        commands=(command, *_single_commands(plan)),
        stages=tuple(stages),
        rows=tuple(_row(row, stages) for row in plan.criteria.row),
        starts=tuple(read_starts(plan.run)),
        deviations=tuple(_deviations(plan)),
        open_questions=tuple(plan.criteria.open_questions),
        images=tuple((file, caption) for file, caption in images if (plan.out / file).is_file()),
        files=tuple((file, content) for file, content in files if (plan.out / file).is_file()),
    )


def write_reports(out: Path, record: Record) -> None:
    """Writes OUT/reproduction.md and OUT/reproduction.json."""
    write_atomic(out / MARKDOWN, markdown(record))
    write_record(out / JSON, finite(asdict(record)), indent=1)


def source_commit() -> str:
    """The commit of g2rpo's code, with "+" where files differ from it; "" outside a repository."""
    folder = Path(g2rpo.reproduction.__file__).parents[2]
    if not (folder / ".git").exists():  # installed: pip notes the commit of an installation from a repository
        try:
            text = distribution("g2rpo").read_text("direct_url.json") or ""
        except PackageNotFoundError:
            text = ""
        return text.partition('"commit_id": "')[2].partition('"')[0]
    try:
        described = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return described.stdout.strip()


def _single_commands(plan: Plan) -> Iterator[str]:
    """The commands that do parts of the reproduction by themselves."""
    run, model = shlex.quote(str(plan.shown(plan.run))), shlex.quote(plan.settings.model)
    yield f"g2rpo train {shlex.quote(str(plan.shown(plan.run) / 'config.toml'))}"
    evaluation = plan.criteria.evaluation
    steps = ",".join(map(str, evaluation.steps))
    machine = plan.before.get("machine")
    rewards = ",".join(plan.rewards if machine else evaluation.rewards)
    shift = evaluation.shift if evaluation.shift == "pipeline" else f"{evaluation.shift:g}"
    words = [f"g2rpo evaluate {model} {run} --labels {BASE},{TRAINED} --prompts {shlex.quote(plan.prompts)}"]
    words += [f"--limit {plan.num_prompts} --num-images {evaluation.num_images} --seed {evaluation.seed}"]
    words += [f"--rewards {rewards} --steps {steps} --shift {shift}"]
    conditions = {
        name: evaluation.conditions.get(name, getattr(plan.settings, name))
        for name in ("guidance", "precision", "resolution")
    }
    words += [f"--{name} {_size(value)}" for name, value in conditions.items() if value is not None]
    yield " ".join([*words, "--out tables"])


def _size(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _row(row: Row, stages: Sequence[Stage]) -> dict[str, Any]:
    """A row of a published table, with our means of the same model and number of steps."""
    ours = {
        mean["reward"]: mean
        for stage in stages
        for mean in stage.facts.get("means", ())
        if mean["model"] == row.model and mean["steps"] == row.steps
    }
    return {
        "table": row.table,
        "method": row.method,
        "model": row.model,
        "steps": row.steps,
        "printed": {name: str(value) for name, value in row.values.items()},
        "ours": ours,
    }


def _deviations(plan: Plan) -> Iterator[str]:
    evaluation = plan.criteria.evaluation
    if plan.recipe in shipped_recipes():
        recipe = load_settings(plan.recipe, check_files=False)
        yield from _setting_differences(recipe, plan.settings)
    else:
        yield f"the recipe {plan.recipe} is not a shipped one; {RUN}/config.toml has its settings"
    if plan.prompts != evaluation.prompts:
        yield f"benchmark prompts: {plan.prompts} (criteria: {evaluation.prompts})"
    if plan.num_prompts != evaluation.num_prompts:
        yield f"number of benchmark prompts: {plan.num_prompts} (criteria: {evaluation.num_prompts})"
    if "machine" in plan.before:
        yield from (f"reward {name} was not evaluated: {why}" for name, why in plan.absent.items())


def _setting_differences(recipe: Settings, given: Settings) -> Iterator[str]:
    before, now = ({**identity(s), "iterations": s.iterations} for s in (recipe, given))
    for key in before | now:
        if before.get(key) != now.get(key):
            yield f"{key} = {now.get(key)!r} (recipe: {before.get(key)!r})"


# ------------------------------------------------------------------------------------------- Markdown


def markdown(record: Record) -> str:
    """The report as Markdown."""
    lines = [f"# Reproduction: {record.title}", "", record.state, "", _summary(record.checks)]
    lines += ["", f"Expected values: {record.source}.", f"Licence: {record.licence}"]
    lines += _failures(record.checks)
    lines += _tables(record)
    lines += _gains(record)
    for stage in record.stages:
        lines += ["", f"## Checks: {STAGES[stage.name][0]}", "", *_check_table(stage.checks)]
        lines += [f"\nMeasured {stage.time}, in {stage.seconds:,.0f} s."]
    lines += _curves(record)
    if record.images:
        lines += ["", "## Images"]
        lines += [
            line for file, caption in record.images for line in ("", f"![{caption}]({file})", "", caption)
        ]
    lines += ["", "## Deviations from the recipe", ""]
    lines += [f"- {line}" for line in record.deviations] or ["None."]
    if record.open_questions:
        lines += ["", "## What the source leaves open", "", *(f"- {line}" for line in record.open_questions)]
    lines += _environment(record)
    lines += ["", "## Commands", "", "```bash", *record.commands, "```"]
    if record.files:
        lines += ["", "## Files", "", *(f"- [{file}]({file}): {content}" for file, content in record.files)]
    return "\n".join(lines) + "\n"


def _summary(checks: Sequence[Check]) -> str:
    counts = {s: sum(c.status == s for c in checks) for s in ("PASS", "FAIL", "NOT APPLICABLE")}
    return (
        f"**{counts['PASS']} checks passed, {counts['FAIL']} failed, {counts['NOT APPLICABLE']} were not "
        "applicable.**"
    )


def _failures(checks: Sequence[Check]) -> list[str]:
    failures = [check for check in checks if check.status == "FAIL"]
    if not failures:
        return []
    return ["", "## Failed checks", "", *(f"- {_cell(str(check))}" for check in failures)]


def _cell(text: str) -> str:
    """Text that stays within its cell of a table, or its line."""
    return text.replace("|", "\\|").replace("\n", " ")


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head = ["| " + " | ".join(headers) + " |", "|" + " --- |" * len(headers)]
    return head + ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]


def _check_table(checks: Sequence[Check]) -> list[str]:
    rows = []
    for check in checks:
        status = f"**{check.status}**" if check.status == "FAIL" else check.status
        remark = f" ({check.remark})" if check.remark else ""
        rows.append((check.name, check.measured, check.expected, check.source, status + remark))
    return _table(("check", "measured", "expected", "source", "result"), rows)


def _tables(record: Record) -> list[str]:
    """The published tables with our means beside the printed ones."""
    lines: list[str] = []
    for table, steps in dict.fromkeys((row["table"], row["steps"]) for row in record.rows):
        rows = [row for row in record.rows if (row["table"], row["steps"]) == (table, steps)]
        names = list(dict.fromkeys(name for row in rows for name in row["printed"]))
        cells = []
        for row in rows:
            cells.append([row["method"], *(row["printed"].get(name, "–") for name in names)])
            if row["ours"]:
                ours = (_interval(row["ours"].get(name)) for name in names)
                cells.append([f"**ours** ({row['model']} model)", *ours])
        lines += ["", f"## {table}, {steps} steps", "", *_table(("model", *names), cells)]
    if lines:
        lines += ["", "Our values are means over prompts with their 95 % interval (± 1.96 standard errors)."]
    return lines


def _interval(mean: Mapping[str, Any] | None) -> str:
    if mean is None or mean["mean"] is None:
        return "–"
    error = mean["standard_error"]
    if error is None or error != error:
        return f"{mean['mean']:.4f}"
    low, high = mean["mean"] - 1.96 * error, mean["mean"] + 1.96 * error
    return f"{mean['mean']:.4f} [{low:.4f}, {high:.4f}]"


def _gains(record: Record) -> list[str]:
    gains = [
        gain for stage in record.stages for gain in stage.facts.get("gains", ()) if stage.name != "curve"
    ]
    if not gains:
        return []
    rows = []
    for gain in gains:
        known = all(gain[key] is not None for key in ("gain", "low", "high"))
        text = f"{gain['gain']:+.4f} [{gain['low']:+.4f}, {gain['high']:+.4f}]" if known else "–"
        rows.append((str(gain["steps"]), gain["reward"], text, str(gain["pairs"])))
    headers = ("steps", "reward", "paired gain of the trained model, 95 % bootstrap interval", "pairs")
    return ["", "## Gains over the base model", "", *_table(headers, rows)]


def _curves(record: Record) -> list[str]:
    """Rewards of the training images, from the last stage that has them."""
    found = [stage.facts["rewards"] for stage in record.stages if stage.name in ("curve", "evaluation")]
    series: Mapping[str, Any] = found[-1] if found else {}
    if not any(series.values()):
        return []
    ends = [f"until {end:g}" for end, _ in next(values for values in series.values() if values)]
    rows = [(name, *(f"{value:.4f}" for _, value in values)) for name, values in series.items()]
    note = "Means over the images of the rollouts. The prompts of two parts may differ, so these are noisy."
    return ["", "## Rewards during training, by iteration", "", *_table(("reward", *ends), rows), "", note]


def _environment(record: Record) -> list[str]:
    commit = f", commit {record.commit}" if record.commit else ", commit not known"
    lines = ["", "## Environment", "", f"- g2rpo {record.version}{commit}"]
    starts = record.starts or tuple(
        stage.facts["environment"] for stage in record.stages if "environment" in stage.facts
    )
    shown = []
    for start in starts:
        packages = ", ".join(f"{name} {number}" for name, number in start["packages"].items() if number)
        memory = start.get("device_memory_gb")
        device = f"{start['device']}{f' ({memory:.0f} GB)' if memory else ''}"
        shown.append(
            f"- {start['num_processes']} process(es) on {device}, {start['platform']}, Python "
            f"{start['python']}; {packages}"
        )
    lines += list(dict.fromkeys(shown))
    for stage in record.stages:
        lines += [f"- planned: {line}" for line in stage.facts.get("plan", ())]
    return lines
