"""Which settings two runs, or two evaluations, must share to be comparable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from g2rpo.config.settings import Settings
from g2rpo.runtime.secrets import without_secrets

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
"""Reward options that determine how a reward is reached or run, not its scores."""

EVALUATION_KEYS = ("eval_prompts", "num_eval_prompts", "eval_num_steps")
"""Settings on which an evaluation's numbers depend, besides the run and its rewards."""

MAY_CHANGE = (
    "iterations",
    "stop_after",
    "resume",
    "out",
    "device",
    "loggers",
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
    "on_warning",
    "compare_images",
    "cache",
    "max_invalid_fraction",
    "on_nonfinite",
    "max_skips",
    "compile_blocks",
    "shard_size",
)
"""Settings that may differ when a run is resumed: its length, its location and how it is evaluated."""


def identity(settings: Settings) -> dict[str, Any]:
    """Settings that must be equal for a run to be resumed, by name; without those in MAY_CHANGE."""
    values = settings.resolved().model_dump()
    values |= values.pop("algorithm_options", {})  # of a user's class; a shipped one's are flat already
    kept = {key: value for key, value in values.items() if key not in MAY_CHANGE}
    kept["reward_options"] = reward_identities(settings, settings.rewards)
    return kept


def evaluation_identity(settings: Settings) -> dict[str, Any]:
    """Settings that must be equal for two runs' evaluations to be comparable; {} without evaluations."""
    if not settings.eval_every or not settings.eval_prompts:
        return {}
    kept: dict[str, Any] = {key: getattr(settings, key) for key in EVALUATION_KEYS}
    return kept | {"reward_options": reward_identities(settings, settings.eval_rewards)}


def reward_identities(settings: Settings, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Options that determine the scores of the named rewards: reward name -> options."""
    options = settings.reward_options
    return {name: reward_identity(options[name]) for name in options if name in names}


def reward_identity(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one reward that determine its scores; without secrets and those in REWARD_MAY_CHANGE."""
    stored = without_secrets(options)
    return {key: value for key, value in stored.items() if key not in REWARD_MAY_CHANGE}


def check_same_run(saved: Settings, given: Settings) -> None:
    """Checks that a run with the settings `saved` may be resumed with `given`.

    Raises:
        ValueError: settings differ that may not; the message lists every difference.
    """
    before, now = identity(saved), identity(given)
    differences = [
        f"  {key}: {before.get(key)!r} stored, {now.get(key)!r} given"
        for key in before | now
        if before.get(key) != now.get(key)
    ]
    if differences:
        raise ValueError(
            f"{given.out} contains a run with other settings and cannot be resumed with these:\n"
            + "\n".join(differences)
            + "\nGive the same settings, or another out=FOLDER."
        )
