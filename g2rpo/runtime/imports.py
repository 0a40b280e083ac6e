"""Import of what a user names as `module:attribute`: a reward, an algorithm, a model family."""

from __future__ import annotations

import importlib
from typing import Any

from g2rpo.runtime.text import did_you_mean

INJECTED = "injected:"
"""Prefix of the name under which settings record a component that was given to `Trainer` as an object."""


def check_not_injected(name: str, role: str, argument: str) -> None:
    """Checks that a component can be found by its name.

    Args:
        name: the recorded name.
        role: what it is, for the message.
        argument: the argument of `Trainer` that was given, such as "policy".

    Raises:
        ValueError: it was given to `Trainer` as an object.
    """
    if name.startswith(INJECTED):
        raise ValueError(
            f"{role} {name.removeprefix(INJECTED)!r} was given to g2rpo.Trainer as an object, so no command "
            f"can find it; continue in Python with Trainer(settings, {argument}=...), or name it as "
            "module:attribute"
        )


def import_attribute(target: str, role: str, example: str) -> Any:
    """Imports the module of `module:attribute` and returns the attribute.

    The module must be importable: a file in a folder on PYTHONPATH, or in the current folder, which the
    commands add to the search path.

    Args:
        target: `module:attribute`, such as "my_rewards:brightness".
        role: what the attribute is for, for the messages, such as "reward".
        example: a well-formed target, for the messages.

    Raises:
        ValueError: `target` is not `module:attribute`, there is no such module, or it has no such attribute.
            An error that the module itself raises is not changed.
    """
    check_not_injected(target, role, {"reward": "rewards", "algorithm": "algorithm"}.get(role, "policy"))
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute.isidentifier():
        raise ValueError(f"{target!r} must be module:attribute, such as {example}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # If the module exists and one of its own imports is missing, that error is reported unchanged.
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise
        raise ValueError(
            f"no module {error.name!r} for {role} {target!r}; put it into the current folder or on PYTHONPATH"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"{module_name} has no {attribute!r}{did_you_mean(attribute, dir(module))}")
    return getattr(module, attribute)
