"""What the rewards of a run need: memory, time and group judgements, from the specs in their own files.

A reward whose parameters or seconds are unknown is not counted, and a note says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from g2rpo.config.settings import Settings
from g2rpo.rewards.model_reward import scoring_dtype
from g2rpo.rewards.registry import RewardFacts, option_names, reward_facts


def reward_bytes(settings: Settings, offload: str = "none") -> int:
    """Bytes of the reward models with this `offload` option; those of unknown size are not counted.

    Args:
        offload: "none" = models that stay on the device, "cpu" = models that are on it only while they score.
    """
    total = 0
    for name in _names(settings):
        spec, options = reward_facts(name).spec, settings.reward_options.get(name, {})
        if spec is not None and spec.num_params and options.get("offload", "none") == offload:
            dtype = scoring_dtype(options.get("dtype", spec.dtype), settings.device)
            total += spec.num_params * dtype.itemsize
    return total


def offloaded_options(settings: Settings) -> dict[str, dict[str, Any]]:
    """The reward_options in which every reward that can wait in main memory does; {} if that changes none."""
    options = settings.reward_options
    waiting = {
        name: {**options.get(name, {}), "offload": "cpu"}
        for name in _names(settings)
        if _can_be_offloaded(reward_facts(name))
    }
    return {**options, **waiting} if any(options.get(name) != own for name, own in waiting.items()) else {}


def tabulated_reward_seconds(settings: Settings) -> tuple[float, float, tuple[str, ...]]:
    """Measured times of the trained rewards, from their specs.

    Returns:
        Seconds per image of the pointwise rewards, seconds per cell of the groupwise ones, and the names of
        rewards whose time is unknown and not counted.
    """
    per_image = per_cell = 0.0
    unknown = []
    for name in settings.rewards:
        facts = reward_facts(name)
        if facts.spec is None or facts.spec.seconds is None:
            unknown.append(name)
            continue
        seconds = facts.spec.seconds
        if facts.groupwise:
            per_cell += seconds.per_call + settings.group_size * seconds.per_image
        else:
            per_image += seconds.per_call / settings.decode_batch + seconds.per_image
    return per_image, per_cell, tuple(unknown)


def group_comparisons(settings: Settings, cells: float) -> dict[str, float]:
    """Comparisons per iteration, over all processes, by each groupwise reward that is trained on.

    They are `comparisons(n)` of the reward for each cell of n images, or n if the reward does not say.

    Args:
        cells: number of cells per iteration.
    """
    counts, size = {}, settings.group_size
    for name in settings.rewards:
        facts = reward_facts(name)
        if facts.groupwise:
            says = hasattr(facts.target, "comparisons") and not _needs_instance(facts.target)
            counts[name] = cells * (facts.target.comparisons(size) if says else size)
    return counts


def uncounted_notes(settings: Settings, untimed: Collection[str]) -> tuple[str, ...]:
    """Notes on what the plan does not count of each reward, and why.

    Args:
        untimed: rewards whose time is missing in the times that the plan shows.
    """
    notes = []
    for name in _names(settings):
        facts = reward_facts(name)
        missing = {"memory": "num_params"} if facts.spec is None or facts.spec.num_params is None else {}
        missing |= {"time": "seconds"} if name in untimed else {}
        if missing:
            reason = facts.reason or f"its spec does not give {' and '.join(missing.values())}"
            verb = "are" if len(missing) > 1 else "is"
            notes.append(f"reward {name}: its {' and '.join(missing)} {verb} not counted, because {reason}")
        if facts.groupwise and _needs_instance(facts.target):
            notes.append(
                f"reward {name}: each image of a cell counts as one comparison, because `comparisons` needs "
                "an object of the class; make it a static method"
            )
    return tuple(notes)


def _names(settings: Settings) -> list[str]:
    return list(dict.fromkeys([*settings.rewards, *settings.eval_rewards]))


def _can_be_offloaded(facts: RewardFacts) -> bool:
    if facts.spec is None or not facts.spec.num_params or not callable(facts.target):
        return False
    return "offload" in (option_names(facts.target) or ())


def _needs_instance(target: Any) -> bool:
    """Whether `comparisons` is a method of a class's objects, which `plan` does not create."""
    method = inspect.getattr_static(target, "comparisons", None) if isinstance(target, type) else None
    return method is not None and not isinstance(method, staticmethod | classmethod)
