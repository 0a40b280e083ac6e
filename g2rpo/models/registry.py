"""Models by name: `load_policy` turns a setting into a Policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from g2rpo.models.flux.policy import FluxPolicy, Precision, SigmaRounding, TailsPrecision


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


def resolve_device(device: str | torch.device) -> torch.device:
    """`"auto"` -> cuda where there is a GPU, else cpu; anything else as torch reads it.

    Raises:
        ValueError: cuda asked for on a machine without.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch sees no GPU here; use device=auto or device=cpu")
    return device
