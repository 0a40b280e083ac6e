"""Any model a command may name, opened as a policy.

tiny, tiny@NAME, owner/model      the embedded model, the hub
FOLDER with model_index.json      a base model or an export
FOLDER with config.toml           a run: its newest checkpoint (or RUN/best, or one RUN/checkpoints/step_…)
a LoRA folder, a .safetensors     put onto `base`
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from g2rpo.config.load import read_settings
from g2rpo.config.settings import Settings
from g2rpo.models.flux.policy import FluxPolicy, Precision, SigmaRounding
from g2rpo.models.flux.weights import COMFYUI_LORA_FILE, LORA_FILE, weight_file
from g2rpo.models.registry import CONDITIONS, load_policy, policy_of, without_none
from g2rpo.run.best import best_checkpoint
from g2rpo.run.checkpoint import load_checkpoint
from g2rpo.run.folder import BEST, damage, latest_checkpoint

EXPORT_FILE = "g2rpo.json"
"""Beside an export's weights: its base model and the settings of its run."""


def base_and_files(path: Path, base: str | None) -> tuple[str, list[Path]]:
    """The base of bare weights at `path`, and the files to put onto it, in order.

    Args:
        base: that was asked for; None: what an export knows of itself.

    Raises:
        ValueError: no base is known.
    """
    record = export_record(path)
    file = weight_file(path)
    adapters = file is not None and file.name in (LORA_FILE, COMFYUI_LORA_FILE)
    below = None if base or not adapters else record.get("settings", {}).get("weights")
    base = base or record.get("base_model")
    if base is None:
        raise ValueError(
            f"{path} holds weights alone; say which model they belong to with --base NAME "
            "(in Python base=NAME)"
        )
    return base, [*([Path(below).expanduser()] if below else []), path]


def open_policy(
    model: str | Path,
    *,
    base: str | None = None,
    device: str = "auto",
    precision: Precision | None = None,
    guidance: float | None = None,
    true_cfg: float | None = None,
    resolution: int | None = None,
    max_sequence_length: int | None = None,
    sigma_rounding: SigmaRounding | None = None,
) -> FluxPolicy:
    """The policy that `model` names (see the top of this file).

    Args:
        base: model that a LoRA or bare weights belong to; an exported LoRA knows its own, and the weights
            that its run put onto it. A `base` given here is taken as it is.
        Others: None: the run's or the export's own, else as `load_policy` has it. What the first of two
            policies has as its `conditions` makes the second a fair comparison.

    Raises:
        ValueError: no such model, a run without a checkpoint, or weights without a base.
    """
    path = Path(model).expanduser()
    changes = {
        "device": device,
        "precision": precision,
        "guidance": guidance,
        "true_cfg": true_cfg,
        "resolution": resolution,
        "max_sequence_length": max_sequence_length,
        "sigma_rounding": sigma_rounding,
    }
    run = run_of(path)
    if run is not None:
        policy, _, _ = open_run(path, **changes)
        return policy
    record = export_record(path)
    # What the policy had comes before what the settings leave to the model (None).
    own = {name: record.get("settings", {}).get(name) for name in CONDITIONS}
    own |= {name: record.get(name) for name in ("guidance", "resolution") if name in record}
    arguments = without_none(own) | without_none(changes)
    if not is_weights(path):
        return load_policy(str(model), **arguments)
    base, files = base_and_files(path, base)
    return load_policy(base, weights=files, **arguments)


def open_run(path: str | Path, **changes: Any) -> tuple[FluxPolicy, Settings, dict[str, Any]]:
    """Policy, settings and the checkpoint's plain state (its `iteration` among them) of a run or checkpoint.

    With `ema_decay` the running mean of the weights is what is opened, as in the run's own evaluations.

    Raises:
        ValueError: neither a run folder nor a checkpoint in one, or no checkpoint yet.
    """
    path = Path(path).expanduser()
    run = run_of(path)
    if run is None:
        raise ValueError(f"{path} is neither a run folder (with config.toml) nor a checkpoint in one")
    checkpoint = checkpoint_of(path, run)
    if checkpoint is None:
        raise ValueError(f"{run} holds no checkpoint yet; train it further, or name its base model instead")
    settings = read_settings(run)
    # The checkpoint holds all that was trained: without adapters nothing of `weights` is left.
    own = settings if settings.lora_rank else settings.model_copy(update={"weights": None})
    policy = policy_of(own, **changes)
    torn = damage(checkpoint)  # told as it always was
    try:
        state = load_checkpoint(checkpoint, {"module": policy.module}, restore_random=False)
        if settings.ema_decay:
            _load_ema(policy, checkpoint)
    except Exception as error:
        if (problem := damage(checkpoint)) and not torn:  # a run that goes on removes what need not stay
            raise ValueError(f"{checkpoint} changed while it was read ({problem}); try again") from error
        raise
    return policy, settings, state


def export_record(path: Path) -> dict[str, Any]:
    """What an export says of itself: base_model, guidance, resolution, settings; {} for other models."""
    file = path / EXPORT_FILE
    if not file.is_file():
        return {}
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record


@torch.no_grad()
def _load_ema(policy: FluxPolicy, checkpoint: Path) -> None:
    trained = {name: p for name, p in policy.module.named_parameters() if p.requires_grad}
    mean = {name: torch.empty_like(p) for name, p in trained.items()}
    load_checkpoint(checkpoint, {"ema": mean}, restore_random=False)
    for name, parameter in trained.items():
        parameter.copy_(mean[name])


def run_of(path: Path) -> Path | None:
    """The run folder that `path` is, or is a checkpoint of."""
    candidates = [
        path,
        *([path.parent] if path.name == BEST and not path.is_dir() else []),
        *([path.parent.parent] if path.parent.name == "checkpoints" else []),
    ]
    return next((folder for folder in candidates if (folder / "config.toml").is_file()), None)


def checkpoint_of(path: Path, run: Path) -> Path | None:
    """The checkpoint that RUN (its newest; None: there is none yet), RUN/best or its own path names.

    Raises:
        ValueError: RUN/best where none is kept, or a damaged checkpoint.
    """
    if path == run:
        return latest_checkpoint(run)
    return best_checkpoint(run) if path == run / BEST else path


def is_weights(path: Path) -> bool:
    if path.is_dir():
        return weight_file(path) is not None or (
            (path / "config.json").is_file() and not (path / "model_index.json").is_file()
        )
    return path.suffix == ".safetensors"
