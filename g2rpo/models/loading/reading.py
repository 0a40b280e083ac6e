"""Reading of a network's safetensors files: first the headers, then each tensor's rows of this process.

A process holds one tensor of a file at a time, or only its rows if the network is sharded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.models.loading.damage import safetensors_damage
from g2rpo.models.loading.files import read_json
from g2rpo.models.loading.rows import Source
from g2rpo.runtime.progress import phase
from g2rpo.runtime.sharding import local

Header = dict[str, tuple[str, tuple[int, ...]]]
"""Key -> (dtype as safetensors names it, shape)."""

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
"""Dtypes of a network's weights, as safetensors names them."""

PICKLED_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Endings of files that are usually pickles, which can contain code."""

Locations = Mapping[str, tuple[Path, Source]]
"""Parameter name -> the file that contains it, and its rows there."""


def weight_files(folder: Path) -> dict[str, Path]:
    """Returns parameter name -> safetensors file for a folder that diffusers wrote, in one file or several.

    Raises:
        ValueError: the folder has no such files, or one of them is missing, damaged or outside the folder.
    """
    name = "diffusion_pytorch_model.safetensors"
    index = folder / f"{name}.index.json"
    if index.is_file():
        return index_files(index)
    if not (folder / name).is_file():
        raise ValueError(
            f"{folder} contains no {name} (nor an index of several){other_files(folder)}; fetch it again"
        )
    return dict.fromkeys(meta_tensors(folder / name), folder / name)


def index_files(index: Path) -> dict[str, Path]:
    """Returns key -> file for an index such as `model.safetensors.index.json`, whose files are beside it.

    Raises:
        ValueError: as `index_names`, or it names a file that is missing.
    """
    files = {key: index.parent / name for key, name in index_names(index).items()}
    if missing := sorted({file for file in files.values() if not file.is_file()}):
        raise ValueError(f"{index} names {missing[0].name}, which does not exist; fetch the model again")
    return files


def index_names(index: Path) -> dict[str, str]:
    """Returns key -> name of its file for an index such as `model.safetensors.index.json`.

    Raises:
        ValueError: the index is damaged, or names a file that is no safetensors file or outside its folder.
    """
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise ValueError(f"{index} has no weight_map from keys to file names; fetch the model again")
    for file in dict.fromkeys(names.values()):
        _check_shard(index, file)
    return names


def _check_shard(index: Path, file: str) -> None:
    if file in ("", ".", "..") or PurePath(file).name != file or "\\" in file:
        raise ValueError(
            f"{index} names the file {file!r}, which is outside its folder; the files of an index are beside "
            "it, so the index was damaged or changed: fetch the model again from a source that you trust"
        )
    if not file.endswith(".safetensors"):
        raise ValueError(
            f"{index} names {file!r}; g2rpo reads only safetensors, because a pickle can contain code"
        )
    path = index.parent / file
    if path.is_file() and not _stays_inside(path):
        raise ValueError(
            f"{index} names {file}, a link to {path.resolve()}, which is outside its folder; put the file "
            "itself there"
        )


def _stays_inside(path: Path) -> bool:
    """Whether a file is in its folder, or is a link of the hub's cache to the same repository's files."""
    folder, target = path.parent.resolve(), path.resolve()
    roots = [folder]
    # The hub's cache: REPOSITORY/snapshots/REVISION/... links to REPOSITORY/blobs/HASH.
    roots += [parent.parent / "blobs" for parent in folder.parents if parent.name == "snapshots"]
    return any(target.is_relative_to(root) for root in roots)


def other_files(folder: Path) -> str:
    """Names pickles of a folder that has no safetensors, as the end of a message; empty: there are none."""
    others = sorted(f.name for f in folder.glob("*") if f.suffix in PICKLED_ENDINGS and f.is_file())
    if not others:
        return ""
    return (
        f" ({', '.join(others[:3])} is a pickle, which can contain code, and is not read: save the model as "
        "safetensors)"
    )


def read_header(path: Path) -> Header:
    """Reads the header of a safetensors file and checks that the file is complete; reads no tensor.

    Raises:
        ValueError: the file is damaged, has another format, or cannot be read; the message says which.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():  # opening a named pipe would wait for ever
        raise ValueError(f"{path} is not a file" if path.exists() else f"{path} does not exist")
    if not os.access(path, os.R_OK):  # safetensors would say that it is not there
        raise ValueError(f"{path} cannot be read (Permission denied)")
    try:
        with safe_open(path, framework="np") as file:  # torch would allocate memory for the complete file
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (no dict)
            return {key: (str(s.get_dtype()), tuple(s.get_shape())) for key, s in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} {safetensors_damage(path, error)}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error})") from error


def meta_tensors(path: Path) -> dict[str, Tensor]:
    """Returns key -> tensor on the meta device, with the shape that the header of a file states.

    Raises:
        ValueError: as `read_header`.
    """
    try:
        shapes = {key: shape for key, (_, shape) in read_header(path).items()}
    except ValueError as error:
        raise ValueError(f"{error}; fetch it again") from error
    return {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}


def meta_tensors_of(files: Mapping[str, Path]) -> dict[str, Tensor]:
    """Returns `meta_tensors` of several files.

    Args:
        files: key -> file; a key that its file does not contain is omitted from the result.
    """
    by_file = {path: meta_tensors(path) for path in dict.fromkeys(files.values())}
    return {key: by_file[path][key] for key, path in files.items() if key in by_file[path]}


def mismatches(module: nn.Module, given: Mapping[str, Tensor]) -> list[str]:
    """Lists how the names and shapes of `given` differ from those of the module's parameters."""
    own = dict(module.named_parameters())
    problems = [f"{name} missing" for name in own.keys() - given.keys()]
    problems += [f"{name} unknown" for name in given.keys() - own.keys()]
    problems += [
        f"{name} has shape {tuple(given[name].shape)}, not {tuple(own[name].shape)}"
        for name in own.keys() & given.keys()
        if given[name].shape != own[name].shape
    ]
    return sorted(problems)


def read_weights(module: nn.Module, files: Mapping[str, Path], folder: Path) -> None:
    """Copies each parameter of `module` from the tensor of the same name.

    Args:
        module: a network, sharded or not.
        files: parameter name -> safetensors file.
        folder: folder of the files, for the error message.

    Raises:
        ValueError: names or shapes differ, or a file is damaged.
    """
    if problems := mismatches(module, meta_tensors_of(files)):
        shown = "; ".join(problems[:3])
        raise ValueError(f"{folder} does not fit its config.json ({len(problems)} differences: {shown}, …)")
    copy_rows(module, {name: (path, Source(name)) for name, path in files.items()})


def check_dtypes(locations: Locations) -> None:
    """Checks in the headers of the files that the tensors at `locations` are floating-point tensors.

    Raises:
        ValueError: a tensor contains integers, booleans, complex numbers or a packed format.
    """
    headers = {path: read_header(path) for path in dict.fromkeys(path for path, _ in locations.values())}
    wrong = sorted(
        {
            f"{source.key} is {headers[path][source.key][0]} in {path}"
            for path, source in locations.values()
            if headers[path][source.key][0] not in FLOATS
        }
    )
    if wrong:
        raise ValueError(
            f"{len(wrong)} tensors do not hold floating-point numbers: {'; '.join(wrong[:3])}; allowed are "
            f"{', '.join(FLOATS)}: g2rpo does not read quantised weights, use the unquantised file"
        )


def all_finite(tensor: Tensor) -> bool:
    """Returns whether no element is NaN or infinite."""
    return all(map(math.isfinite, value_range(tensor))) if tensor.numel() else True


def value_range(tensor: Tensor) -> tuple[float, float]:
    """Returns the smallest and the largest element; both are NaN if any element is.

    It takes one pass and no copy, except for float8.
    """
    tensor = tensor.detach()
    low, high = torch.aminmax(tensor if tensor.dtype.itemsize > 1 else tensor.float())
    return float(low), float(high)


@torch.no_grad()
def copy_rows(module: nn.Module, locations: Locations) -> None:
    """Copies this process's rows of each parameter; names and shapes must fit (see `mismatches`).

    Raises:
        ValueError: a tensor has NaN or infinite values, or is not a floating-point tensor.
    """
    from safetensors import safe_open

    check_dtypes(locations)
    parameters = dict(module.named_parameters())
    with phase("weights", len(locations), "tensors") as reading:
        for path in dict.fromkeys(path for path, _ in locations.values()):
            with safe_open(path, framework="pt") as file:
                for name, (source_path, source) in locations.items():
                    if source_path == path:
                        _copy(parameters[name], path, file, source)
                        reading.add()


def _copy(target: Tensor, path: Path, file: Any, source: Source) -> None:
    """Copies this process's rows of one parameter from an open file."""
    first, last = local_rows(target)
    if first >= last:
        return
    rows = source.read(file.get_slice(source.key), first, last)
    parameter = local(target)
    parameter.copy_(rows)
    # The check costs nothing on the device; float8 has neither infinities nor this reduction.
    if not all_finite(parameter if parameter.dtype.itemsize > 1 else rows):
        raise ValueError(
            f"{path}: {source.key} has NaN or infinite values; weights must be finite: fetch the file again, "
            "or use an earlier checkpoint"
        )


def local_rows(parameter: Tensor) -> tuple[int, int]:
    """Returns the first and the last (exclusive) row of a parameter that this process holds."""
    sharded: Any = parameter
    if not hasattr(parameter, "to_local"):
        return 0, parameter.shape[0]
    # Imported here: it takes longer than the rest of torch.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        sharded.shape, sharded.device_mesh, sharded.placements
    )
    return offset[0], offset[0] + shape[0]
