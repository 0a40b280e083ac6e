"""Loading of policies by name or from a run's settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from g2rpo.models.loading.files import transformer_config
from g2rpo.runtime.processes import resolve_device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from g2rpo.models.flux.policy import FluxPolicy, Precision, SigmaRounding, TailsPrecision


class PolicySettings(Protocol):
    """Settings that a policy depends on; `policy_of` also reads those named in ADAPTERS and CONDITIONS."""

    @property
    def model(self) -> str: ...

    @property
    def weights(self) -> str | None: ...

    @property
    def lora_rank(self) -> int: ...

    @property
    def base_dtype(self) -> str: ...


def load_policy(
    name: str | Path,
    *,
    device: str | torch.device = "auto",
    precision: Precision = "float32",
    guidance: float = 3.5,
    true_cfg: float = 1.0,
    resolution: int | None = None,
    max_sequence_length: int | None = None,
    lora_rank: int = 0,
    lora_alpha: float | None = None,
    lora_targets: Sequence[str] | None = None,
    base_dtype: Literal["compute", "float8"] = "compute",
    tails_precision: TailsPrecision = "compute",
    sigma_rounding: SigmaRounding = "exact",
    weights: str | Path | Sequence[str | Path] | None = None,
    gradient_checkpointing: bool = False,
    compiled: bool = False,
    mesh: DeviceMesh | None = None,
) -> FluxPolicy:
    """Loads a policy.

    Args:
        name: `tiny`, `tiny@NAME`, `random:NAME`, a folder in diffusers layout, or a hub name.
        device: "auto" selects a GPU if there is one, else the CPU.
        weights: weights that are applied to the model's transformer in order (for tiny@NAME after NAME); each
            is a LoRA or full weights, as a folder or a .safetensors file.
        Others: as in `FluxPolicy.load`.

    Raises:
        ValueError: there is no such model, or it does not support a setting.
    """
    from g2rpo.models.flux.policy import FluxPolicy
    from g2rpo.models.tiny import is_tiny, tiny_folder

    paths: list[str | Path] = [weights] if isinstance(weights, str | Path) else list(weights or ())
    embedded = None
    if isinstance(name, str) and is_tiny(name):
        name, embedded = tiny_folder(name)
    return FluxPolicy.load(
        name,
        device=resolve_device(device),
        precision=precision,
        guidance=guidance,
        true_cfg=true_cfg,
        resolution=resolution,
        max_sequence_length=max_sequence_length,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        lora_targets=lora_targets,
        base_dtype=base_dtype,
        tails_precision=tails_precision,
        sigma_rounding=sigma_rounding,
        weights=[Path(path).expanduser() for path in (embedded, *paths) if path is not None],
        gradient_checkpointing=gradient_checkpointing,
        compiled=compiled,
        mesh=mesh,
    )


CONDITIONS = (
    "precision",
    "guidance",
    "true_cfg",
    "resolution",
    "max_sequence_length",
    "sigma_rounding",
)
"""Arguments of `load_policy` that, beside the weights, determine the images that a model generates."""


ADAPTERS = ("lora_rank", "lora_alpha", "lora_targets", "base_dtype")
"""Arguments of `load_policy` that describe the trained adapters and their base."""


def policy_of(settings: PolicySettings, **changes: Any) -> FluxPolicy:
    """Loads the initial policy of a run.

    Args:
        settings: settings of the run.
        changes: arguments of `load_policy` that replace the settings; None keeps the setting.

    Raises:
        ValueError: as `load_policy`.
    """
    names = ("device", "weights", *ADAPTERS, *CONDITIONS)
    arguments: dict[str, Any] = {name: getattr(settings, name) for name in names}
    return load_policy(settings.model, **(arguments | without_none(changes)))


def check_weights(settings: PolicySettings, mesh: DeviceMesh | None = None) -> None:
    """Checks that the setting `weights` fits the model.

    The values of adapters are read; of full weights only the headers.

    Args:
        settings: settings of the run.
        mesh: mesh over which the run will be sharded; None: one process.

    Raises:
        ValueError: the weights do not fit, or several processes cannot load them.
    """
    if settings.weights is not None:
        from g2rpo.models.flux.network import Training, meta_network

        training = Training(lora_rank=settings.lora_rank, base_dtype=settings.base_dtype, mesh=mesh)
        meta_network(transformer_config(settings.model), training, (Path(settings.weights).expanduser(),))


def check_files(base: str, files: Sequence[Path]) -> None:
    """Checks, as `check_weights` but without a run, that weights can be applied to a base in this order.

    Args:
        base: name of the base model, as in `load_policy`.
        files: folders or .safetensors files.

    Raises:
        ValueError: the weights do not fit, or there is no such base.
    """
    from g2rpo.models.flux.network import Training, meta_network

    meta_network(transformer_config(base), Training(), tuple(files))


def without_none(changes: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of `changes` whose value is not None."""
    return {name: value for name, value in changes.items() if value is not None}
