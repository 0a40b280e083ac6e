"""Loading of rewards, `(images, prompts, metadata) -> scores`, by name or as `module:attribute`.

A score has the units of its paper's tables. NaN means "no score": the sample is left out, never counted as 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from g2rpo.rewards.base import Options
from g2rpo.rewards.checked import CheckedReward
from g2rpo.rewards.exits import exits_reported
from g2rpo.rewards.isolation import restored_state
from g2rpo.runtime.imports import import_attribute
from g2rpo.runtime.text import did_you_mean

REWARDS: dict[str, str] = {
    "verifier": "g2rpo.rewards.verifier:load",
    "verifier_strict": "g2rpo.rewards.verifier:load_strict",
    "tiny_clip": "g2rpo.rewards.tiny_clip:load",
    "tiny_preference": "g2rpo.rewards.tiny_preference:load",
    "colourfulness": "g2rpo.rewards.colourfulness:load",
    "ocr": "g2rpo.rewards.ocr:load",
    "geneval": "g2rpo.rewards.geneval:load",
    "geneval_strict": "g2rpo.rewards.geneval:load_strict",
    "unified": "g2rpo.rewards.remote.unified:load",
    "http": "g2rpo.rewards.remote.http:load",
    "hps": "g2rpo.rewards.clip.hps:load",
    "clip": "g2rpo.rewards.clip.clip:load",
    "pickscore": "g2rpo.rewards.clip.pickscore:load",
    "imagereward": "g2rpo.rewards.clip.imagereward:load",
}
"""Name -> `module:factory`; a factory takes a torch.device and keyword options, and returns a Reward."""


def load_reward(name: str, device: torch.device, options: Options | None = None) -> CheckedReward:
    """Loads the reward called `name`, or the one at `module:attribute`.

    A custom class is constructed with `device` and the options; any other callable is the reward itself.

    Args:
        name: a key of REWARDS, or `module:attribute`.
        device: where the reward computes.
        options: keyword arguments of the reward's factory or of the custom class, after the device.

    Raises:
        ValueError: an unknown name, nothing usable at `module:attribute`, an unknown option, or code that
            ends the program (RewardExited).
    """
    with exits_reported(name, "while being created"), restored_state():
        return _loaded(name, device, dict(options or {}))


def _loaded(name: str, device: torch.device, options: dict[str, Any]) -> CheckedReward:
    if name in REWARDS:
        factory = _attribute(REWARDS[name], name)
        _check_options(name, factory, options)
        return CheckedReward(name, factory(device, **options), options)
    if ":" not in name:
        raise ValueError(
            f"unknown reward {name!r}{did_you_mean(name, REWARDS)}; "
            f"known: {', '.join(REWARDS)}, or module:function for your own"
        )
    target = _attribute(name, name)
    if options and not isinstance(target, type):
        raise ValueError(f"reward {name!r} is a function, which takes no options; use a class for options")
    if isinstance(target, type):
        try:
            signature = inspect.signature(target)
        except ValueError as error:  # a class implemented in C
            raise ValueError(
                f"reward {name!r} cannot be created: {error}; give a function, or a class written in Python"
            ) from error
        _check_options(name, target, options)
        try:
            signature.bind(device, **options)
        except TypeError as error:
            raise ValueError(
                f"reward {name!r} cannot be created: {error}; "
                "its __init__ must take the device, then options as keywords"
            ) from error
    reward: Any = target(device, **options) if isinstance(target, type) else target
    if not callable(reward):
        raise ValueError(f"{name} is a {type(reward).__name__}; a reward must be callable")
    return CheckedReward(name, reward, options)


def load_rewards(
    names: Iterable[str], device: torch.device | str, options: Mapping[str, Options] | None = None
) -> dict[str, CheckedReward]:
    """Loads all named rewards, in the given order.

    Args:
        names: names of rewards, such as the keys of a dictionary of weights.
        device: where the rewards compute.
        options: reward name -> its options; options of other rewards are ignored.

    Raises:
        ValueError: no names, or a reward that cannot be loaded.
    """
    options = options or {}
    rewards = {name: load_reward(name, torch.device(device), options.get(name)) for name in names}
    if not rewards:
        raise ValueError(f"no rewards given; known: {', '.join(REWARDS)}, or module:function for your own")
    return rewards


def _check_options(name: str, factory: Any, options: Options) -> None:
    parameters = list(inspect.signature(factory).parameters.values())[1:]  # after the device
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    for option in options:
        if option not in known:
            allowed = f"its options are {', '.join(known)}" if known else "it has no options"
            raise ValueError(
                f"reward {name!r} has no option {option!r}{did_you_mean(option, known)}; {allowed}"
            )


def _attribute(target: str, reward: str) -> Any:
    with exits_reported(reward, "while its module was imported"):
        return import_attribute(target, "reward", "my_rewards:brightness")
