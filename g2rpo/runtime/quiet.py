"""Silence of the packages that g2rpo loads models with, for as long as it uses them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

VERBOSITY = {"transformers": "TRANSFORMERS_VERBOSITY", "diffusers": "DIFFUSERS_VERBOSITY"}
"""Package -> the environment variable from which it takes its log level when it is imported."""

WARNING_PACKAGES = ("torchao", "torch.utils._pytree")
"""Loggers that warn, at an import, of kernels that the machine cannot use."""


@contextmanager
def quiet_packages() -> Iterator[None]:
    """Hides what other packages print while they load a model, except for errors; undone on exit.

    A log level that the user has set in the environment takes precedence. Progress bars of transformers and
    diffusers are hidden if the package is imported when the block begins; those of downloads are not.
    """
    with ExitStack() as stack:
        for package, variable in VERBOSITY.items():
            if variable not in os.environ:
                stack.enter_context(_errors_only(package))
                stack.enter_context(_variable(variable, "error"))
            stack.enter_context(_without_bars(package))
        for name in WARNING_PACKAGES:
            stack.enter_context(_errors_only(name))
        yield


@contextmanager
def _errors_only(name: str) -> Iterator[None]:
    logger, imported = logging.getLogger(name), name in sys.modules
    before = logger.level
    logger.setLevel(max(before, logging.ERROR))
    try:
        yield
    finally:
        # A package that was imported within the block has taken "error" from the environment for its level.
        first_import = name in VERBOSITY and not imported and name in sys.modules
        logger.setLevel(logging.WARNING if first_import else before)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


@contextmanager
def _without_bars(package: str) -> Iterator[None]:
    module = sys.modules.get(package)
    if module is None or not module.utils.logging.is_progress_bar_enabled():
        yield
        return
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    # Both packages switch the hub's bars as well; a download of 24 GB needs one.
    restore_hub = disable_progress_bars if are_progress_bars_disabled() else enable_progress_bars
    module.utils.logging.disable_progress_bar()
    restore_hub()
    try:
        yield
    finally:
        module.utils.logging.enable_progress_bar()
        restore_hub()
