"""Compares the files of one case, bit for bit, by what they hold.

NOT_COMPARED lists the files that are not compared, NOT_COMPARED_KEYS the entries, each with the reason. A
checkpoint's state.json is compared as it is, its tensors after `read_checkpoints`: their format may change.
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor

NOT_COMPARED = {
    "*events.out.tfevents*": "TensorBoard's event files hold times; their numbers are those of metrics.jsonl",
    "*.lock": "an empty file that processes lock",
    "*curve.png": "a drawing of metrics.jsonl, with titles in prose",
    "*README.md": "a model card in prose; its numbers are those of metrics.jsonl and config.toml",
    "*/__pycache__/*": "byte code",
    "__pycache__/*": "byte code",
}
NOT_COMPARED_KEYS = {
    "seconds": "a time, as is every key that starts with `seconds`",
    "peak_memory_gb": "memory",
    "out": "the run folder, which a checkout may make absolute",
    "cache": "the embedding cache, which a checkout may make absolute",
    "tensorboard": "the earlier form of loggers, which changes no number",
    "loggers": "likewise",
    "files": "sizes of a checkpoint's files, whose format may change",
    "optimizer": "its settings, which a3a5320 stored with the tensors; resumed runs show that both are read",
    "stop_after": "where a run was stopped; a resumed run differs from a whole one",
    "resume": "likewise",
}
ADAPTER_TOLERANCE = 1e-6
"""Relative, in float32: exports of adapters may hold alpha / rank in the matrices or beside them, so their
product (alpha / rank) B A is compared instead of the matrices."""
COUNTED = ("iterations", "metrics", "tensors", "images", "files")
TRAINED = "tensors"
"""Folder of a case's results with the tensors of its checkpoints."""


@dataclass
class Comparison:
    """What was compared in one case, and what differs."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    differences: list[str] = field(default_factory=list)
    additional: bool = False  # whether entries that only NEW has are allowed

    def differ(self, where: str, base: object, new: object) -> None:
        """Notes a difference: where it is, and both values."""
        self.differences.append(f"{where}: BASE {base}, NEW {new}")

    def names(self, where: str, base: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
        """The names that both have; the others are differences."""
        for name in base.keys() - new.keys():
            self.differences.append(f"{where}: {name} is missing in NEW")
        if not self.additional:
            self.differences += [f"{where}: {name} is only in NEW" for name in new.keys() - base.keys()]
        return [name for name in base if name in new]


def compare_folders(base: Path, new: Path, *, additional: bool = False) -> Comparison:
    """Compares all files of two folders."""
    found = Comparison(additional=additional)
    files, files_new = _files(base), _files(new)
    for name in found.names("files", files, files_new):
        _comparer(name)(found, name, files[name], files_new[name])
    return found


def _files(folder: Path) -> dict[str, Path]:
    """Relative name -> file, of those that are compared."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: path for name, path in files.items() if _is_compared_file(name)}


def _is_compared_file(name: str) -> bool:
    if "checkpoints/step_" in name:
        return name.endswith("/state.json")
    return not any(fnmatch(name, pattern) for pattern in NOT_COMPARED)


Comparer = Callable[[Comparison, str, Path, Path], None]


def _comparer(name: str) -> Comparer:
    return next((compare for pattern, compare in _COMPARERS.items() if fnmatch(name, pattern)), _bytes)


def _bytes(found: Comparison, name: str, base: Path, new: Path) -> None:
    found.counts["files"] += 1
    if (one := base.read_bytes()) != (other := new.read_bytes()):
        position = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), "the end")
        found.differ(f"{name}, byte {position}", f"{len(one)} bytes", f"{len(other)} bytes")


def _metrics(found: Comparison, name: str, base: Path, new: Path) -> None:
    lines, lines_new = (
        [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] for path in (base, new)
    )
    if len(lines) != len(lines_new):
        found.differ(name, f"{len(lines)} lines", f"{len(lines_new)} lines")
    for line, line_new in zip(lines, lines_new, strict=False):
        where = f"{name}, step {line.get('step')}"
        found.counts["iterations"] += "nfe" in line
        found.counts["metrics"] += _values(found, where, line, line_new)


def _json(found: Comparison, name: str, base: Path, new: Path) -> None:
    found.counts["files"] += 1
    _values(found, name, *(json.loads(path.read_text(encoding="utf-8")) for path in (base, new)))


def _toml(found: Comparison, name: str, base: Path, new: Path) -> None:
    found.counts["files"] += 1
    _values(found, name, *(tomllib.loads(path.read_text(encoding="utf-8")) for path in (base, new)))


def _values(found: Comparison, where: str, base: Any, new: Any) -> int:
    """Compares nested values; returns how many were. NaN equals NaN, 1 differs from 1.0 and 0.0 from -0.0."""
    if isinstance(base, dict) and isinstance(new, dict):
        base, new = ({key: value for key, value in one.items() if _is_compared(key)} for one in (base, new))
        if where.endswith(", settings"):  # a setting that BASE lacks, at its default
            new = {key: value for key, value in new.items() if value is not None or key in base}
        return sum(
            _values(found, f"{where}, {key}", base[key], new[key]) for key in found.names(where, base, new)
        )
    if isinstance(base, list) and isinstance(new, list) and len(base) == len(new):
        return sum(
            _values(found, f"{where}[{i}]", *pair) for i, pair in enumerate(zip(base, new, strict=True))
        )
    if type(base) is not type(new) or repr(base) != repr(new):
        found.differ(where, _short(base), _short(new))
    return 1


def _is_compared(key: str) -> bool:
    return key not in NOT_COMPARED_KEYS and not key.startswith("seconds")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _table_rows(found: Comparison, name: str, base: Path, new: Path) -> None:
    """The numbers in a Markdown table: headings are prose."""
    found.counts["files"] += 1
    lines, lines_new = (path.read_text(encoding="utf-8").splitlines() for path in (base, new))
    rows, rows_new = (
        [re.findall(r"-?\d+\.?\d*", line) for line in some if "|" in line] for some in (lines, lines_new)
    )
    _values(found, f"{name}, numbers of row", rows, rows_new)


def _image(found: Comparison, name: str, base: Path, new: Path) -> None:
    """Pixels; and bytes, which hold the prompt and the seed too, where the image is no figure."""
    found.counts["images"] += 1
    pixels, pixels_new = (np.asarray(Image.open(path)) for path in (base, new))
    if pixels.shape != pixels_new.shape:
        found.differ(name, f"shape {pixels.shape}", f"shape {pixels_new.shape}")
    elif (pixels != pixels_new).any():
        place = tuple(int(i) for i in np.argwhere(pixels != pixels_new)[0])
        found.differ(f"{name}, pixel {place}", pixels[place], pixels_new[place])
    elif not name.endswith("before_after.png") and base.read_bytes() != new.read_bytes():
        texts = [getattr(Image.open(path), "text", {}) for path in (base, new)]
        found.differ(f"{name}, equal pixels but other bytes", _short(texts[0]), _short(texts[1]))


def _tensor_file(found: Comparison, name: str, base: Path, new: Path) -> None:
    tensors, tensors_new = _read(base), _read(new)
    if any(key.endswith(_EXPORTED_ADAPTERS) for key in tensors):
        return _adapters(found, name, _products(base, tensors), _products(new, tensors_new))
    for key in found.names(name, tensors, tensors_new):
        found.counts["tensors"] += 1
        _tensor(found, f"{name}, {key}", tensors[key], tensors_new[key])
    if not tensors:
        found.differences.append(f"{name}: holds no tensors in BASE, so nothing is shown")
    return None


def _read(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def _tensor(found: Comparison, where: str, base: Tensor, new: Tensor) -> None:
    if base.dtype != new.dtype or base.shape != new.shape:
        return found.differ(where, f"{base.dtype} {list(base.shape)}", f"{new.dtype} {list(new.shape)}")
    flat, flat_new = base.contiguous().reshape(-1), new.contiguous().reshape(-1)
    unequal = (flat.view(torch.uint8) != flat_new.view(torch.uint8)).reshape(flat.numel(), -1).any(1)
    if unequal.any():
        first = int(unequal.nonzero()[0])
        values = (repr(one[first].double().item()) for one in (flat, flat_new))
        found.differ(f"{where}, {int(unequal.sum())} of {flat.numel()} numbers, first [{first}]", *values)
    return None


# In a checkpoint they are called .lora_A.default.weight, and are compared bit for bit like all else.
_EXPORTED_ADAPTERS = (".lora_A.weight", ".lora_down.weight")


def _adapters(found: Comparison, name: str, base: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    for layer in found.names(name, base, new):
        found.counts["tensors"] += 1
        one, other = base[layer], new[layer]
        if one.shape != other.shape:
            found.differ(f"{name}, {layer}", list(one.shape), list(other.shape))
            continue
        error = float((one - other).abs().max() / one.abs().max().clamp(min=1e-30))
        if not error <= ADAPTER_TOLERANCE:
            found.differ(f"{name}, {layer}", "(alpha / rank) B A", f"relative difference {error:.2e}")


def _products(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Layer -> (alpha / rank) B A; alpha is in the file, in its metadata, or equal to the rank."""
    with safe_open(path, framework="pt") as file:
        record = json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}"))
    alphas = [value for key, value in record.items() if key.endswith("lora_alpha")]
    products = {}
    for key, a in tensors.items():
        for down, up in ((".lora_A.weight", ".lora_B.weight"), (".lora_down.weight", ".lora_up.weight")):
            if key.endswith(down):
                layer = key.removesuffix(down)
                rank = a.shape[0]
                given = tensors.get(f"{layer}.alpha")
                alpha = float(given) if given is not None else float(alphas[0]) if alphas else float(rank)
                products[layer] = alpha / rank * (tensors[layer + up].float() @ a.float())
    return products


_COMPARERS: dict[str, Comparer] = {
    "cache/*": _bytes,
    "*metrics.jsonl": _metrics,
    "*.safetensors": _tensor_file,
    "*.png": _image,
    "*.json": _json,
    "*.toml": _toml,
    "*.md": _table_rows,
}


def total(counts: Iterator[Mapping[str, int]]) -> dict[str, int]:
    """The sums of several counts."""
    sums: dict[str, int] = {}
    for one in counts:
        for name, value in one.items():
            sums[name] = sums.get(name, 0) + value
    return sums
