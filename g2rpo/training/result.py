"""The result of a training run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from g2rpo.config.load import read_settings
from g2rpo.config.settings import Settings
from g2rpo.evaluation.before_after import Change, stored_changes, stored_comparison
from g2rpo.evaluation.monitor import first_evaluation_problem, is_evaluation
from g2rpo.run.checkpoint_index import check_tensors
from g2rpo.run.folder import latest_checkpoint, read_state
from g2rpo.run.metrics import read_metrics
from g2rpo.run.run import checkpoint_to_resume, is_finished
from g2rpo.runtime.progress import RunProgress


@dataclass(frozen=True)
class Run:
    """The result of a training run.

    Attributes:
        out: run folder.
        step: iterations completed.
        finished: whether all iterations are completed.
        interrupted: whether a signal stopped the run.
        changes: comparison of images before and after training, if finished and compare_images > 0.
    """

    out: Path
    step: int
    finished: bool
    interrupted: bool
    changes: list[Change] = field(default_factory=list)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return read_metrics(self.out / "metrics.jsonl")


def run_progress(out: Path, iterations: int, done: int) -> RunProgress:
    """The progress of a run in `out` that begins, or goes on after `done` iterations.

    Args:
        out: run folder; metrics after the iterations done are removed already.
    """
    file = out / "metrics.jsonl"
    grids = sorted((out / "samples").glob("step_*/grid.png"))
    return RunProgress(
        iterations,
        done,
        metrics=read_metrics(file) if done and file.is_file() else (),
        samples=grids[-1] if done and grids else None,
    )


def finished_run(settings: Settings) -> Run | None:
    """The result of the run of these settings if there is nothing left to do; otherwise None.

    Nothing is loaded. A run with a damaged checkpoint, a damaged or missing record, or settings by which it
    would evaluate or compare something else is not finished in this sense: its start makes good for it.

    Raises:
        ValueError: as `checkpoint_to_resume`.
    """
    out = Path(settings.out).expanduser().absolute()
    if not is_finished(settings):
        return None
    checkpoint = checkpoint_to_resume(settings)
    if checkpoint is None or read_state(checkpoint)["iteration"] != settings.iterations:
        return None
    stored, given = (s.resolved().model_dump() for s in (read_settings(out), settings))
    if any(stored.get(name) != value for name, value in given.items() if name in CHANGE_RESULTS):
        return None
    try:
        if not _last_is_evaluated(out, settings):
            return None
        comparison = stored_comparison(out)
        intact = not first_evaluation_problem(out) and (comparison is None or not comparison.problem(out))
        files = ("curve.png", *(("comparison.md", "before_after.png") if comparison is not None else ()))
        check_tensors(checkpoint)
        if not intact or not all((out / name).is_file() for name in files):
            return None
        changes = stored_changes(out)
    except (OSError, ValueError, KeyError, TypeError):  # its start says what is damaged
        return None
    return Run(out, settings.iterations, True, False, changes)


def _last_is_evaluated(out: Path, settings: Settings) -> bool:
    """Whether the evaluation and the sample grid of the last iteration are complete, if they are due."""
    last = settings.iterations
    lines = read_metrics(out / "metrics.jsonl")
    evaluated = any(line["step"] == last and is_evaluation(line) for line in lines)
    due = bool(settings.eval_every and settings.eval_prompts)
    return (evaluated or not due) and (out / "samples" / f"step_{last:06d}" / "grid.png").is_file()


CHANGE_RESULTS = (
    "eval_every",
    "eval_prompts",
    "num_eval_prompts",
    "eval_rewards",
    "eval_num_steps",
    "sample_every",
    "num_sample_prompts",
    "compare_images",
    "keep_best",
    "keep_last",
    "keep_every",
)
"""Settings with which the start of a finished run may find something to do."""


def finished_text(run: Run) -> str:
    """What a user learns who starts a finished run again."""
    return (
        f"{run.out} is finished: all {run.step} iterations are done, and nothing was changed. To continue "
        f"training, give more iterations, such as iterations={2 * run.step}; for a report of the run, use "
        f"g2rpo report {shlex.quote(str(run.out))}"
    )


def interrupted_run(out: Path) -> Run:
    """The result of a run that a signal stopped; its step is that of the newest checkpoint."""
    checkpoint = latest_checkpoint(out)
    return Run(out, read_state(checkpoint)["iteration"] if checkpoint else 0, False, True)
