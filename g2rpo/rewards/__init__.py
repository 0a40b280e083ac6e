"""Rewards: `(images, prompts, metadata) -> scores`, by name or as `module:attribute`.

A score has the units of its paper's tables. NaN means "no score": the sample is left out, never zero.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from g2rpo.words import did_you_mean

Metadata = list[dict[str, Any]]


class Reward(Protocol):
    """Scores images against their prompts."""

    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        """Args: images [N, 3, H, W] in [0, 1], float32; N prompts; what else is known of each prompt.

        Returns: [N], float32, on any device; NaN marks a sample that could not be judged.
        """
        ...


REWARDS: dict[str, str] = {
    "verifier": "g2rpo.rewards.verifier:load",
    "verifier_strict": "g2rpo.rewards.verifier:load_strict",
    "tiny_clip": "g2rpo.rewards.tiny_clip:load",
    "tiny_preference": "g2rpo.rewards.tiny_preference:load",
    "colourfulness": "g2rpo.rewards.colourfulness:load",
    **dict.fromkeys(("hps", "clip", "pickscore", "imagereward", "unified"), "g2rpo.rewards.coming:load"),
}
"""Name -> `module:factory`; the factory takes a torch.device and returns a Reward."""


@dataclass(frozen=True)
class CheckedReward:
    """A reward whose every answer is checked before it can become an advantage."""

    name: str
    reward: Reward

    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        """As `Reward.__call__`.

        Raises:
            ValueError: inputs of unequal length, or an answer that is not one float32 an image.
        """
        n = len(images)
        if len(prompts) != n or (metadata is not None and len(metadata) != n):
            lengths = f"{len(prompts)} prompts" + ("" if metadata is None else f", {len(metadata)} metadata")
            raise ValueError(f"reward {self.name!r} was given {n} images but {lengths}; they must be equal")
        scores = self.reward(images, prompts, metadata)
        if not isinstance(scores, Tensor):
            raise ValueError(f"reward {self.name!r} returned {type(scores).__name__}, not a torch.Tensor")
        if scores.shape != (n,) or scores.dtype != torch.float32:
            raise ValueError(
                f"reward {self.name!r} returned {scores.dtype} {tuple(scores.shape)} for {n} images; "
                f"it must return float32 ({n},), NaN for a sample without a score"
            )
        return scores.detach()


def load_reward(name: str, device: torch.device) -> CheckedReward:
    """The reward called `name`, or the one at `module:attribute`.

    A custom attribute that is a class is constructed with `device`; any other callable is the reward itself.

    Raises:
        ValueError: an unknown name (with the nearest known one), or nothing usable at `module:attribute`.
    """
    if name in REWARDS:
        return CheckedReward(name, _attribute(REWARDS[name])(device))
    if ":" not in name:
        raise ValueError(
            f"unknown reward {name!r}{did_you_mean(name, REWARDS)}; "
            f"known: {', '.join(REWARDS)}, or module:function for your own"
        )
    target = _attribute(name)
    reward: Any = target(device) if isinstance(target, type) else target
    if not callable(reward):
        raise ValueError(f"{name} is a {type(reward).__name__}; a reward must be callable")
    return CheckedReward(name, reward)


def load_rewards(names: Iterable[str], device: torch.device | str) -> dict[str, CheckedReward]:
    """All named rewards, in the order given (a dict of weights gives its names).

    Raises:
        ValueError: none given, or one that cannot be loaded.
    """
    rewards = {name: load_reward(name, torch.device(device)) for name in names}
    if not rewards:
        raise ValueError(f"no rewards given; known: {', '.join(REWARDS)}, or module:function for your own")
    return rewards


def _attribute(target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute.isidentifier():
        raise ValueError(f"{target!r} is not module:attribute, such as my_rewards:brightness")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that exists but misses one of its own imports is its own error, told as it is.
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise
        raise ValueError(
            f"no module {error.name!r} for reward {target!r}, neither in the current folder nor on PYTHONPATH"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"{module_name} has no {attribute!r}{did_you_mean(attribute, dir(module))}")
    return getattr(module, attribute)
