"""Opens any model that a command may name as a policy.

tiny, tiny@NAME, owner/model      the embedded model, the hub
FOLDER with model_index.json      a base model or an export
FOLDER with config.toml           a run: its newest checkpoint (or RUN/best, or a RUN/checkpoints/step_…)
a LoRA folder, a .safetensors     applied to `base`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from g2rpo.config.load import read_settings
from g2rpo.config.settings import Settings
from g2rpo.models.loading.files import read_json
from g2rpo.models.options import CONDITIONS, PolicyOptions, Precision, SigmaRounding, without_none
from g2rpo.models.policy import Policy, root_module, trained_parameters
from g2rpo.models.registry import load_policy
from g2rpo.models.transformer.weights import is_adapter_file, weight_file
from g2rpo.run.best import best_checkpoint
from g2rpo.run.folder import BEST, damage, latest_checkpoint, load_newest

EXPORT_FILE = "g2rpo.json"
"""File beside an export's weights, with its base model and the settings of its run."""


def base_and_files(path: Path, base: str | None) -> tuple[str, list[Path]]:
    """Returns the base model of bare weights at `path`, and the weight files to apply to it, in order.

    Args:
        path: the weights.
        base: the requested base; None: the one that an export records.

    Raises:
        ValueError: no base is known.
    """
    record = export_record(path)
    file = weight_file(path)
    adapters = file is not None and is_adapter_file(file)
    below = None if base or not adapters else record.get("settings", {}).get("weights")
    base = base or record.get("base_model")
    if base is None:
        raise ValueError(
            f"{path} contains only weights; give the model that they belong to with --base NAME (in Python "
            "base=NAME)"
        )
    return base, [*([Path(below).expanduser()] if below else []), path]


def open_policy(
    model: str | Path,
    *,
    base: str | None = None,
    device: str = "auto",
    family: str | None = None,
    precision: Precision | None = None,
    guidance: float | None = None,
    true_cfg: float | None = None,
    negative_prompt: str | None = None,
    resolution: Any = None,
    max_sequence_length: int | None = None,
    sigma_rounding: SigmaRounding | None = None,
) -> Policy:
    """Opens the policy that `model` names (see the top of this file), for sampling.

    For a fair comparison, pass the first policy's `conditions` when the second is opened.

    Args:
        model: name or path.
        base: model that a LoRA or bare weights belong to. An exported LoRA records its base and the weights
            that its run began with; a `base` given here is used without them.
        device: "auto" selects a GPU if there is one, else the CPU.
        family: a custom model family as "module:attribute", which is imported.
        precision, guidance, true_cfg, negative_prompt, resolution, max_sequence_length, sigma_rounding: as in
            `PolicyOptions`; None: as the run or the export recorded, otherwise the default of
            `PolicyOptions`.

    Raises:
        ValueError: no such model, a run without a checkpoint, weights without a base, or a custom family that
            was not named.
    """
    path = Path(model).expanduser()
    changes = {
        "precision": precision,
        "guidance": guidance,
        "true_cfg": true_cfg,
        "negative_prompt": negative_prompt,
        "resolution": resolution,
        "max_sequence_length": max_sequence_length,
        "sigma_rounding": sigma_rounding,
    }
    if run_of(path) is not None:
        policy, _, _ = open_run(path, device=device, family=family, changes=changes)
        return policy
    name, options = named_options(model, base, changes, family)
    return load_policy(name, options, device=device, family=family)


def named_options(
    model: str | Path, base: str | None, changes: Mapping[str, Any], family: str | None
) -> tuple[str, PolicyOptions]:
    """Returns the name of the base and the options with which `open_policy` opens a model that is no run.

    Args:
        model, base, family: as in `open_policy`.
        changes: conditions that replace those that an export recorded; None keeps them.

    Raises:
        ValueError: weights without a base, or a custom family that was not named.
    """
    path = Path(model).expanduser()
    record = export_record(path)
    check_family(record.get("settings", {}).get("family"), family, model)
    options = PolicyOptions(**with_changes(recorded_conditions(record), changes)).for_inference()
    if not is_weights(path):
        return str(model), options
    base, files = base_and_files(path, base)
    return base, replace(options, weights=tuple(files))


def recorded_conditions(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the conditions that an export's record states, without those that it leaves to the model."""
    # The record's own values take precedence: settings may leave them to the model (None).
    own = {name: record.get("settings", {}).get(name) for name in CONDITIONS}
    own |= {name: record.get(name) for name in ("guidance", "resolution") if record.get(name) is not None}
    return without_none(own)


def with_changes(own: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options in which those of `changes` are replaced; None keeps them.

    A negative prompt is dropped where there is no classifier-free guidance.
    """
    merged = {**own, **without_none(changes)}
    if merged.get("true_cfg", 1) == 1:
        merged.pop("negative_prompt", None)
    return merged


def check_family(recorded: str | None, given: str | None, where: str | Path) -> None:
    """Checks that a custom family which a run recorded was named: its code is not imported otherwise.

    Raises:
        ValueError: another family, or none, was named.
    """
    if recorded is not None and recorded != given:
        raise ValueError(
            f"{where} was trained with the custom model family {recorded}, whose code is imported only if "
            f"you name it: give --family {recorded} (in Python family={recorded!r})"
        )


def run_options(
    settings: Settings, changes: Mapping[str, Any], family: str | None, where: str | Path
) -> PolicyOptions:
    """Returns the options with which a run's checkpoint is opened.

    Args:
        settings: settings of the run.
        changes: options that replace the run's own; None keeps them.
        family: the custom family that was named.
        where: the run, for the error message.

    Raises:
        ValueError: the run's custom family was not named, or options do not fit together.
    """
    check_family(settings.family, family, where)
    # Without adapters the checkpoint holds all weights, so the initial `weights` are not needed.
    own = settings if settings.lora_rank else settings.model_copy(update={"weights": None})
    options = own.policy_options().for_inference()
    conditions = {name: getattr(options, name) for name in CONDITIONS}
    changed = with_changes(conditions, changes)
    return replace(options, **{"negative_prompt": None, **changed})


def open_run(
    path: str | Path,
    *,
    device: str | None = None,
    family: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> tuple[Policy, Settings, dict[str, Any]]:
    """Opens a run or a checkpoint.

    With `ema_decay` the policy has the averaged weights, as in the run's own evaluations.

    Args:
        path: the run folder, RUN/best or RUN/checkpoints/step_….
        device: device of the policy; None: that of the settings.
        family: the custom model family with which the run was trained.
        changes: options of the policy that replace the run's own; None keeps them.

    Returns:
        Policy, settings, and the checkpoint's plain state, such as `iteration`.

    Raises:
        ValueError: neither a run folder nor a checkpoint in one, no checkpoint yet, or a custom family that
            was not named.
    """
    path = Path(path).expanduser()
    run, checkpoint = run_and_checkpoint(path)
    settings = read_settings(run)
    options = run_options(settings, changes or {}, family, run)
    policy = load_policy(settings.model, options, device=device or settings.device, family=family)
    state = _load_run(policy, run if path == run else None, checkpoint, bool(settings.ema_decay))
    return policy, settings, state


def _load_run(policy: Policy, run: Path | None, checkpoint: Path, averaged: bool) -> dict[str, Any]:
    """Loads a checkpoint into a policy and returns its plain state.

    Args:
        run: the run whose newest intact checkpoint is loaded; None: only `checkpoint` will do.
        averaged: load the averaged weights (`ema_decay`).
    """

    def load(path: Path) -> dict[str, Any]:
        from g2rpo.run.checkpoint import load_checkpoint

        state = load_checkpoint(path, {"module": root_module(policy)}, restore_random=False)
        if averaged:
            _load_ema(policy, path)
        return state

    was_damaged = damage(checkpoint)  # then loading's own error says more
    try:
        if run is None:
            return load(checkpoint)
        loaded = load_newest(run, load)
    except Exception as error:
        problem = damage(checkpoint)
        # A run in progress removes old ones. Content that changed is reported as it was found.
        if problem and not was_damaged and (run is None or problem == "no such checkpoint"):
            raise ValueError(f"{checkpoint} changed while it was read ({problem}); try again") from error
        raise
    if loaded is None:
        raise ValueError(f"{checkpoint} was removed while it was read; try again")
    return loaded[1]


def export_record(path: Path) -> dict[str, Any]:
    """Reads the record of an export: base_model, guidance, resolution, iteration, settings; else {}."""
    file = path / EXPORT_FILE
    if not file.is_file():
        return {}
    record = read_json(file)
    if not isinstance(record.get("settings", {}), dict):
        raise ValueError(
            f"{file}: `settings` should be a JSON object, as `g2rpo export` writes it; export again"
        )
    return record


@torch.no_grad()
def _load_ema(policy: Policy, checkpoint: Path) -> None:
    trained = trained_parameters(policy)
    mean = {name: torch.empty_like(p) for name, p in trained.items()}
    from g2rpo.run.checkpoint import load_checkpoint  # torch's part of it takes longer to import than g2rpo

    load_checkpoint(checkpoint, {"ema": mean}, restore_random=False)
    for name, parameter in trained.items():
        parameter.copy_(mean[name])


def run_of(path: Path) -> Path | None:
    """Returns the run folder that `path` names or is a checkpoint of; None for other paths."""
    candidates = [
        path,
        *([path.parent] if path.name == BEST and not path.is_dir() else []),
        *([path.parent.parent] if path.parent.name == "checkpoints" else []),
    ]
    return next((folder for folder in candidates if (folder / "config.toml").is_file()), None)


def run_and_checkpoint(path: Path) -> tuple[Path, Path]:
    """Returns the run folder that `path` belongs to, and the checkpoint that it names.

    Args:
        path: as for `open_run`, without "~".

    Raises:
        ValueError: neither a run folder nor a checkpoint in one, no checkpoint yet, or a damaged one.
    """
    run = run_of(path)
    if run is None:
        raise ValueError(f"{path} is neither a run folder (with config.toml) nor a checkpoint in one")
    checkpoint = checkpoint_of(path, run)
    if checkpoint is None:
        raise ValueError(
            f"{run} contains no checkpoint yet; train it further, or give its base model instead"
        )
    return run, checkpoint


def checkpoint_of(path: Path, run: Path) -> Path | None:
    """Returns the checkpoint that `path` names: RUN the newest (None: there is none yet), RUN/best or itself.

    Raises:
        ValueError: RUN/best of a run that keeps none, or a damaged checkpoint.
    """
    if path == run:
        return latest_checkpoint(run)
    return best_checkpoint(run) if path == run / BEST else path


def is_weights(path: Path) -> bool:
    """Whether `path` holds bare weights: a LoRA, a transformer's folder, or a .safetensors file."""
    if path.is_dir():
        return weight_file(path) is not None or (
            not (path / "model_index.json").is_file()
            and ((path / "config.json").is_file() or any(path.glob("*.safetensors.index.json")))
        )
    return path.suffix == ".safetensors"
