"""Other packages are silent only while g2rpo uses them."""

import logging
import os

import pytest

from g2rpo.runtime.quiet import quiet_packages


def test_levels_and_bars_are_restored(monkeypatch):
    import diffusers
    import transformers
    from huggingface_hub.utils import are_progress_bars_disabled

    for variable in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        monkeypatch.delenv(variable, raising=False)
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "level", logging.INFO)  # as a user may have set it
    packages = (transformers.utils.logging, diffusers.utils.logging)
    before = [package.is_progress_bar_enabled() for package in packages]
    hub = are_progress_bars_disabled()
    with pytest.raises(KeyError), quiet_packages():
        assert logger.level == logging.ERROR and os.environ["DIFFUSERS_VERBOSITY"] == "error"
        assert not any(package.is_progress_bar_enabled() for package in packages)
        assert are_progress_bars_disabled() == hub  # a download shows its bar
        with quiet_packages():
            pass
        assert logger.level == logging.ERROR and not packages[0].is_progress_bar_enabled()
        raise KeyError
    assert logger.level == logging.INFO and "DIFFUSERS_VERBOSITY" not in os.environ
    assert [package.is_progress_bar_enabled() for package in packages] == before
    assert are_progress_bars_disabled() == hub


def test_a_level_in_the_environment_takes_precedence(monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "level", logging.INFO)
    with quiet_packages():
        assert logger.level == logging.INFO and os.environ["TRANSFORMERS_VERBOSITY"] == "info"
