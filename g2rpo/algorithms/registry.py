"""Options of a preset: its keyword arguments are the only list of an algorithm's options."""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from g2rpo.runtime.text import did_you_mean

if TYPE_CHECKING:
    from g2rpo.algorithms.base import Algorithm


def _preset(algorithm: str) -> "Callable[..., Algorithm]":
    from g2rpo.algorithms.presets import PRESETS  # imports torch, which reading a recipe does not need

    if algorithm not in PRESETS:
        raise ValueError(
            f"unknown algorithm {algorithm!r}{did_you_mean(algorithm, PRESETS)}; "
            f"use one of {', '.join(PRESETS)}"
        )
    return PRESETS[algorithm]


def algorithm_defaults(algorithm: str) -> dict[str, Any]:
    """Returns the preset's options with their defaults.

    Raises:
        ValueError: the preset is unknown.
    """
    return {
        name: parameter.default
        for name, parameter in inspect.signature(_preset(algorithm)).parameters.items()
    }


def make_algorithm(algorithm: str, options: Mapping[str, Any]) -> "Algorithm":
    """Returns the algorithm of a preset, with the given options set; lists (from TOML) become tuples.

    Raises:
        ValueError: the preset or an option is unknown, or the value of an option is not allowed.
    """
    known = algorithm_defaults(algorithm)
    if unknown := [name for name in options if name not in known]:
        raise ValueError(
            f"algorithm={algorithm!r} takes no {', '.join(unknown)}; it would have no effect. "
            f"Its options are {', '.join(known)}; to remove one from a recipe, set {unknown[0]}=none"
        )
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return _preset(algorithm)(**frozen)
