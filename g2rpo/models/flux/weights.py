"""Putting weights onto a FLUX transformer: another network's, or a LoRA."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from g2rpo.models.flux.layout import Source, is_original, original_prefix, sources, to_diffusers
from g2rpo.models.flux.lora_checks import check_lora, linear_shapes, read_lora
from g2rpo.models.flux.lora_keys import is_lora
from g2rpo.models.loading.reading import (
    Places,
    all_finite,
    check_dtypes,
    copy_rows,
    differences,
    header,
    headers,
    weight_files,
)
from g2rpo.runtime.processes import rank

LOG = logging.getLogger(__name__)

LORA_FILE = "pytorch_lora_weights.safetensors"
COMFYUI_LORA_FILE = "comfyui_lora.safetensors"
SINGLE_FILE = "model.safetensors"

LORA_TARGETS = (
    r"(transformer_blocks|single_transformer_blocks)\.\d+\."
    r"(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
    r"|ff\.net\.(0\.proj|2)|ff_context\.net\.(0\.proj|2)|proj_mlp|proj_out)"
)
"""Attention and MLP linears of every block; not the modulations, nor the layers at both ends."""


def lora_layers(module: nn.Module, targets: Sequence[str] | None = None) -> list[nn.Linear]:
    """The linears that adapters of `add_lora` go onto.

    Raises:
        ValueError: a target that is the end of no linear's name.
    """
    linears = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    if targets is None:
        return [layer for name, layer in linears.items() if re.fullmatch(LORA_TARGETS, name)]
    for target in targets:
        if not any(_ends(name, target) for name in linears):
            ends = sorted({".".join(name.split(".")[2:]) for name in linears if "blocks." in name})
            raise ValueError(
                f"lora_targets: no linear layer's name ends in {target!r}; of the blocks' layers there are "
                + ", ".join(ends)
            )
    return [layer for name, layer in linears.items() if any(_ends(name, target) for target in targets)]


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def add_lora(
    module: Any,
    rank: int,
    alpha: float | None,
    targets: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Freezes `module` and adds trainable adapters of `dtype`: W x + (alpha / rank) B A x, B = 0 at first.

    Args:
        module: a FluxTransformer2DModel.
        rank: >= 1.
        alpha: None means twice the rank, a factor of 2.
        targets: ends of the layers' names, such as "attn.to_q"; None: LORA_TARGETS.

    LoRA: arXiv:2106.09685. The adapters stay beside the weights: added into bfloat16 weights, most of a
    small update would be rounded away.
    """
    from peft import LoraConfig

    if rank < 1:
        raise ValueError(f"lora_rank={rank}: a LoRA needs rank >= 1 (0 trains all weights)")
    module.requires_grad_(False)
    lora_layers(module, targets)  # says which target matches nothing
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules=LORA_TARGETS if targets is None else list(targets),
    )
    # A is drawn at random: the same for every process and every start, whatever ran before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module.add_adapter(config)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def load_weights(module: Any, path: Path) -> bool:
    """Replaces or changes the weights of `module` by those at `path`; tells whether it was a LoRA.

    `path`: a folder with one of the files that `weight_file` knows, a transformer folder, a folder of a whole
    model (its transformer is taken), or one `.safetensors` file: a transformer or a LoRA, in diffusers' names
    or in the original's (models/layout.py). A LoRA is added into the weights, so give `module` whole and in
    float32; of a transformer a sharded module reads its rows alone.

    Raises:
        ValueError: nothing of these, weights of another architecture, or values that are not finite.
    """
    places = _places(module, path)
    if places is not None:
        copy_rows(module, places)
        return False
    _add_lora_file(module, weight_file(path) or path)
    return True


def check_weights(module: Any, path: Path) -> bool:
    """Whether a LoRA is at `path` (as `load_weights` takes it); `module` may be on the meta device.

    Of a transformer the headers are read, of a LoRA the values too.

    Raises:
        ValueError: as `load_weights`, but for a transformer's values, which that one checks while it copies.
    """
    places = _places(module, path)
    if places is not None:
        try:
            check_dtypes(places)
        except ValueError as error:
            raise ValueError(f"{path} does not fit this model: {error}") from error
        return False
    check_lora(weight_file(path) or path, linear_shapes(module), module.config)
    return True


def _places(module: Any, path: Path) -> Places | None:
    """Where each parameter's rows are among the weights at `path`; None: those are a LoRA."""
    files = _files(path)
    given = headers(files)
    if not given:
        raise ValueError(f"{path} is empty: it has no tensors; fetch or export it again")
    if is_lora(given):
        return None
    places = {name: (file, Source(name)) for name, file in files.items()}
    if is_original(given):
        prefix = original_prefix(given)
        try:
            given = to_diffusers(given, module.config)
        except ValueError as error:
            raise ValueError(f"{path} does not fit this model: {error}") from error
        places = {
            name: (files[prefix + source.key], replace(source, key=prefix + source.key))
            for name, source in sources(module.config).items()
        }
    if problems := differences(module, given):
        shown = "; ".join(problems[:3])
        raise ValueError(f"{path} does not fit this model ({len(problems)} differences: {shown}, …)")
    return places


def _files(path: Path) -> dict[str, Path]:
    """Key -> file, of the weights at `path`."""
    path = weight_file(path) or path
    if path.is_dir():
        folder = path / "transformer" if (path / "transformer").is_dir() else path
        if (folder / "adapter_config.json").is_file():
            raise ValueError(
                f"{folder} is a folder of PEFT (adapter_config.json), which g2rpo does not read; save the "
                f"adapters with diffusers' save_lora_adapter or save_lora_weights as {LORA_FILE}"
            )
        if not (folder / "config.json").is_file():
            raise ValueError(f"no weights in {folder}: neither config.json of a transformer nor {LORA_FILE}")
        return weight_files(folder)
    if path.suffix == ".safetensors" and path.is_file():
        return dict.fromkeys(header(path), path)
    raise ValueError(f"no weights at {path}: give a folder in diffusers layout or a .safetensors file")


def weight_file(folder: Path) -> Path | None:
    """The one file that all of a folder's weights are in, where it is an export or a LoRA; else None."""
    if (folder / LORA_FILE).is_file():
        return folder / LORA_FILE
    if (folder / "config.json").is_file() or (folder / "model_index.json").is_file():
        return None  # files of these names may be those of a network beside its configuration
    names = (COMFYUI_LORA_FILE, SINGLE_FILE)
    return next((folder / name for name in names if (folder / name).is_file()), None)


@torch.no_grad()
def _add_lora_file(module: Any, path: Path) -> None:
    """Adds scale B A of each layer into its weight, in float32 or better."""
    adapters, note = read_lora(path, linear_shapes(module), module.config)
    for name, (down, up, scale) in adapters.items():
        weight = module.get_submodule(name).weight
        precise = {"device": weight.device, "dtype": torch.promote_types(weight.dtype, torch.float32)}
        change = (up.to(**precise) @ down.to(**precise)) * scale
        if not all_finite(change):
            raise ValueError(
                f"{path}: the product of A, B and alpha / rank of {name} is not finite (largest values "
                f"{float(down.abs().max()):.3g} and {float(up.abs().max()):.3g}, scale {scale:g}); "
                "take adapters of a training that did not break"
            )
        weight += change.to(weight.dtype)
    if note and not rank():
        LOG.warning("%s: %s", path, note)
