"""Models by name: `load_policy` turns a setting into a Policy."""

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
    """The settings that a policy depends on; `policy_of` reads ADAPTERS and CONDITIONS as well."""

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
    """The policy called `name`: `tiny`, `tiny@NAME`, `random:NAME`, a diffusers folder, or a hub name.

    Args:
        device: "auto" is a GPU where there is one.
        weights: put onto the model's transformer (tiny@NAME: after NAME), in order: each a LoRA or whole
            weights, a folder or a .safetensors file.
        Others: as `FluxPolicy.load`.

    Raises:
        ValueError: no such model, or a setting it does not take.
    """
    from g2rpo.models.flux.policy import FluxPolicy
    from g2rpo.models.tiny import is_tiny, tiny_folder

    given: list[str | Path] = [weights] if isinstance(weights, str | Path) else list(weights or ())
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
        weights=[Path(path).expanduser() for path in (embedded, *given) if path is not None],
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
"""Arguments of `load_policy` under which a run sees its model, beside the weights."""


ADAPTERS = ("lora_rank", "lora_alpha", "lora_targets", "base_dtype")


def policy_of(settings: PolicySettings, **changes: Any) -> FluxPolicy:
    """The policy that a run with these settings starts from; `changes` replace arguments of `load_policy`."""
    names = ("device", "weights", *ADAPTERS, *CONDITIONS)
    arguments: dict[str, Any] = {name: getattr(settings, name) for name in names}
    return load_policy(settings.model, **(arguments | given_values(changes)))


def check_weights(settings: PolicySettings, mesh: DeviceMesh | None = None) -> None:
    """Does the setting `weights` fit its model? Of adapters the values are read, of others the headers alone.

    Args:
        mesh: that the run will be sharded over.

    Raises:
        ValueError: it does not, or cannot be read by several processes.
    """
    if settings.weights is not None:
        from g2rpo.models.flux.network import Training, bare_network

        training = Training(lora_rank=settings.lora_rank, base_dtype=settings.base_dtype, mesh=mesh)
        bare_network(transformer_config(settings.model), training, (Path(settings.weights).expanduser(),))


def check_files(base: str, files: Sequence[Path]) -> None:
    """Can these weights be put onto a base, in this order? As `check_weights`, without a run.

    Raises:
        ValueError: they cannot, or there is no such base.
    """
    from g2rpo.models.flux.network import Training, bare_network

    bare_network(transformer_config(base), Training(), tuple(files))


def given_values(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if value is not None}
