"""What is known of a model before it is opened: whether it exists, its label, conditions and state."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from g2rpo.config.load import read_settings
from g2rpo.inference.open import (
    checkpoint_of,
    export_record,
    named_options,
    recorded_conditions,
    run_of,
    run_options,
)
from g2rpo.models.options import CONDITIONS
from g2rpo.models.registry import check_policy
from g2rpo.run.folder import BEST


def check_model(
    model: str,
    base: str | None = None,
    *,
    conditions: Mapping[str, Any] | None = None,
    family: str | None = None,
) -> None:
    """Checks that `open_policy` can open a model; of a model on the hub configuration files are fetched.

    Bare weights, and the initial weights of a run that trained adapters, are checked as loading would check
    them.

    Args:
        model: whatever `open_policy` opens.
        base: model that bare weights belong to.
        conditions: conditions that replace the model's own; None keeps them.
        family: a custom model family.

    Raises:
        ValueError: no such model, a run without a checkpoint, weights without a base, weights that do not fit
            the base, or conditions that the model does not support.
    """
    path = Path(model).expanduser()
    run = run_of(path)
    if run is None:
        name, options = named_options(model, base, conditions or {}, family)
        check_policy(name, options, family=family)
        return
    checkpoint = checkpoint_of(path, run)
    if checkpoint is None or not checkpoint.is_dir():
        raise ValueError(f"{path} contains no checkpoint; train the run further, or give its base model")
    settings = read_settings(run)
    options = run_options(settings, conditions or {}, family, model)
    check_policy(settings.model, options, family=family)


def labels_of(models: Sequence[str], given: Sequence[str] | None = None) -> list[str]:
    """Makes a short, unique label for each model that is valid as a folder's name.

    Args:
        models: whatever `open_policy` opens.
        given: labels to use instead of the models' names.

    Raises:
        ValueError: no models, or not exactly one non-empty given label per model.
    """
    if not models:
        raise ValueError("no models: give at least one, such as tiny")
    if given is not None and (len(given) != len(models) or not all(name.strip() for name in given)):
        raise ValueError(
            f"{len(given)} labels for {len(models)} models; give one per model, separated by commas"
        )
    labels: list[str] = []
    for wanted in given if given is not None else map(_short, models):
        name = re.sub(r"[^\w.@+-]+", "_", wanted.strip()).strip("._") or "model"
        name = re.sub(r"\.(?=(csv|json|md|png)$)", "_", name)  # names of the files beside it
        label, number = name, 1
        while label in labels:
            number += 1
            label = f"{name}-{number}"
        labels.append(label)
    return labels


def _short(model: str) -> str:
    path = Path(model)
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}_{path.name}"
    if path.name == BEST and path.parent.name and not path.expanduser().is_dir():
        return f"{_short(str(path.parent))}_{BEST}"
    if path.name.isdigit() and path.parent.name:  # a run of a comparison: ARM/SEED
        return f"{path.parent.name}_{path.name}"
    if path.name in ("export", "") and path.parent.name:
        return path.parent.name
    if path.name == f"export_{BEST}":
        return f"{path.parent.name}_{BEST}"
    return path.stem if path.suffix == ".safetensors" else path.name


def own_conditions(model: str) -> dict[str, Any]:
    """Returns the conditions of `CONDITIONS` that a run or an export records; {} for other models."""
    path = Path(model).expanduser()
    run = run_of(path)
    if run is None:
        return recorded_conditions(export_record(path))
    settings = read_settings(run)
    own = {name: getattr(settings, name) for name in CONDITIONS}
    return {name: value for name, value in own.items() if value is not None}


def model_state(model: str) -> str:
    """Returns a text that changes with a model on disk: the path, sizes and times of its weights.

    Models that are not on disk give an empty text.
    """
    path = Path(model).expanduser()
    run = run_of(path)
    if run is not None:
        path = checkpoint_of(path, run) or path
    if not path.exists():
        return ""
    weights = [path] if path.is_file() else sorted([*path.rglob("*.safetensors"), *path.rglob("*.distcp")])
    facts = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
    hashed = hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()
    return f"{path.absolute()} {hashed}"
