"""Reading a network's safetensors files: headers first, then of each tensor the rows that live here.

A process holds one tensor of a file at a time, or its rows alone where the network is sharded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from g2rpo.distributed import local
from g2rpo.models.files import read_json
from g2rpo.models.layout import Source

Places = Mapping[str, tuple[Path, Source]]
"""Parameter name -> the file that holds it, and its rows there."""


def weight_files(folder: Path) -> dict[str, Path]:
    """Parameter name -> safetensors file, of a folder that diffusers wrote, in one file or several.

    Raises:
        ValueError: no such files, or one of them missing or damaged.
    """
    name = "diffusion_pytorch_model.safetensors"
    index = folder / f"{name}.index.json"
    if index.is_file():
        files = {key: folder / str(file) for key, file in read_json(index)["weight_map"].items()}
        if missing := sorted({file for file in files.values() if not file.is_file()}):
            raise ValueError(f"{index} names {missing[0].name}, which is not there; fetch the model again")
        return files
    if not (folder / name).is_file():
        raise ValueError(f"{folder} holds no {name} (nor an index of several); fetch the model again")
    return dict.fromkeys(header(folder / name), folder / name)


def header(path: Path) -> dict[str, Tensor]:
    """Key -> a tensor of that shape without storage.

    Raises:
        ValueError: a damaged file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 (no dict)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); fetch it again") from error
    return {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}


def headers(files: Mapping[str, Path]) -> dict[str, Tensor]:
    """As `header`, of the keys of several files; a key that its file lacks is left out."""
    read = {path: header(path) for path in dict.fromkeys(files.values())}
    return {key: read[path][key] for key, path in files.items() if key in read[path]}


def differences(module: nn.Module, given: Mapping[str, Tensor]) -> list[str]:
    """Where names and shapes are not those of the module's parameters."""
    own = dict(module.named_parameters())
    found = [f"{name} missing" for name in own.keys() - given.keys()]
    found += [f"{name} unknown" for name in given.keys() - own.keys()]
    found += [
        f"{name} has shape {tuple(given[name].shape)}, not {tuple(own[name].shape)}"
        for name in own.keys() & given.keys()
        if given[name].shape != own[name].shape
    ]
    return sorted(found)


def read_weights(module: nn.Module, files: Mapping[str, Path], where: Path) -> None:
    """Copies each parameter of `module` from its file, of the same name.

    Raises:
        ValueError: names or shapes that differ, or a damaged file.
    """
    if problems := differences(module, headers(files)):
        shown = "; ".join(problems[:3])
        raise ValueError(f"{where} does not fit its config.json ({len(problems)} differences: {shown}, …)")
    copy_rows(module, {name: (path, Source(name)) for name, path in files.items()})


@torch.no_grad()
def copy_rows(module: nn.Module, places: Places) -> None:
    """Copies what this process holds of each parameter; names and shapes are right (`differences`)."""
    from safetensors import safe_open

    parameters = dict(module.named_parameters())
    for path in dict.fromkeys(path for path, _ in places.values()):
        with safe_open(path, framework="pt") as file:
            for name, (held_by, source) in places.items():
                first, last = local_rows(parameters[name])
                if held_by == path and first < last:
                    stored: Any = file.get_slice(source.key)
                    local(parameters[name]).copy_(source.read(stored, first, last))


def local_rows(parameter: Tensor) -> tuple[int, int]:
    """First and last (exclusive) row of a parameter that this process holds."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.shape[0]
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return offset[0], offset[0] + shape[0]
