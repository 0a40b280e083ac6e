"""Policies as tests load them: options as keywords, on the CPU."""

from pathlib import Path
from typing import Any

from g2rpo.config.settings import Settings
from g2rpo.models.options import PolicyOptions
from g2rpo.models.registry import check_policy, load_policy


def load(name: str | Path, *, device: str = "cpu", mesh: Any = None, **options: Any) -> Any:
    """Loads a policy with the options of PolicyOptions."""
    return load_policy(name, PolicyOptions(**options), device=device, mesh=mesh)


def policy_of(settings: Settings, mesh: Any = None) -> Any:
    """Loads the initial policy of a run."""
    return load_policy(
        settings.model, settings.policy_options(), device=settings.device, mesh=mesh, family=settings.family
    )


def check_of(settings: Settings, mesh: Any = None) -> None:
    """Checks the initial policy of a run, as the trainer does before it loads anything."""
    check_policy(settings.model, settings.policy_options(), mesh=mesh, family=settings.family)
