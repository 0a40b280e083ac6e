"""What a preset can be told: its keyword arguments are the one list of an algorithm's options."""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from g2rpo.runtime.text import did_you_mean

if TYPE_CHECKING:
    from g2rpo.algorithms.base import Algorithm


def _preset(algorithm: str) -> "Callable[..., Algorithm]":
    from g2rpo.algorithms.presets import PRESETS  # needs torch, which reading a recipe's text does not

    if algorithm not in PRESETS:
        raise ValueError(
            f"no algorithm {algorithm!r}; there are {', '.join(PRESETS)}{did_you_mean(algorithm, PRESETS)}"
        )
    return PRESETS[algorithm]


def algorithm_defaults(algorithm: str) -> dict[str, Any]:
    """The preset's options with their defaults.

    Raises:
        ValueError: unknown preset.
    """
    return {
        name: parameter.default
        for name, parameter in inspect.signature(_preset(algorithm)).parameters.items()
    }


def make_algorithm(algorithm: str, options: Mapping[str, Any]) -> "Algorithm":
    """The preset with some of its options set; lists, as TOML gives them, become tuples.

    Raises:
        ValueError: unknown preset, an option that it does not take, or a value that it refuses.
    """
    taken = algorithm_defaults(algorithm)
    if unknown := [name for name in options if name not in taken]:
        raise ValueError(
            f"algorithm={algorithm!r} takes no {', '.join(unknown)}; it would have no effect. "
            f"Its options are {', '.join(taken)}; {unknown[0]}=none takes one out of a recipe"
        )
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return _preset(algorithm)(**frozen)
