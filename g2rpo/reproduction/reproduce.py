"""The work of `g2rpo reproduce`: the stages in their order, each recorded when it is done.

    OUT/reproduction.md, .json   the report, written after each stage
    OUT/stages/NAME.json         checks and measurements of a stage
    OUT/run, evaluation, curve   the run, and the evaluations of the tables and of the reward curve
    OUT/begun.json, criteria.toml

A stage that is done is read from its record. Within a stage, training and evaluation resume by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from g2rpo.config.settings import Settings
from g2rpo.data.prompts import read_prompts
from g2rpo.evaluation.score_folder import parsed_options
from g2rpo.reproduction.criteria import criteria_text, parse_criteria
from g2rpo.reproduction.page import MARKDOWN, record_of, write_reports
from g2rpo.reproduction.records import Stage, check_same, identity_of, read_stage, write_begun, write_stage
from g2rpo.reproduction.stages import BLOCKING, RUN, STAGES, Plan
from g2rpo.run.lock import exclusive
from g2rpo.runtime.files import write_atomic
from g2rpo.runtime.processes import (
    barrier,
    gathered,
    is_first_process,
    one_group,
    rank,
    resolve_device,
)
from g2rpo.runtime.progress import note


@dataclass(frozen=True)
class Reproduction:
    """Result of `reproduce`.

    Attributes:
        out: the folder of the reproduction.
        stages: the stages that are done, in order.
        complete: all stages are done.
    """

    out: Path
    stages: tuple[Stage, ...]
    complete: bool

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not any(stage.failed for stage in self.stages)


def reproduce(
    recipe: str,
    settings: Settings,
    *,
    criteria: Path | None = None,
    benchmark: str | None = None,
    limit: int | None = None,
    options: Sequence[str] = (),
    continue_after_failure: bool = False,
    command: str = "g2rpo reproduce",
) -> Reproduction:
    """Runs a recipe with acceptance checks on the way, or continues where an earlier call stopped.

    Under torchrun, all processes call this; the first one writes the report.

    Args:
        recipe: name of a shipped recipe, whose criteria are used; or a path.
        settings: settings of the recipe with overrides. `out` is the folder of the reproduction, in which the
            run is the folder `run`.
        criteria: a criteria file in place of the recipe's own.
        benchmark: source of the benchmark prompts, in place of the criteria's.
        limit: number of benchmark prompts; None: as many as the criteria say.
        options: of rewards, NAME.KEY=VALUE.
        continue_after_failure: go on after a failed check before the long training.
        command: the command, for the report.

    Returns:
        The stages that are done. `complete` is false after a failed check before the long training.

    Raises:
        ValueError: settings, criteria or files that do not fit, or OUT holds another reproduction.
        KeyboardInterrupt: a signal stopped it; the same call continues.
        RunStopped: as `train`, after the first iterations.
    """
    text, name = criteria_text(recipe, criteria)
    expected = parse_criteria(text, name)
    _check_settings(settings)
    out = Path(settings.out).expanduser().absolute()
    if options:
        parsed_options(list(dict.fromkeys([*expected.evaluation.rewards, *settings.rewards])), options)
    plan = Plan(
        recipe,
        out,
        settings.model_copy(update={"out": str(out / RUN)}),
        expected,
        benchmark or expected.evaluation.prompts,
        limit,
        tuple(options),
        {},
    )
    if benchmark is not None:
        read_prompts(benchmark)  # a ValueError if there is none
    more = {"recipe": recipe, "benchmark": plan.prompts, "limit": plan.num_prompts, "options": list(options)}
    identity = identity_of(settings, expected, more)
    begun = check_same(out, identity)
    if is_first_process():
        out.mkdir(parents=True, exist_ok=True)
    with exclusive(out), one_group(resolve_device(settings.device)):
        barrier()  # all have seen the folder as it was
        if rank() == 0:
            if not begun:
                write_begun(out, identity)
            write_atomic(out / "criteria.toml", text)
        barrier()
        return _stages(plan, continue_after_failure, command)


def _check_settings(settings: Settings) -> None:
    """Refuses settings that the stages set themselves."""
    if settings.stop_after is not None:
        raise ValueError(
            f"stop_after={settings.stop_after}: reproduce itself stops the training; remove stop_after"
        )
    if settings.resume != "auto":
        raise ValueError(f"resume={settings.resume!r}: reproduce resumes by itself; remove resume")


def _stages(plan: Plan, continue_after_failure: bool, command: str) -> Reproduction:
    done: list[Stage] = []
    for number, (name, (title, work)) in enumerate(STAGES.items(), 1):
        place = f"Stage {number} of {len(STAGES)}, {title}"
        plan = replace(plan, before={stage.name: stage for stage in done})
        recorded = gathered(read_stage(plan.out, name) if rank() == 0 else None)[0]
        if recorded is not None and not (name in BLOCKING and recorded.failed):
            note(f"{place}: done {recorded.time}")
            stage = recorded
        else:
            note(place)
            _report(plan, done, f"In progress: stage {number} of {len(STAGES)}, {title}.", command)
            began = time.monotonic()
            stage = work(plan)
            stage = replace(
                stage, time=time.strftime("%Y-%m-%d %H:%M:%S%z"), seconds=time.monotonic() - began
            )
            for check in stage.checks:
                note(f"  {check}")
            write_stage(plan.out, stage)
        done.append(stage)
        if name in BLOCKING and stage.failed and not continue_after_failure:
            state = f"Stopped after stage {number} of {len(STAGES)}, {title}: a check failed."
            _report(plan, done, state, command)
            note(
                f"{len(stage.failed)} checks failed before the long training, see {plan.out / MARKDOWN}. "
                "Correct their causes and run the same command again, or add --continue-after-failure"
            )
            return Reproduction(plan.out, tuple(done), False)
        next_stage = f"Stage {number} of {len(STAGES)} is done; the same command continues."
        _report(plan, done, "Complete." if number == len(STAGES) else next_stage, command)
    return Reproduction(plan.out, tuple(done), True)


def _report(plan: Plan, done: Sequence[Stage], state: str, command: str) -> None:
    """Writes the report, in the first process alone."""
    plan = replace(plan, before={stage.name: stage for stage in done})
    if rank() == 0:
        write_reports(plan.out, record_of(plan, done, state, command))
    barrier()
