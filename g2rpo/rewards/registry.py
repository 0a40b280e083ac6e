"""Loading of rewards, `(images, prompts, metadata) -> scores`, by name or as `module:attribute`.

A score has the units of its paper's tables. NaN means "no score": the sample is left out, never counted as 0.
Names are enough to check settings: the module of a reward is imported when its spec is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch

from g2rpo.rewards.base import Media, Options, RewardSpec, is_groupwise, media_of
from g2rpo.rewards.checked import CheckedReward
from g2rpo.rewards.dry_call import check_signature
from g2rpo.rewards.exits import RewardExited, errors_located, exits_reported
from g2rpo.rewards.isolation import restored_state
from g2rpo.runtime.imports import import_attribute
from g2rpo.runtime.processes import resolve_device
from g2rpo.runtime.progress import phase
from g2rpo.runtime.quiet import quiet_packages
from g2rpo.runtime.secrets import missing_secrets, not_stored, remember_secrets
from g2rpo.runtime.text import did_you_mean
from g2rpo.runtime.values import check_numbers, check_texts

REWARDS: dict[str, str] = {
    "verifier": "g2rpo.rewards.verifier:SPEC",
    "verifier_strict": "g2rpo.rewards.verifier:STRICT_SPEC",
    "tiny_clip": "g2rpo.rewards.tiny_clip:SPEC",
    "tiny_preference": "g2rpo.rewards.tiny_preference:SPEC",
    "colourfulness": "g2rpo.rewards.colourfulness:SPEC",
    "ocr": "g2rpo.rewards.ocr:SPEC",
    "geneval": "g2rpo.rewards.geneval:SPEC",
    "geneval_strict": "g2rpo.rewards.geneval:STRICT_SPEC",
    "unified": "g2rpo.rewards.remote.unified:SPEC",
    "http": "g2rpo.rewards.remote.http:SPEC",
    "hps": "g2rpo.rewards.clip.hps:SPEC",
    "clip": "g2rpo.rewards.clip.clip:SPEC",
    "pickscore": "g2rpo.rewards.clip.pickscore:SPEC",
    "imagereward": "g2rpo.rewards.clip.imagereward:SPEC",
}
"""Name -> `module:attribute` of its RewardSpec."""

FOR_VIDEOS = "to score videos with a reward for images, wrap it: PerFrame(reward), see docs/rewards.md"


def load_reward(
    name: str, device: str | torch.device = "auto", options: Options | None = None, *, media: Media = "image"
) -> CheckedReward:
    """Loads the reward called `name`, or the one at `module:attribute`.

    A custom class is constructed with `device` and the options; any other callable is the reward itself.

    Args:
        name: a key of REWARDS, or `module:attribute`.
        device: where the reward computes; "auto" selects a GPU if there is one, else the CPU.
        options: keyword arguments of the reward's factory or of the custom class, after the device.
        media: what the reward will be given.

    Raises:
        ValueError: an unknown name, nothing usable at `module:attribute`, an unknown option, a reward for
            other media, or code that ends the program (RewardExited).
    """
    if missing := next(missing_secrets(options or {}), None):
        raise ValueError(not_stored(name, missing))
    remember_secrets(options or {})
    with exits_reported(name, "while being created"), restored_state(name), quiet_packages():
        return _loaded(name, resolve_device(device), dict(options or {}), media)


def load_rewards(
    names: Iterable[str],
    device: torch.device | str,
    options: Mapping[str, Options] | None = None,
    *,
    media: Media = "image",
    allow_groupwise: bool = True,
) -> dict[str, CheckedReward]:
    """Loads all named rewards, in the given order; first it checks that each of them can be used.

    Args:
        names: names of rewards, such as the keys of a dictionary of weights.
        device: where the rewards compute.
        options: reward name -> its options; options of other rewards are ignored.
        media: what the rewards will be given.
        allow_groupwise: whether there are groups, without which a groupwise reward cannot be used.

    Raises:
        ValueError: no names, or a reward that cannot be loaded or used.
    """
    names, options = list(names), options or {}
    for name in names:
        target = reward_target(name)
        _check_media(name, target, media)
        if name not in REWARDS:
            check_signature(name, target)
        if not allow_groupwise and is_groupwise(target):
            raise ValueError(
                f"reward {name!r} is groupwise: it compares the images of one group of a run's rollout, and "
                "here each image is scored by itself. Use it in `rewards` of `g2rpo train`; to score "
                "images, choose a pointwise reward"
            )
    rewards: dict[str, CheckedReward] = {}
    with phase("loading rewards", len(names), "rewards") as loading:
        for name in names:
            rewards[name] = load_reward(name, torch.device(device), options.get(name), media=media)
            loading.add()
    if not rewards:
        raise ValueError(f"no rewards given; {_known()}")
    return rewards


def reward_target(name: str) -> Any:
    """Returns what makes the reward: a registered reward's factory, or the custom class, function or object.

    Only the reward's module is imported; nothing is created.

    Raises:
        ValueError: an unknown name, nothing at `module:attribute`, or code that ends the program
            (RewardExited).
    """
    if name in REWARDS:
        factory = _registered_spec(name).factory
        assert factory is not None, f"the spec of {name} has no factory"
        return factory
    if ":" not in name:
        raise ValueError(f"unknown reward {name!r}{did_you_mean(name, REWARDS)}; {_known()}")
    with restored_state(name):
        return _attribute(name, name)


def reward_spec(name: str) -> RewardSpec | None:
    """Returns the spec of a reward; None for a custom reward that has none.

    Raises:
        ValueError: as `reward_target`, or the attribute `spec` of a custom reward is not a RewardSpec.
    """
    if name in REWARDS:
        return _registered_spec(name)
    spec = getattr(reward_target(name), "spec", None)
    if spec is not None and not isinstance(spec, RewardSpec):
        raise ValueError(f"reward {name!r}: its attribute spec is a {type(spec).__name__}, not a RewardSpec")
    return spec


@dataclass(frozen=True)
class RewardFacts:
    """What is known of a reward without creating it.

    Attributes:
        target: see `reward_target`; None if a custom reward cannot be imported here.
        spec: see `reward_spec`; None if there is none, or `target` is None.
        reason: why `spec` is None, else "".
    """

    target: Any
    spec: RewardSpec | None
    reason: str

    @property
    def groupwise(self) -> bool:
        """Whether the reward is known to be groupwise."""
        return is_groupwise(self.target)


def reward_facts(name: str) -> RewardFacts:
    """Looks a reward up for commands that also work where a custom reward cannot be imported.

    Raises:
        ValueError: an unknown name, a custom `spec` that is not a RewardSpec, or code that ends the program
            (RewardExited).
    """
    try:
        target = reward_target(name)
    except RewardExited:
        raise
    except (ImportError, ValueError) as error:
        if ":" not in name:
            raise
        return RewardFacts(None, None, f"it cannot be imported here ({error})")
    spec = reward_spec(name)
    return RewardFacts(target, spec, "" if spec is not None else "it has no spec (docs/rewards.md)")


def groupwise_names(names: Iterable[str]) -> list[str]:
    """Returns those names that are groupwise rewards; imports their modules, creates nothing."""
    return [name for name in names if is_groupwise(reward_target(name))]


def option_names(factory: Any) -> list[str] | None:
    """Returns the names of the options of a factory, after its device; None if it takes any."""
    parameters = list(inspect.signature(factory).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def _known() -> str:
    return f"known: {', '.join(REWARDS)}, or module:function for your own"


def _registered_spec(name: str) -> RewardSpec:
    spec = _attribute(REWARDS[name], name)
    assert isinstance(spec, RewardSpec), f"{REWARDS[name]} is not a RewardSpec"
    return spec


def _loaded(name: str, device: torch.device, options: dict[str, Any], media: Media) -> CheckedReward:
    target = reward_target(name)
    _check_media(name, target, media)
    if name in REWARDS:
        _check_options(name, target, options)
        reward = target(device, **options)
    elif isinstance(target, type):
        reward = _constructed(name, target, device, options)
    elif options:
        raise ValueError(f"reward {name!r} is a function, which takes no options; use a class for options")
    else:
        reward = target
    if not callable(reward):
        raise ValueError(f"{name} is a {type(reward).__name__}; a reward must be callable")
    _check_media(name, reward, media)
    if is_groupwise(reward) != is_groupwise(target):
        raise ValueError(
            f"reward {name!r}: `groupwise` must be an attribute of {getattr(target, '__name__', target)}, "
            "known before the reward is created; write groupwise = True in the class body"
        )
    return CheckedReward(name, reward, options)


def _constructed(name: str, target: type, device: torch.device, options: dict[str, Any]) -> Any:
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
    with errors_located(name, "while being created"):
        return target(device, **options)


def _check_media(name: str, reward: Any, media: Media) -> None:
    try:
        scored = media_of(reward)
    except ValueError as error:
        raise ValueError(f"reward {name!r}: {error}") from error
    if scored != media:
        advice = FOR_VIDEOS if media == "video" else "choose a reward for images"
        raise ValueError(f"reward {name!r} scores {scored}s, but would get {media}s; {advice}")


def check_reward_options(name: str, options: Options) -> None:
    """Checks names and types of a reward's options, as loading it does, without loading it.

    Raises:
        ValueError: as `reward_target`, or an unknown option, or one of another type.
    """
    target = reward_target(name)
    if name in REWARDS or isinstance(target, type):
        _check_options(name, target, options)


def _check_options(name: str, factory: Any, options: Options) -> None:
    known = option_names(factory)
    if known is None:
        return
    for option in options:
        if option not in known:
            allowed = f"its options are {', '.join(known)}" if known else "it has no options"
            raise ValueError(
                f"reward {name!r} has no option {option!r}{did_you_mean(option, known)}; {allowed}"
            )
    try:
        # A class is created by its __init__, whose annotations are the options'.
        annotations = get_type_hints(
            vars(factory).get("__init__", factory) if isinstance(factory, type) else factory
        )
    except (AttributeError, NameError, TypeError):  # unresolved annotations of a user's code
        return
    for option, value in options.items():
        try:
            check_numbers(annotations.get(option, Any), value)
            check_texts(annotations.get(option, Any), value)
        except ValueError as error:
            raise ValueError(f"reward {name!r}: option {option} = {value!r}: {error}") from error


def _attribute(target: str, reward: str) -> Any:
    phase = "while its module was imported"
    with exits_reported(reward, phase), errors_located(reward, phase):
        return import_attribute(target, "reward", "my_rewards:brightness")
