"""Import of what a user names as `module:attribute`: a reward, an algorithm, a model family."""

from __future__ import annotations

import importlib
from typing import Any

from g2rpo.runtime.text import did_you_mean


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
