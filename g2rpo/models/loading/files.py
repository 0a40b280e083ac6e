"""Location of a model's files: a folder in diffusers layout, or a hub repository that is downloaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from g2rpo.models.loading.damage import file_kind, file_note

CONFIG_FILES = ("*/config.json", "*/tokenizer_config.json", "*/scheduler_config.json")
"""Patterns of the configuration files of a model's parts."""

_ATTENTION = ("attn_implementation", "_attn_implementation", "experts_implementation")
"""Entries of transformers' configurations that may name a kernel on the hub, which is code."""

_FULLY_READ_BYTES = 256 * 2**20
_SAMPLES, _SAMPLE_BYTES = 64, 2**20


def local_folder(name: str | Path, parts: Sequence[str]) -> Path:
    """Returns the folder of the model `name`: the path itself if it is a folder, else the hub's snapshot.

    Args:
        name: a folder or a name on the hub.
        parts: folders of the model that are downloaded.

    Raises:
        ValueError: `name` is neither a folder nor a reachable hub model, or the folder contains no model.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _hub_snapshot(str(name), [f"{part}/*" for part in parts])
    return _checked(folder)


def config_folder(name: str | Path) -> Path:
    """Returns a folder with the configuration of a model; only these files of a hub model are downloaded.

    Raises:
        ValueError: as `local_folder`.
    """
    folder = Path(name).expanduser()
    return _checked(folder if folder.is_dir() else _hub_snapshot(str(name), CONFIG_FILES))


def _checked(folder: Path) -> Path:
    if (folder / "adapter_config.json").is_file() and not (folder / "adapter_model.safetensors").is_file():
        raise ValueError(
            f"{folder} is a folder of PEFT (adapter_config.json) without adapter_model.safetensors; "
            "adapter_model.bin is a pickle, which can contain code and is not read: save the adapters as "
            "safetensors"
        )
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} is a folder of PEFT (adapter_config.json), which contains adapters and no model; give "
            "it as the model, and its base model with --base"
        )
    if not (folder / "model_index.json").is_file():
        raise ValueError(
            f"{folder} contains no model_index.json; a model is a folder in diffusers layout "
            "(model_index.json beside transformer/, vae/, text_encoder/ …), as `g2rpo export` writes it"
        )
    _check_no_code(folder)
    return folder


def _check_no_code(folder: Path) -> None:
    """Checks that a model's configuration names no code that comes with it; none would be run.

    Raises:
        ValueError: it does, or a configuration is damaged.
    """
    configs = [folder / "model_index.json", *sorted(file for p in CONFIG_FILES for file in folder.glob(p))]
    for file in configs:
        content = read_json(file)
        own = [f"auto_map {content['auto_map']!r}"] if content.get("auto_map") else []
        kind = content.get("_class_name")
        own += [f"_class_name {kind!r}"] if kind is not None and not isinstance(kind, str) else []
        own += [f"{key} {content[key]!r}" for key in _ATTENTION if "/" in str(content.get(key) or "")]
        if file.parent == folder:
            own += [f"{part} {entry!r}" for part, entry in content.items() if _is_own(folder, part, entry)]
        if own:
            raise ValueError(
                f"{file} refers to code of its own ({'; '.join(own)[:200]}); none of it was run. g2rpo "
                "builds models only from classes of diffusers and transformers: remove the entry if the "
                "model needs no code, or use another model"
            )


def _is_own(folder: Path, part: str, entry: Any) -> bool:
    """Whether an entry of model_index.json names a class in a Python file of the model's folder."""
    if not isinstance(entry, list) or not entry or not isinstance(entry[0], str):
        return False
    return (folder / part / f"{entry[0]}.py").is_file() or (folder / f"{entry[0]}.py").is_file()


def _hub_snapshot(name: str, patterns: Sequence[str]) -> Path:
    """Downloads the files of a hub model that match the patterns, with its index, and returns its folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if (file := Path(name).expanduser()).is_file():
        raise ValueError(
            f"{name} is a file, and a model is a folder, a hub name or tiny; weights alone are "
            f"a .safetensors file{file_note(file)}"
        )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"no model folder {name!r}; give a folder, a hub name such as owner/model, or tiny")
    try:
        return Path(
            snapshot_download(name, allow_patterns=["model_index.json", "README.md", "LICENSE*", *patterns])
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"{name!r} is neither a folder here nor a hub model that can be read ({type(error).__name__}); "
            "check the name, the network, and for gated models accept the licence on its page and run "
            "`hf auth login`"
        ) from error


def component_class(folder: Path, part: str) -> Any:
    """Returns the transformers class that model_index.json names for `part`, as the diffusers pipeline does.

    Raises:
        ValueError: model_index.json names no network or tokenizer of transformers for `part`.
    """
    import transformers

    index = read_json(folder / "model_index.json")
    entry = index.get(part)
    kind = None
    if isinstance(entry, list) and len(entry) == 2 and entry[0] == "transformers":
        kind = getattr(transformers, str(entry[1]), None)
    bases = (transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase)
    if not (isinstance(kind, type) and issubclass(kind, bases)):  # no Auto class, which may run remote code
        raise ValueError(
            f"{folder / 'model_index.json'} names no transformers class for {part!r}, but {entry!r}; fetch "
            "the model again"
        )
    return kind


def dtype_argument(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Returns the keyword argument that sets the dtype in diffusers' `from_pretrained`.

    It is `torch_dtype` up to diffusers 0.39, which ignores `dtype`, and `dtype` from 0.40 on.
    """
    from importlib.metadata import version

    major, minor = (int(part) for part in version("diffusers").split(".")[:2])
    return {"dtype" if (major, minor) >= (0, 40) else "torch_dtype": dtype}


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ValueError: the file is missing or contains no JSON object; the message names the file.
    """
    if not path.is_file():
        raise ValueError(f"missing {path}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also text that is not UTF-8
        kind = file_kind(path) or ""
        cause = f"it is {kind}" if kind.startswith(("a Git LFS", "a web page", "empty")) else error
        raise ValueError(f"{path} is not valid JSON: {cause}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold a JSON object, got {type(content).__name__}")
    return content


def fingerprint(paths: Iterable[Path]) -> str:
    """Returns the sha256 (64 hex digits) of the names and contents of all files under `paths`.

    Of files above 256 MiB, only the size and 64 evenly spaced blocks of 1 MiB are hashed: a retrained network
    differs everywhere, so this suffices, and reading 9.5 GB of T5 at each start would be slow.
    """
    digest = hashlib.sha256()
    for root in paths:
        files = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.relative_to(root.parent)}:{size};".encode())
            with file.open("rb") as stream:
                if size <= _FULLY_READ_BYTES:
                    digest.update(stream.read())
                    continue
                for i in range(_SAMPLES):
                    stream.seek(i * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                    digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
