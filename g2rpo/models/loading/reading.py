"""Reading a network's safetensors files: headers first, then of each tensor the rows that live here.

A process holds one tensor of a file at a time, or its rows alone where the network is sharded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from g2rpo.models.flux.layout import Source
from g2rpo.models.loading.files import read_json
from g2rpo.runtime.sharding import local

Header = dict[str, tuple[str, tuple[int, ...]]]

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
"""Dtypes of a network's weights, as safetensors names them."""

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


def read_header(path: Path) -> Header:
    """Key -> (dtype as safetensors names it, shape) of a whole, sound file; no tensor is read.

    Raises:
        ValueError: the file is damaged, is something else, or cannot be read; the message says which.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:  # torch would claim the memory of it all
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (no dict)
            return {key: (str(one.get_dtype()), tuple(one.get_shape())) for key, one in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} {_cause_of_damage(path, error)}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error})") from error


def _cause_of_damage(path: Path, error: Exception) -> str:
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(512)
    if head.startswith(b"version http"):
        return "is a git-lfs pointer: `git lfs pull` fetches the file"
    if head.startswith(b"PK\x03\x04"):
        return "is damaged (a zip archive, as PyTorch's .pt files are, and not safetensors)"
    if head.lstrip().startswith(b"<"):
        return "is damaged (a web page: is a login needed to fetch the file?)"
    if (declared := _declared_bytes(path)) is not None and declared > size:
        return f"is damaged (cut off: {size:,} of {declared:,} bytes)"
    return f"is damaged ({error})"


def _declared_bytes(path: Path) -> int | None:
    """Size that a safetensors file should have by its own header; None: the header is not whole."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > path.stat().st_size:
            return None
        try:
            entries = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
            return 8 + length + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return None


def header(path: Path) -> dict[str, Tensor]:
    """Key -> a tensor of that shape without storage.

    Raises:
        ValueError: as `read_header`.
    """
    try:
        shapes = {key: shape for key, (_, shape) in read_header(path).items()}
    except ValueError as error:
        raise ValueError(f"{error}; fetch it again") from error
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


def check_dtypes(places: Places) -> None:
    """Whether the tensors at `places` hold floating-point numbers, from the headers of their files.

    Raises:
        ValueError: integers, booleans, complex numbers or packed formats.
    """
    found = {path: read_header(path) for path in dict.fromkeys(path for path, _ in places.values())}
    wrong = sorted(
        {
            f"{source.key} is {found[path][source.key][0]} in {path}"
            for path, source in places.values()
            if found[path][source.key][0] not in FLOATS
        }
    )
    if wrong:
        raise ValueError(
            f"{len(wrong)} tensors hold no floating-point numbers: {'; '.join(wrong[:3])}; allowed are "
            f"{', '.join(FLOATS)}: g2rpo reads no quantised weights, take the file before quantisation"
        )


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    return all(map(math.isfinite, value_range(tensor))) if tensor.numel() else True


def value_range(tensor: Tensor) -> tuple[float, float]:
    """Smallest and largest element, both NaN if one is NaN; one pass, without a copy but for float8."""
    low, high = torch.aminmax(tensor if tensor.dtype.itemsize > 1 else tensor.float())
    return float(low), float(high)


@torch.no_grad()
def copy_rows(module: nn.Module, places: Places) -> None:
    """Copies what this process holds of each parameter; names and shapes are right (`differences`).

    Raises:
        ValueError: a tensor with NaN or infinite values, or no floating-point numbers.
    """
    from safetensors import safe_open

    check_dtypes(places)
    parameters = dict(module.named_parameters())
    for path in dict.fromkeys(path for path, _ in places.values()):
        with safe_open(path, framework="pt") as file:
            for name, (held_by, source) in places.items():
                first, last = local_rows(parameters[name])
                if held_by == path and first < last:
                    stored: Any = file.get_slice(source.key)
                    rows = source.read(stored, first, last)
                    parameter = local(parameters[name])
                    parameter.copy_(rows)
                    # On the device it is free; float8 has neither infinities nor this reduction.
                    if not all_finite(parameter if parameter.dtype.itemsize > 1 else rows):
                        raise ValueError(
                            f"{path}: {source.key} has NaN or infinite values; weights must be finite: "
                            "fetch the file again, or take an earlier checkpoint of it"
                        )


def local_rows(parameter: Tensor) -> tuple[int, int]:
    """First and last (exclusive) row of a parameter that this process holds."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.shape[0]
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return offset[0], offset[0] + shape[0]
