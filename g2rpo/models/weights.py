"""Putting weights onto a FLUX transformer: another network's, or a LoRA."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

LORA_FILE = "pytorch_lora_weights.safetensors"

LORA_TARGETS = (
    r"(transformer_blocks|single_transformer_blocks)\.\d+\."
    r"(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
    r"|ff\.net\.(0\.proj|2)|ff_context\.net\.(0\.proj|2)|proj_mlp|proj_out)"
)
"""Attention and MLP linears of every block; not the modulations, nor the layers at both ends."""


def lora_layers(module: nn.Module) -> list[nn.Linear]:
    """The linears that adapters of `add_lora` go onto."""
    return [
        layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and re.fullmatch(LORA_TARGETS, name)
    ]


def add_lora(module: Any, rank: int, alpha: float | None) -> None:
    """Freezes `module` and adds trainable float32 adapters: W x + (alpha / rank) B A x, B = 0 at first.

    Args:
        module: a FluxTransformer2DModel.
        rank: >= 1.
        alpha: None means twice the rank, a factor of 2.

    LoRA: arXiv:2106.09685. The adapters stay beside the weights: added into bfloat16 weights, most of a
    small update would be rounded away.
    """
    from peft import LoraConfig

    if rank < 1:
        raise ValueError(f"lora_rank={rank}: a LoRA needs rank >= 1 (0 trains all weights)")
    module.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=2 * rank if alpha is None else alpha, target_modules=LORA_TARGETS)
    # A is drawn at random: the same for every process and every start, whatever ran before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module.add_adapter(config)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def load_weights(module: Any, path: Path) -> bool:
    """Replaces or changes the weights of `module` by those at `path`; tells whether it was a LoRA.

    `path`: a folder with `pytorch_lora_weights.safetensors`, a transformer folder, a folder of a whole
    model (its transformer is taken), or one `.safetensors` file of either kind in diffusers' names. A LoRA
    is added into the weights, so give `module` in float32.

    Raises:
        ValueError: nothing of these, or weights of another architecture.
    """
    if path.is_dir() and (path / LORA_FILE).is_file():
        path = path / LORA_FILE
    if path.is_dir():
        state = _transformer_state(path)
    elif path.suffix == ".safetensors" and path.is_file():
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            state = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or no safetensors file ({error}); fetch it again") from error
    else:
        raise ValueError(f"no weights at {path}: give a folder in diffusers layout or a .safetensors file")
    if any(".lora_A." in key for key in state):
        _fuse_lora(module, path, state)
        return True
    _load_strictly(module, path, state)
    return False


def _transformer_state(folder: Path) -> dict[str, torch.Tensor]:
    from diffusers import FluxTransformer2DModel

    folder = folder / "transformer" if (folder / "transformer").is_dir() else folder
    if not (folder / "config.json").is_file():
        raise ValueError(f"no weights in {folder}: neither config.json of a transformer nor {LORA_FILE}")
    return FluxTransformer2DModel.from_pretrained(folder).state_dict()


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


def _load_strictly(module: nn.Module, path: Path, state: dict[str, torch.Tensor]) -> None:
    own = module.state_dict()
    problems = [f"{key} missing" for key in own.keys() - state.keys()]
    problems += [f"{key} unknown" for key in state.keys() - own.keys()]
    problems += [
        f"{key} has shape {tuple(state[key].shape)}, not {tuple(own[key].shape)}"
        for key in own.keys() & state.keys()
        if state[key].shape != own[key].shape
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:3])
        raise ValueError(f"{path} does not fit this model ({len(problems)} differences: {shown}, …)")
    module.load_state_dict(state)
