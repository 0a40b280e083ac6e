"""What makes two settings the same run, or the same evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from g2rpo.config.settings import Settings

# Options of a reward by which it is reached, not what it says.
REWARD_MAY_CHANGE = (
    "servers",
    "urls",
    "headers",
    "timeout",
    "concurrency",
    "retries",
    "backoff",
    "api_key_env",
    "check",
    "batch",
    "offload",
)


# What an evaluation's numbers depend on besides the run and its rewards.
EVALUATION = ("eval_prompts", "num_eval_prompts", "eval_num_steps")


# These may differ when a run goes on: they change how long, where and how it is watched, not what it is.
MAY_CHANGE = (
    "iterations",
    "stop_after",
    "resume",
    "out",
    "device",
    "tensorboard",
    "checkpoint_every",
    "keep_last",
    "keep_every",
    "keep_best",
    "eval_every",
    "eval_prompts",
    "num_eval_prompts",
    "eval_rewards",
    "eval_num_steps",
    "sample_every",
    "num_sample_prompts",
    "compare_images",
    "cache",
    "max_invalid_fraction",
    "compile_blocks",
    "shard_size",
)


def identity(settings: Settings) -> dict[str, Any]:
    """What two runs must share to be parts of one run."""
    values = settings.resolved().model_dump()
    kept = {key: value for key, value in values.items() if key not in MAY_CHANGE}
    kept["reward_options"] = judge_options(settings, settings.rewards)
    return kept


def evaluation_identity(settings: Settings) -> dict[str, Any]:
    """What two runs must share for their evaluations to be of one kind; {} without evaluations."""
    if not settings.eval_every or not settings.eval_prompts:
        return {}
    kept: dict[str, Any] = {key: getattr(settings, key) for key in EVALUATION}
    return kept | {"reward_options": judge_options(settings, settings.eval_rewards)}


def judge_options(settings: Settings, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Of these rewards the options that decide what they say."""
    return {name: deciding(options) for name, options in settings.reward_options.items() if name in names}


def deciding(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of a reward's options those that decide what it says."""
    return {key: value for key, value in options.items() if key not in REWARD_MAY_CHANGE}


def check_same_run(saved: Settings, given: Settings) -> None:
    """Raises ValueError, naming every difference, unless `given` may go on where `saved` stopped."""
    before, now = identity(saved), identity(given)
    differences = [
        f"  {key}: {before[key]!r} there, {now[key]!r} given" for key in now if before[key] != now[key]
    ]
    if differences:
        raise ValueError(
            f"{given.out} holds a run with other settings, which cannot go on with these:\n"
            + "\n".join(differences)
            + "\nGive the same settings, or another out=FOLDER."
        )
