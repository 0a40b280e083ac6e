"""Published weight files of rewards: located by hub name, folder or file, and read without executing code."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.models.loading.damage import file_note
from g2rpo.models.loading.reading import read_header

TORCH_FILES = (".pt", ".pth", ".bin")


def locate(path: str | Path, files: Sequence[str], what: str) -> Path:
    """Returns the folder or file at `path`, or downloads `files` of the hub repository of that name.

    Args:
        path: a folder, a weight file or a hub name (owner/model).
        files: names of the files to download.
        what: what is located, for messages, such as "the hps reward".

    Raises:
        ValueError: the path is neither local nor on the hub, or the hub cannot be reached.
    """
    if not isinstance(path, str | Path):
        raise ValueError(f"{what}: path={path!r} must be a folder, a weight file or a hub name (owner/model)")
    local = Path(path).expanduser()
    if local.exists():
        return local
    name = str(path)
    if (
        name.count("/") != 1
        or name.startswith((".", "/", "~"))
        or local.suffix in (*TORCH_FILES, ".safetensors")
    ):
        raise ValueError(
            f"{what}: {name!r} does not exist; give a folder, a weight file or a hub name (owner/model)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"{what}: {name!r} is neither a local path nor available from the hub ({type(error).__name__}); "
            "check the name and the network, or copy the files to this machine and set path=FOLDER"
        ) from error


def weight_file(path: Path, names: Sequence[str]) -> Path:
    """Returns `path` if it is a file, else the first of `names` that exists in that folder.

    Raises:
        ValueError: the folder contains none of them.
    """
    if path.is_file():
        return path
    for name in names:
        if (path / name).is_file():
            return path / name
    raise ValueError(f"{path} contains no weights; looked for {', '.join(names)}")


def read_state(file: Path) -> dict[str, Tensor]:
    """Reads a .safetensors file or a file written by torch.save, on the CPU.

    Returns:
        Key -> tensor.

    Raises:
        ValueError: as in `read_torch`, or a damaged .safetensors file.
    """
    if file.suffix != ".safetensors":
        return read_torch(file)
    from safetensors.torch import load_file

    try:
        read_header(file)  # names the cause of any damage
    except ValueError as error:
        raise ValueError(f"{error}; fetch it again") from error
    return load_file(file)


def read_torch(file: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Reads a file written by torch.save with weights_only, which executes no code.

    Args:
        file: holds a mapping of names to tensors, or one under the key "state_dict".
        device: where the tensors are placed; "meta" reads only shapes and dtypes.

    Returns:
        Key -> tensor.

    Raises:
        ValueError: the file is damaged, contains code, or is no mapping of names to tensors.
    """
    if file.suffix not in TORCH_FILES:
        raise ValueError(
            f"{file} is not a weight file; give one that ends in .safetensors, {', '.join(TORCH_FILES)}"
        )
    with file.open("rb") as stream:
        start = stream.read(12)
    if not start.startswith((b"PK", b"\x80")):  # a zip archive, or a bare pickle (torch < 1.6)
        raise ValueError(f"{file} was not written by torch{file_note(file)}; fetch it again")
    if start.startswith(b"PK") and not zipfile.is_zipfile(file):
        size = f"{file.stat().st_size:,} bytes"
        raise ValueError(f"{file} is damaged (truncated: {size} of a longer zip archive); fetch it again")
    mapped = device == "cpu" and zipfile.is_zipfile(file)  # reads tensors when they are used
    try:
        content: Any = torch.load(file, map_location=device, weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} contains more than tensors; nothing in it was executed or loaded{file_note(file)}. "
            "Fetch it again from where it was published"
        ) from error
    except Exception as error:  # a damaged archive fails in many ways, none of which runs code
        if "TorchScript" in str(error):
            raise ValueError(f"{file} contains code and none of it was run{file_note(file)}") from error
        raise ValueError(
            f"{file} is damaged ({(str(error) or type(error).__name__).splitlines()[0]}); fetch it again"
        ) from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()
    ):
        raise ValueError(f"{file} contains no mapping of names to tensors; fetch it again")
    return dict(content)
