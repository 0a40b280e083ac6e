"""Rewrites checkpoints as safetensors files, by the reader of the checkout that is on the module path.

Standard input: a JSON list of [checkpoint folder, file to write]. Run as `python -c` in a process of its own.
A checkout without a reader of its own has checkpoints of torch.distributed.checkpoint; what is no tensor
there (an optimizer's parameter groups) is left out.
"""

import contextlib
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

READERS = ("g2rpo.run.checkpoint_index", "g2rpo.checkpoint_index")


def read_with_torch(path: str) -> dict[str, torch.Tensor]:
    """Tensors of a torch.distributed.checkpoint folder under their dotted names."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return tensors


def reader() -> Callable[[str], dict[str, torch.Tensor]]:
    """`read_tensors` of the checkout, else `read_with_torch`."""
    for name in READERS:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("g2rpo"):
                raise
            continue
        if hasattr(module, "read_tensors"):
            found: Callable[[str], dict[str, torch.Tensor]] = module.read_tensors
            return found
    return read_with_torch


def main() -> None:
    """Reads every checkpoint that standard input names."""
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("torchao.optim")  # 8-bit moments are tensors of its classes
    read = reader()
    for checkpoint, target in json.load(sys.stdin):
        tensors = {name: tensor.detach().cpu() for name, tensor in read(checkpoint).items()}
        plain = {}
        for name, tensor in tensors.items():
            flatten = getattr(tensor, "__tensor_flatten__", None)
            if flatten is None or type(tensor) is torch.Tensor:
                plain[name] = tensor.clone(memory_format=torch.contiguous_format)
                continue
            for part in flatten()[0]:
                plain[f"{name}.{part}"] = getattr(tensor, part).contiguous().clone()
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        save_file(plain, target)


if __name__ == "__main__":
    main()
