"""Errors that end a run before its last iteration; they say why, what is saved, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from g2rpo.config.settings import Settings
from g2rpo.objectives.stats import invalid_share, why_invalid
from g2rpo.rollouts.score import Rollout
from g2rpo.run.folder import latest_checkpoint
from g2rpo.run.run import RunStopped


def not_finite(out: Path, iteration: int, error: Exception) -> RunStopped:
    """The error of a run with a loss or gradient that contains NaN or infinity."""
    checkpoint = latest_checkpoint(out)
    return RunStopped(
        f"iteration {iteration}: {error}. "
        f"{f'The newest checkpoint is {checkpoint}' if checkpoint else 'There is no checkpoint yet'}; the "
        "same command would end here again: start a new run (out=FOLDER) with a lower lr, examine the "
        "rewards of that iteration, or skip such steps with on_nonfinite=skip and a large enough max_skips"
    )


def reward_exited(out: Path, step: int, error: Exception) -> RunStopped:
    """The error of a run whose reward called exit, after its `step` iterations were saved."""
    return RunStopped(
        f"after iteration {step}: {error}. A checkpoint of iteration {step} is in {out}; correct the reward, "
        "and the same command resumes the run"
    )


def invalid_text(settings: Settings, rollouts: Sequence[Rollout], errors: Mapping[str, str]) -> str:
    """Says that too many samples of an iteration are invalid, and why."""
    return (
        f"{invalid_share(rollouts):.0%} of the samples have no reward "
        f"(max_invalid_fraction={settings.max_invalid_fraction}): "
        f"{why_invalid(rollouts, list(settings.rewards), errors)}"
    )


def too_many_invalid(
    settings: Settings, step: int, rollouts: Sequence[Rollout], errors: Mapping[str, str]
) -> RunStopped:
    """The error of a run with too many invalid samples, after its `step` iterations were saved."""
    return RunStopped(
        f"iteration {step + 1}: {invalid_text(settings, rollouts, errors)}. A checkpoint of iteration "
        f"{step} is in {Path(settings.out).expanduser()}"
    )
