"""Algorithms by name, and the validation of their options.

A name is a key of PRESETS, or `module:attribute` for a class of the user. Such a class is imported only where
it is used: to train, resume, compare or plan. A run of it can be sampled and exported without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from g2rpo.algorithms.base import Algorithm
from g2rpo.algorithms.dance_grpo import DanceGRPO
from g2rpo.algorithms.flow_grpo import FlowGRPO
from g2rpo.algorithms.g2rpo import G2RPO, G2RPOSingle
from g2rpo.algorithms.mix_grpo import MixGRPO
from g2rpo.algorithms.nft import DiffusionNFT
from g2rpo.algorithms.options import defaults_of, plain_options
from g2rpo.runtime.imports import import_attribute
from g2rpo.runtime.text import did_you_mean

PRESETS: dict[str, type[Algorithm]] = {
    "g2rpo": G2RPO,
    "g2rpo_single": G2RPOSingle,
    "flow_grpo": FlowGRPO,
    "dance_grpo": DanceGRPO,
    "mix_grpo": MixGRPO,
    "nft": DiffusionNFT,
}
"""Name -> class of a method; its fields are the method's options."""

PRESET_OPTIONS: tuple[str, ...] = tuple(
    dict.fromkeys(name for preset in PRESETS.values() for name in defaults_of(preset))
)
"""Options of any of PRESETS; a recipe sets them as flat keys."""


class OptionError(ValueError):
    """Options that an algorithm refuses.

    Attributes:
        problems: pairs of an option, "" for several together, and what is wrong with it.
    """

    def __init__(self, algorithm: str, options: Mapping[str, Any], problems: list[tuple[str, str]]) -> None:
        texts = (f"{name} = {options[name]!r}: {text}" if name else text for name, text in problems)
        super().__init__("\n".join(f"algorithm={algorithm!r}: {text}" for text in texts))
        self.problems = problems


def is_custom(algorithm: str) -> bool:
    """Whether the name is `module:attribute`, which names a class of the user."""
    return ":" in algorithm


def algorithm_class(algorithm: str) -> type[Algorithm]:
    """Returns the class of a method; imports that of a user.

    Raises:
        ValueError: the name is unknown, or there is no class of options at `module:attribute`.
    """
    if algorithm in PRESETS:
        return PRESETS[algorithm]
    if not is_custom(algorithm):
        raise ValueError(
            f"unknown algorithm {algorithm!r}{did_you_mean(algorithm, PRESETS)}; "
            f"use one of {', '.join(PRESETS)}, or module:attribute for your own"
        )
    cls = import_attribute(algorithm, "algorithm", "my_algorithms:Mine")
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise ValueError(f"algorithm={algorithm!r} must be a subclass of g2rpo's Algorithm, not {cls!r}")
    if "__pydantic_fields__" not in vars(cls):
        raise ValueError(f"algorithm={algorithm!r}: write @options above the class, so that its fields count")
    return cls


def algorithm_defaults(algorithm: str) -> dict[str, Any]:
    """Returns the algorithm's options with their defaults.

    Raises:
        ValueError: as `algorithm_class`.
    """
    return defaults_of(algorithm_class(algorithm))


def algorithms_with(option: str) -> list[str]:
    """Returns the shipped algorithms that have an option."""
    return [name for name, preset in PRESETS.items() if option in defaults_of(preset)]


def make_algorithm(algorithm: str, options: Mapping[str, Any], similar: Iterable[str] = ()) -> Algorithm:
    """Returns the algorithm with the given options set.

    Args:
        similar: further names that the message about an unknown option of a user's algorithm may suggest.

    Raises:
        ValueError: as `algorithm_class`.
        OptionError: an option is unknown, or a value is not allowed.
    """
    cls = algorithm_class(algorithm)
    known = defaults_of(cls)
    if unknown := [name for name in options if name not in known]:
        names = [*known, *similar]
        hint = "".join(did_you_mean(name, names) for name in unknown) if is_custom(algorithm) else ""
        owners = "".join(
            f". {name} is an option of {', '.join(algorithms)}"
            for name in unknown
            if (algorithms := algorithms_with(name))
        )
        shown = [name if name.isidentifier() else repr(name) for name in unknown]
        raise ValueError(
            f"algorithm={algorithm!r} has no option {', '.join(shown)}; it would have no "
            f"effect{hint}{owners}. Its options are {', '.join(known)}; to remove one from a recipe, set "
            f"{shown[0]}=none"
        )
    try:
        return cls(**options)
    except ValidationError as error:
        raise OptionError(algorithm, options, list(_problems(error))) from error


def complete_options(
    algorithm: str, options: Mapping[str, Any], similar: Iterable[str] = ()
) -> dict[str, Any]:
    """Returns all options of the algorithm with their validated values, as TOML has them; None is left out.

    Args:
        similar: as for `make_algorithm`.

    Raises:
        ValueError: as `make_algorithm`.
    """
    made = make_algorithm(algorithm, options, similar)
    return plain_options(algorithm, {name: getattr(made, name) for name in defaults_of(type(made))})


def _problems(error: ValidationError) -> Iterator[tuple[str, str]]:
    for problem in error.errors():
        name = str(problem["loc"][0]) if problem["loc"] else ""
        # A recipe has lists where an option is a tuple.
        yield name, problem["msg"].removeprefix("Value error, ").replace("a valid tuple", "a valid list")
