"""Loading of weights into a transformer: full weights, or a LoRA that is added to the present ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from g2rpo.models.loading.damage import file_note
from g2rpo.models.loading.files import read_json
from g2rpo.models.loading.reading import (
    Locations,
    all_finite,
    check_dtypes,
    copy_rows,
    index_names,
    meta_tensors,
    meta_tensors_of,
    mismatches,
    weight_files,
)
from g2rpo.models.loading.rows import Source
from g2rpo.models.shapes import targeted
from g2rpo.models.transformer.architecture import Architecture
from g2rpo.models.transformer.lora_checks import check_lora, linear_shapes, read_lora
from g2rpo.models.transformer.lora_config import PEFT_CONFIG, PEFT_FILE
from g2rpo.models.transformer.lora_keys import is_lora
from g2rpo.models.transformer.weight_keys import other_sizes, own_keys, quantised
from g2rpo.runtime.processes import rank

LOG = logging.getLogger(__name__)

LORA_FILE = "pytorch_lora_weights.safetensors"
COMFYUI_LORA_FILE = "comfyui_lora.safetensors"
SINGLE_FILE = "model.safetensors"


def lora_layers(
    architecture: Architecture, module: nn.Module, targets: Sequence[str] | None = None
) -> list[nn.Linear]:
    """Returns the linears that get adapters in `add_lora`.

    Args:
        architecture: class of the network.
        module: the network.
        targets: ends of layer names; None: the architecture's pattern.

    Raises:
        ValueError: no linear's name ends in one of the targets.
    """
    linears = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    return [linears[name] for name in targeted(linears, targets, architecture.lora_targets)]


def add_lora(
    architecture: Architecture,
    module: Any,
    rank: int,
    alpha: float | None,
    targets: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Freezes `module` and adds trainable adapters: W x + (alpha / rank) B A x (LoRA, arXiv:2106.09685).

    B is initially 0. The adapters are not merged into the weights, because bfloat16 weights would round away
    most of a small update.

    Args:
        architecture: class of the network.
        module: the network.
        rank: >= 1.
        alpha: None: twice the rank, a factor of 2.
        targets: ends of layer names, such as "attn.to_q"; None: the architecture's pattern.
        dtype: dtype of the adapters.

    Raises:
        ValueError: rank < 1, or a target that matches nothing.
    """
    from peft import LoraConfig

    if rank < 1:
        raise ValueError(f"lora_rank={rank}: a LoRA needs rank >= 1 (0 trains all weights)")
    module.requires_grad_(False)
    lora_layers(architecture, module, targets)  # its error names the target that matches nothing
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules=architecture.lora_targets if targets is None else list(targets),
    )
    # A is random; a fixed seed makes it the same on every process and at every start.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module.add_adapter(config)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def load_weights(architecture: Architecture, module: Any, path: Path) -> bool:
    """Loads the weights at `path` into `module`: full weights replace its weights, a LoRA is added to them.

    Args:
        architecture: class of the network.
        module: the network. For a LoRA it must be float32 and not sharded; of full weights, a
            sharded module reads only its rows.
        path: a folder with one of the files that `weight_file` knows, a transformer folder, a model folder
            (its transformer is used), or a `.safetensors` file with a transformer or a LoRA. Keys are in
            diffusers' layout or in the original's, if the architecture has one.

    Returns:
        Whether the weights are a LoRA.

    Raises:
        ValueError: `path` contains no such weights, or weights of another architecture, or values that are
            not finite.
    """
    locations = _locations(architecture, module, path)
    if locations is not None:
        copy_rows(module, locations)
        return False
    _add_lora_file(architecture, module, weight_file(path) or path)
    return True


def check_weights(architecture: Architecture, module: Any, path: Path) -> bool:
    """Checks that the weights at `path` fit `module`, which may be on the meta device.

    Only the headers of full weights are read; `load_weights` checks their values while copying. The values of
    a LoRA are checked here.

    Returns:
        Whether the weights are a LoRA.

    Raises:
        ValueError: as `load_weights`.
    """
    locations = _locations(architecture, module, path)
    if locations is not None:
        try:
            check_dtypes(locations)
        except ValueError as error:
            raise ValueError(f"{path} does not fit this model: {error}") from error
        return False
    check_lora(weight_file(path) or path, linear_shapes(module), module.config, architecture.layout)
    return True


def _locations(architecture: Architecture, module: Any, path: Path) -> Locations | None:
    """Returns where the weights at `path` contain the rows of each parameter; None: they are a LoRA."""
    files = _files(architecture, path)
    given = meta_tensors_of(files)
    if not given:
        raise ValueError(f"{path} is empty: it has no tensors; fetch or export it again")
    if is_lora(given):
        return None
    if (kind := quantised(given)) is not None:
        raise ValueError(f"{path} does not fit this model: {kind}")
    try:
        own = own_keys(given, dict(module.named_parameters()), module.config, architecture.layout)
        locations = {name: (files[key], Source(key)) for name, key in own.items()}
        found = {name: given[key] for name, key in own.items()}
        layout = architecture.layout
        if layout is not None and layout.recognises(found):
            stored, found = own, layout.to_diffusers(found, module.config)
            locations = {
                name: (files[stored[source.key]], replace(source, key=stored[source.key]))
                for name, source in layout.sources(module.config).items()
            }
    except ValueError as error:
        sizes = other_sizes(given, module, architecture)
        raise ValueError(f"{path} does not fit this model: {sizes}{error}") from error
    if problems := mismatches(module, found):
        shown = "; ".join(problems[:3])
        sizes = other_sizes(given, module, architecture)
        raise ValueError(
            f"{path} does not fit this model: {sizes}{len(problems)} differences of {len(given)} tensors: "
            f"{shown}{', …' if len(problems) > 3 else ''}"
        )
    return locations


def _files(architecture: Architecture, path: Path) -> dict[str, Path]:
    """Returns key -> file for the weights at `path`."""
    path = weight_file(path) or path
    if path.is_dir():
        folder = path / "transformer" if (path / "transformer").is_dir() else path
        if (folder / PEFT_CONFIG).is_file():
            raise ValueError(
                f"{folder} is a folder of PEFT ({PEFT_CONFIG}) without {PEFT_FILE}; g2rpo reads no other "
                "file of PEFT, because adapter_model.bin is a pickle, which can contain code: save the "
                "adapters as safetensors"
            )
        for index in sorted(folder.glob("*.safetensors.index.json")):
            index_names(index)  # says what is wrong with it
        if not (folder / "config.json").is_file():
            raise ValueError(f"no weights in {folder}: neither config.json of a transformer nor {LORA_FILE}")
        kind = read_json(folder / "config.json").get("_class_name", architecture.network)
        if kind != architecture.network:
            raise ValueError(
                f"{path} does not fit this model: it contains a {kind}, but this model's transformer is a "
                f"{architecture.network}; give weights of that class, or the model that they belong to"
            )
        return weight_files(folder)
    if path.suffix == ".safetensors" and path.is_file():
        return dict.fromkeys(meta_tensors(path), path)
    raise ValueError(
        f"no weights at {path}: give a folder in diffusers layout or a .safetensors file{file_note(path)}"
    )


def weight_file(folder: Path) -> Path | None:
    """Returns the single weight file of a folder that is an export or a LoRA; None for other folders."""
    if (folder / LORA_FILE).is_file():
        return folder / LORA_FILE
    if (folder / PEFT_CONFIG).is_file() and (folder / PEFT_FILE).is_file():
        return folder / PEFT_FILE
    if (folder / "config.json").is_file() or (folder / "model_index.json").is_file():
        return None  # beside a configuration, files of these names may belong to the network
    names = (COMFYUI_LORA_FILE, SINGLE_FILE)
    return next((folder / name for name in names if (folder / name).is_file()), None)


def is_adapter_file(file: Path) -> bool:
    """Whether `weight_file` returned a file of adapters, by its name."""
    return file.name in (LORA_FILE, COMFYUI_LORA_FILE, PEFT_FILE)


@torch.no_grad()
def _add_lora_file(architecture: Architecture, module: Any, path: Path) -> None:
    """Adds scale B A to the weight of each layer, computed in float32 or better."""
    adapters, note = read_lora(path, linear_shapes(module), module.config, architecture.layout)
    changed = False
    for name, (down, up, scale) in adapters.items():
        weight = module.get_submodule(name).weight
        options = {"device": weight.device, "dtype": torch.promote_types(weight.dtype, torch.float32)}
        delta = (up.to(**options) @ down.to(**options)) * scale
        if not all_finite(delta):
            raise ValueError(
                f"{path}: the product of A, B and alpha / rank of {name} is not finite (largest values "
                f"{float(down.abs().max()):.3g} and {float(up.abs().max()):.3g}, scale {scale:g}); "
                "use adapters of a training run that did not diverge"
            )
        tuned = weight + delta.to(weight.dtype)
        changed = changed or not torch.equal(tuned, weight)
        weight.copy_(tuned)
    if not changed and not note:
        note = "the adapters change nothing: their products are 0 or too small for the model's precision"
    if note and not rank():
        LOG.warning("%s: %s", path, note)
