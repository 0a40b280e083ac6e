"""Putting weights onto a FLUX transformer: another network's, or a LoRA."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from g2rpo.models.layout import Source, is_original, original_prefix, sources, to_diffusers
from g2rpo.models.lora_layout import is_comfyui_lora, is_lora, lora_from_comfyui
from g2rpo.models.reading import Places, copy_rows, differences, header, headers, weight_files

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
        ValueError: nothing of these, or weights of another architecture.
    """
    places = _places(module, path)
    if places is not None:
        copy_rows(module, places)
        return False
    from safetensors.torch import load_file

    path = weight_file(path) or path
    state = load_file(path)
    if is_comfyui_lora(state):
        _add_comfyui_lora(module, path, state)
    else:
        _fuse_lora(module, path, state)
    return True


def check_weights(module: Any, path: Path) -> bool:
    """Whether a LoRA is at `path` (as `load_weights` takes it), from headers alone; `module` may be on meta.

    Raises:
        ValueError: as `load_weights`, but for a LoRA's layers, which that one compares.
    """
    return _places(module, path) is None


def _places(module: Any, path: Path) -> Places | None:
    """Where each parameter's rows are among the weights at `path`; None: those are a LoRA."""
    files = _files(path)
    given = headers(files)
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


def _fuse_lora(module: Any, path: Path, state: dict[str, torch.Tensor]) -> None:
    prefix = "transformer" if any(key.startswith("transformer.") for key in state) else None
    targets = {name for name, _ in module.named_modules()}
    names = {key.removeprefix("transformer.").split(".lora_")[0] for key in state}
    unknown = sorted(names - targets)
    if unknown:
        raise ValueError(f"{path} is a LoRA of another architecture: no layer {unknown[0]!r} in this model")
    # From the file, not from `state`: the scale alpha / rank stands in its metadata.
    module.load_lora_adapter(path.parent, weight_name=path.name, prefix=prefix, adapter_name="given")
    module.fuse_lora()
    module.unload_lora()


@torch.no_grad()
def _add_comfyui_lora(module: Any, path: Path, state: dict[str, torch.Tensor]) -> None:
    try:
        layers = lora_from_comfyui(state, module.config)
    except ValueError as error:
        raise ValueError(f"{path} is a LoRA of another architecture: {error}") from error
    for name, (down, up, _) in layers.items():
        shape = (up.shape[0], down.shape[1])
        if (own := tuple(module.get_submodule(name).weight.shape)) != shape:
            raise ValueError(f"{path} is a LoRA of another architecture: {name} is {own} here, not {shape}")
    for name, (down, up, scale) in layers.items():
        weight = module.get_submodule(name).weight
        weight += scale * (up.to(weight.device).float() @ down.to(weight.device).float()).to(weight.dtype)
