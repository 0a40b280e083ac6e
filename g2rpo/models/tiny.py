"""The embedded model: a small FLUX, shipped with the package, that generates scenes of coloured shapes.

`tiny` is the base; `tiny@NAME` is the base with the shipped weights NAME, a LoRA or a full transformer.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from types import ModuleType

FOLDER = "tiny_flux"
"""Folder of the base model within `assets`; variants are in FOLDER_NAME."""


def assets() -> Path:
    """Returns the folder of the package's embedded models."""
    return Path(str(files("g2rpo"))) / "assets"


def networks() -> ModuleType:
    """Returns the module that creates the networks of the embedded model, untrained."""
    from g2rpo.models.flux import embedded

    return embedded


def is_tiny(name: str) -> bool:
    """Returns whether `name` is the name of an embedded model."""
    return name == "tiny" or name.startswith("tiny@")


def tiny_folder(name: str = "tiny") -> tuple[Path, Path | None]:
    """Returns the folders of the base model and of the weights NAME in `tiny@NAME` (None for `tiny`).

    Raises:
        ValueError: the package contains no such weights.
    """
    base = assets() / FOLDER
    if not base.is_dir():
        raise ValueError(f"the embedded model is missing at {base}; reinstall g2rpo")
    _, at, variant = name.partition("@")
    if not at:
        return base, None
    weights = assets() / f"{FOLDER}_{variant}"
    if not variant or not weights.is_dir():
        known = sorted(p.name.removeprefix(f"{FOLDER}_") for p in assets().glob(f"{FOLDER}_*") if p.is_dir())
        allowed = ", ".join(["tiny", *(f"tiny@{v}" for v in known)])
        raise ValueError(f"no embedded model {name!r}; there are: {allowed}")
    return base, weights
