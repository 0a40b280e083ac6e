"""The setting `loggers`: its names, its earlier form, and whether the packages are there."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

from g2rpo.runtime.text import did_you_mean

LOGGERS = ("tensorboard", "wandb", "trackio", "swanlab", "mlflow")
"""Names of the setting, which are also the names of the packages."""

EARLIER = "tensorboard"
"""Key of earlier versions: true stands for loggers = ["tensorboard"], false for none."""


def with_loggers(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Returns settings in which the key `tensorboard` of earlier versions is replaced by `loggers`.

    Args:
        where: what the settings are, for the message.

    Raises:
        ValueError: both keys are given, or `tensorboard` is neither true nor false.
    """
    kept = {key: value for key, value in values.items() if key != EARLIER}
    given = values.get(EARLIER)
    if given is None:
        return kept
    if isinstance(given, str):  # such as False, as Python writes it
        given = {"true": True, "false": False}.get(given.lower(), given)
    place = f"{where}: " if where else ""
    if kept.get("loggers") is not None:
        raise ValueError(f"{place}{EARLIER} is the earlier name of loggers; give only loggers")
    if not isinstance(given, bool):
        raise ValueError(
            f"{place}{EARLIER} = {given!r}: this setting is now loggers = "
            f'["{EARLIER}"] or []; use that instead'
        )
    return kept | {"loggers": [EARLIER] if given else []}


def known_loggers(value: Any) -> Any:
    """Checks the names of loggers; a text is a list separated by commas, as on a command line.

    Raises:
        ValueError: an unknown name, or one that is given twice.
    """
    names = [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value
    if not isinstance(names, list | tuple):
        return names  # pydantic says what is wrong
    for name in names:
        if isinstance(name, str) and name not in LOGGERS:
            raise ValueError(
                f"no logger {name!r}; there are {', '.join(LOGGERS)}{did_you_mean(name, LOGGERS)}. "
                "For none, give []"
            )
    if len(set(map(str, names))) < len(names):
        raise ValueError("a logger is given twice; give each once")
    return list(names)


def check_installed(names: Iterable[str]) -> None:
    """Checks, without importing them, that the packages of loggers are installed.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"loggers: {name} is not installed; pip install {name}, or remove it from loggers "
                "(loggers=[] uses none)"
            )
