"""Published reward files: found by hub name, folder or file, and read without running anything in them."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TORCH_FILES = (".pt", ".pth", ".bin")


def locate(path: str | Path, files: Sequence[str], what: str) -> Path:
    """The folder or file at `path`, else the hub repository of that name, of which `files` are fetched.

    Args:
        what: for messages, such as "the hps reward".

    Raises:
        ValueError: neither here nor on the hub, or the hub cannot be reached.
    """
    if not isinstance(path, str | Path):
        raise ValueError(f"{what}: {path!r} is no folder, weight file or hub name")
    place = Path(path).expanduser()
    if place.exists():
        return place
    name = str(path)
    if (
        name.count("/") != 1
        or name.startswith((".", "/", "~"))
        or place.suffix in (*TORCH_FILES, ".safetensors")
    ):
        raise ValueError(
            f"{what}: no {name!r} here; give a folder, a weight file or a hub name (owner/model)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"{what}: {name!r} is neither here nor can the hub give it ({type(error).__name__}); check the "
            "name and the network, or copy its files here and give their folder (path=FOLDER)"
        ) from error


def weights_at(place: Path, names: Sequence[str]) -> Path:
    """The file itself, or the first of `names` in the folder.

    Raises:
        ValueError: a folder with none of them.
    """
    if place.is_file():
        return place
    for name in names:
        if (place / name).is_file():
            return place / name
    raise ValueError(f"{place} holds no weights; looked for {', '.join(names)}")


def read_state(file: Path) -> dict[str, Tensor]:
    """Key -> tensor of a .safetensors file or of one that torch wrote, on the CPU.

    Raises:
        ValueError: as `read_torch`, or no file of either kind.
    """
    if file.suffix != ".safetensors":
        return read_torch(file)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}); fetch it again") from error


def read_torch(file: Path, device: str = "cpu") -> dict[str, Tensor]:
    """The same of a file that torch wrote; `{"state_dict": ...}` is opened.

    Read with weights_only: tensors and plain containers, no code.

    Args:
        device: "meta" reads shapes and dtypes alone.

    Raises:
        ValueError: damaged, holding code, or no mapping of names to tensors.
    """
    if file.suffix not in TORCH_FILES:
        raise ValueError(f"{file} is no weight file; those end in .safetensors, {', '.join(TORCH_FILES)}")
    with file.open("rb") as stream:
        start = stream.read(12)
    if start == b"version http":
        raise ValueError(f"{file} is a git-lfs pointer: `git lfs pull` fetches the file")
    if start.startswith(b"PK") and not zipfile.is_zipfile(file):
        raise ValueError(f"{file} is damaged (cut short); fetch it again")
    if not start.startswith((b"PK", b"\x80")):  # a zip archive, or a bare pickle as torch wrote before 1.6
        raise ValueError(f"{file} is no file of torch; fetch it again")
    mapped = device == "cpu" and zipfile.is_zipfile(file)  # read as they are used, not all at once
    try:
        content: Any = torch.load(file, map_location=device, weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} holds more than tensors: nothing in it was run or loaded. Fetch "
            "it again from where it was published"
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{file} is damaged ({str(error).splitlines()[0]}); fetch it again") from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()
    ):
        raise ValueError(f"{file} holds no mapping of names to tensors")
    return dict(content)
