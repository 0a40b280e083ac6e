"""The index of a checkpoint's tensor files, as JSON: reading a checkpoint never runs code from it.

torch.distributed.checkpoint stores its index as a pickle, `.metadata`, and unpickles it and all entries that
are not tensors. Therefore a run folder from an untrusted source could run any program. Here

    tensors.json   name -> dtype, shape, and per stored chunk its offsets, shape, file, position, bytes, crc32

replaces `.metadata`, and the files beside it contain only tensors, which are read by
`torch.load(weights_only=True)`.

Checkpoints written by earlier versions have `.metadata`. It is read by an unpickler that accepts only the
classes of torch's own index; the plain values of their optimizer are read with `weights_only=True`.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult

from g2rpo.run.folder import INDEX, PICKLED_INDEX, index_problem, warn_once
from g2rpo.run.tensor_files import (
    ChecksummedReader,
    ChecksummedWriter,
    StoredChunk,
    chunk_checksum,
    unsafe_function,
)
from g2rpo.runtime.files import write_atomic
from g2rpo.runtime.progress import phase
from g2rpo.runtime.records import DamagedFile

FORMAT = 1
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class TensorWriter(ChecksummedWriter):
    """Writes tensor files with checksums, and `tensors.json` in place of torch's pickled index."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index; called on one process after all processes have written their files.

        Raises:
            ValueError: an entry that is not a tensor.
        """
        stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
        tensors = {name: _entry(name, entry, stored) for name, entry in metadata.state_dict_metadata.items()}
        write_atomic(Path(self.path) / INDEX, json.dumps({"format": FORMAT, "tensors": tensors}))


class TensorReader(ChecksummedReader):
    """Reads tensor files and verifies them, with the index from `read_index`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index as torch's Metadata.

        Raises:
            ValueError: the index is missing or damaged, or contains code.
        """
        return read_index(Path(self.path))


class TensorPlanner(dcp.DefaultLoadPlanner):
    """torch's planner, which rejects entries that are not tensors, because torch would unpickle them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raises ValueError: the entry is not a tensor."""
        raise ValueError(f"{read_item.storage_index.fqn} is not a tensor")


def read_index(path: Path) -> Metadata:
    """The index of the checkpoint folder `path`.

    Raises:
        ValueError: the index is missing or damaged, or contains code.
    """
    index = path / INDEX
    if not index.is_file():
        index = path / PICKLED_INDEX
    if not index.is_file():
        raise DamagedFile(f"{path} is not a complete checkpoint: it has no {INDEX}")
    if index.name == INDEX and (path / "state.json").is_file() and (problem := index_problem(path)):
        raise DamagedFile(problem)
    try:
        metadata = (_from_json if index.name == INDEX else _from_pickle)(index)
        for stored in metadata.storage_data.values():
            _check_inside(stored.relative_path)
    except _ContainsCode as error:
        raise ValueError(contains_code_message(index, str(error))) from error
    except DamagedFile:
        raise
    except Exception as error:  # a file that is not an index fails in many ways, all of them harmless
        raise DamagedFile(f"{index} is damaged ({type(error).__name__}: {error})") from error
    return metadata


def load_tensors(path: Path, tensors: dict[str, Any]) -> None:
    """Fills the given (nested) mappings of tensors in place; the caller has compared names and shapes.

    Raises:
        DamagedFile: a file is damaged; the tensors may be filled in part.
        ValueError: the files contain code.
    """
    reader = TensorReader(path)
    try:
        with without_process_group_warning():
            dcp.load(tensors, storage_reader=reader, planner=TensorPlanner())
    except dcp.CheckpointException as error:
        cause = next((e for e, _ in error.failures.values() if not isinstance(e, KeyboardInterrupt)), None)
        if cause is None:
            raise KeyboardInterrupt from error
        if isinstance(cause, ValueError):
            raise cause from error
        if isinstance(cause, pickle.UnpicklingError | RuntimeError | EOFError | OSError):
            raise _unreadable(path, cause) from error
        raise
    if reader.unverified:
        warn_once(
            f"{path} was written by an earlier version, without checksums: only the sizes of its files were "
            "checked"
        )


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, unsharded on the CPU, by dotted name ("module.proj_out.weight").

    Raises:
        ValueError: not a checkpoint, or its files are damaged or contain code.
    """
    entries = read_index(Path(path)).state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load_tensors(Path(path), tensors)
    return tensors


def check_tensors(path: Path) -> None:
    """Compares the checksums of all tensors of a checkpoint, of which it holds one chunk at a time.

    Raises:
        DamagedFile: a file is damaged or missing.
        ValueError: the files contain code.
    """
    stored = read_index(path).storage_data
    total = sum(chunk.length for chunk in stored.values()) / 1e9
    chunks = sorted(stored.values(), key=lambda chunk: (chunk.relative_path, chunk.offset))
    with phase(f"checking {path.name}", total, "GB") as checking:
        for chunk in chunks:
            try:
                found = chunk_checksum(path / chunk.relative_path, chunk.offset, chunk.length)
            except OSError as error:
                raise DamagedFile(f"{path / chunk.relative_path} cannot be read: {error.strerror}") from error
            if (written := getattr(chunk, "crc32", None)) not in (None, found):
                raise DamagedFile(
                    f"{path} is damaged: {chunk.relative_path} has the checksum {found} at byte "
                    f"{chunk.offset}, but {written} was stored when it was written"
                )
            checking.add(chunk.length / 1e9)


def pickled_values(path: Path) -> dict[str, Any]:
    """The plain values that a checkpoint of an earlier version stored beside tensors, by dotted name.

    Raises:
        ValueError: a value contains code, or a file is damaged.
    """
    metadata = read_index(path)
    values = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            stored = metadata.storage_data[MetadataIndex(name)]
            with open(path / stored.relative_path, "rb") as file:
                file.seek(stored.offset)
                content = io.BytesIO(file.read(stored.length))
            try:
                values[name] = torch.load(content, weights_only=True)
            except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
                raise _unreadable(path / stored.relative_path, error) from error
    return values


def _entry(name: str, entry: Any, stored: Mapping[MetadataIndex, Any]) -> dict[str, Any]:
    """The index entry of a tensor as JSON values."""
    if not isinstance(entry, TensorStorageMetadata):
        raise ValueError(f"{name} is not a tensor; the files of a checkpoint contain only tensors")
    chunks = []
    for chunk in entry.chunks:
        info = stored[MetadataIndex(name, chunk.offsets)]
        chunks.append(
            {
                "offsets": list(chunk.offsets),
                "shape": list(chunk.sizes),
                "file": info.relative_path,
                "position": info.offset,
                "bytes": info.length,
                "crc32": info.crc32,
            }
        )
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}


def _from_json(index: Path) -> Metadata:
    content = json.loads(index.read_text(encoding="utf-8"))
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']!r}, and this version reads {FORMAT}")
    entries: dict[str, Any] = {}
    stored = {}
    for name, entry in content["tensors"].items():
        chunks = []
        for i, chunk in enumerate(entry["chunks"]):
            offsets, sizes = torch.Size(chunk["offsets"]), torch.Size(chunk["shape"])
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            stored[MetadataIndex(name, offsets, i)] = StoredChunk(
                chunk["file"], int(chunk["position"]), int(chunk["bytes"]), crc32=chunk.get("crc32")
            )
        properties = TensorProperties(dtype=_DTYPES[entry["dtype"]])
        entries[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
    return Metadata(entries, storage_data=stored, storage_meta=dcp_metadata.StorageMeta())


def _from_pickle(index: Path) -> Metadata:
    """Reads the index of an earlier version."""
    with open(index, "rb") as stream:
        metadata = _IndexUnpickler(stream).load()
    if not isinstance(metadata, Metadata):
        raise ValueError(f"it contains a {type(metadata).__name__}")
    return metadata


def _check_inside(file: str) -> None:
    """Raises ValueError unless `file` is a plain file name."""
    if file in ("", ".", "..") or PurePosixPath(file).name != file:
        raise ValueError(f"it names the file {file!r}, which is outside its folder")


class _ContainsCode(pickle.UnpicklingError):
    """A pickle refers to a function or class that does not belong to an index."""


class _IndexUnpickler(pickle.Unpickler):
    """Accepts only the classes of torch's index."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath"):
            return PurePosixPath
        if (known := _INDEX_CLASSES.get((module, name))) is not None:
            return known
        raise _ContainsCode(f"{module}.{name}")


_INDEX_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (dcp_metadata.__name__, kind.__name__): kind
        for kind in (
            BytesStorageMetadata,
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            TensorProperties,
            TensorStorageMetadata,
            dcp_metadata.StorageMeta,
            dcp_metadata._MEM_FORMAT_ENCODING,
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}


def _unreadable(path: Path, error: BaseException) -> ValueError:
    """The error for tensor data that `torch.load(weights_only=True)` rejects."""
    if function := unsafe_function(error):
        return ValueError(contains_code_message(path, function))
    if isinstance(error, OSError) and error.filename is not None:
        return DamagedFile(f"{error.filename} cannot be read: {error.strerror}")
    return DamagedFile(f"{path} is damaged: its tensors cannot be read ({type(error).__name__})")


def contains_code_message(path: Path, function: str) -> str:
    """The error message for a file that would call `function` if it were unpickled."""
    return (
        f"{path} contains code ({function}); none of it was run. A checkpoint contains only tensors and "
        "plain values: do not use this folder, and ask its author for an export (g2rpo export), which is "
        "safetensors"
    )


@contextmanager
def without_process_group_warning() -> Iterator[None]:
    """Silences torch's warning about a missing process group, which a single process does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        yield
