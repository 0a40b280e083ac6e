"""Writing and reading of a checkpoint's tensor files, with a crc32 of each stored chunk.

A chunk is the part of a tensor that one process wrote. Its checksum is computed from the bytes on their way
to the disk and stored in the index (tensors.json), so that writing reads nothing twice.

When a checkpoint is read, each process reads the chunks that it needs. Of the processes on a host that need
the same chunk, one verifies it, so that each byte is verified once per host; the coordinator of the load
decides which, and spreads the bytes evenly. A second thread computes the checksums while the first one
deserialises and copies. Chunks of earlier versions have no checksum and are read without one.
"""

from __future__ import annotations

import io
import os
import re
import socket
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from g2rpo.runtime.files import disk_errors
from g2rpo.runtime.records import DamagedFile

WRITE_BYTES = 2**20
"""Largest piece that is written at once; the checksum then follows while it is in the CPU's cache."""


@dataclass
class StoredChunk(filesystem._StorageInfo):
    """Position of a chunk: file, offset and length, as torch has it, and its checksum.

    Attributes:
        crc32: 8 hexadecimal digits; None: written by an earlier version.
    """

    crc32: str | None = None


class ChecksummedWriter(dcp.FileSystemWriter):
    """torch's writer, which stores a checksum with each chunk and reports a full disk of any thread."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this process's chunks, one file per thread.

        Raises:
            DiskFull: there is no space.
        """
        groups = filesystem._split_by_size_and_type(self.thread_count, list(plan.items))
        groups = [items for items in groups if items]
        names = [f"{plan.storage_data.prefix}{i}{filesystem.DEFAULT_SUFFIX}" for i in range(len(groups))]
        results: Future[list[WriteResult]] = Future()
        with ThreadPoolExecutor(max(1, len(groups))) as threads:
            written = threads.map(partial(self._write_file, planner), names, groups)
            results.set_result([result for of_file in written for result in of_file])
        return results

    def _write_file(self, planner: SavePlanner, name: str, items: Sequence[WriteItem]) -> list[WriteResult]:
        results, path = [], Path(self.path) / name
        with disk_errors(path), open(path, "wb", buffering=0) as file:
            for item in items:
                tensor = planner.resolve_data(item)
                if not isinstance(tensor, Tensor):
                    raise ValueError(f"{item.index.fqn} is not a tensor")
                start, stream = file.tell(), _ChecksummedStream(file)
                stream.save(_compact(tensor))
                length = file.tell() - start
                chunk = StoredChunk(name, start, length, crc32=f"{stream.crc32:08x}")
                results.append(WriteResult(item.index, length, chunk))
            os.fsync(file.fileno())
        return results


class _ChecksummedStream:
    """Passes bytes on to a file and computes their checksum."""

    def __init__(self, file: BinaryIO | io.FileIO) -> None:
        self._file, self.crc32 = file, 0
        self._error: BaseException | None = None

    def write(self, content: Any) -> int:
        rest = memoryview(content).cast("B")
        try:
            while rest:
                piece = rest[:WRITE_BYTES]
                taken = self._file.write(piece)
                self.crc32 = zlib.crc32(piece[:taken], self.crc32)
                rest = rest[taken:]
        except BaseException as error:
            self._error = self._error or error
            raise
        return memoryview(content).nbytes

    def flush(self) -> None:
        """Does nothing: the file has no buffer."""

    def save(self, tensor: Tensor) -> None:
        """Writes a tensor. torch reports a failed write in its own words; the cause is raised instead."""
        try:
            torch.save(tensor, self)  # type: ignore[arg-type]
        except Exception:
            if self._error is not None:
                raise self._error from None
            raise


def _compact(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, without the rest of the storage that it may be a view of."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().size() == tensor.nbytes else tensor.clone()


class ChecksummedReader(dcp.FileSystemReader):
    """torch's reader, which verifies the checksum of each chunk that this process is assigned.

    Attributes:
        verify: whether checksums are compared.
        unverified: after loading, the number of chunks that have no checksum.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        super().__init__(path)
        self.verify, self.unverified = verify, 0

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adds the host's name to this process's plan."""
        return replace(plan, storage_data=socket.gethostname())

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Assigns to each process the chunks that it verifies; called on the coordinator."""
        assigned = assign_chunks(
            [(plan.storage_data, {item.storage_index for item in plan.items}) for plan in plans],
            {index: chunk.length for index, chunk in self.storage_data.items()},
        )
        return [replace(plan, storage_data=own) for plan, own in zip(plans, assigned, strict=True)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the chunks of this process's plan into its tensors.

        Raises:
            DamagedFile: a checksum differs, or the file ends before the chunk does.
        """
        chunks: dict[MetadataIndex, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            chunks[item.storage_index].append(item)
        ordered = sorted(
            chunks, key=lambda i: (self.storage_data[i].relative_path, self.storage_data[i].offset)
        )
        pending: tuple[ThreadFuture[str], MetadataIndex] | None = None
        with ThreadPoolExecutor(1) as checksums:
            for index in ordered:
                content = self._read(index)
                following = None
                if self.verify and index in plan.storage_data and self._stored(index) is not None:
                    following = (checksums.submit(_crc32, content), index)
                else:
                    self.unverified += self._stored(index) is None
                self._check(pending)
                pending = following
                try:
                    _fill(content, chunks[index], planner)
                except Exception as error:
                    if not _names_code(error):  # a wrong checksum says more than what failed because of it
                        self._check(pending)
                    raise
            self._check(pending)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _stored(self, index: MetadataIndex) -> str | None:
        crc32: str | None = getattr(self.storage_data[index], "crc32", None)
        return crc32

    def _read(self, index: MetadataIndex) -> memoryview:
        chunk = self.storage_data[index]
        path = Path(self.path) / chunk.relative_path
        content = memoryview(bytearray(chunk.length))
        with open(path, "rb", buffering=0) as file:
            file.seek(chunk.offset)
            have = 0
            while have < chunk.length and (count := file.readinto(content[have:])):
                have += count
        if have < chunk.length:
            raise DamagedFile(
                f"{self.path} is damaged: {path.name} ends at byte {chunk.offset + have}, and {index.fqn} "
                f"needs the bytes {chunk.offset} to {chunk.offset + chunk.length}"
            )
        return content

    def _check(self, pending: tuple[ThreadFuture[str], MetadataIndex] | None) -> None:
        if pending is None:
            return
        found, index = pending[0].result(), pending[1]
        if found != self._stored(index):
            chunk = self.storage_data[index]
            raise DamagedFile(
                f"{self.path} is damaged: in {chunk.relative_path}, {index.fqn} (bytes {chunk.offset} to "
                f"{chunk.offset + chunk.length}) has the checksum {found}, but {self._stored(index)} was "
                "stored when it was written"
            )


def assign_chunks(
    readers: Sequence[tuple[str, Iterable[MetadataIndex]]], lengths: Mapping[MetadataIndex, int]
) -> list[set[MetadataIndex]]:
    """For each process, the chunks that it verifies: each chunk once on each host that reads it.

    Args:
        readers: of each process its host and the chunks that it reads.
        lengths: bytes of each chunk.
    """
    assigned: list[set[MetadataIndex]] = [set() for _ in readers]
    load = [0] * len(readers)
    of_chunk: dict[tuple[str, MetadataIndex], list[int]] = defaultdict(list)
    for number, (host, chunks) in enumerate(readers):
        for chunk in chunks:
            of_chunk[host, chunk].append(number)
    # Chunks that only one process reads first: the others then balance the bytes.
    for (_, chunk), numbers in sorted(of_chunk.items(), key=lambda item: len(item[1])):
        number = min(numbers, key=lambda n: load[n])
        assigned[number].add(chunk)
        load[number] += lengths.get(chunk, 0)
    return assigned


def chunk_checksum(path: Path, offset: int, length: int) -> str:
    """The checksum of a part of a file, as `StoredChunk.crc32`; a file that ends before it has another."""
    checksum = 0
    with open(path, "rb") as file:
        file.seek(offset)
        while length > 0 and (content := file.read(min(length, WRITE_BYTES))):
            checksum, length = zlib.crc32(content, checksum), length - len(content)
    return f"{checksum:08x}"


def _crc32(content: memoryview) -> str:
    return f"{zlib.crc32(content):08x}"


def _names_code(error: Exception) -> bool:
    """Whether torch refused a function that no bit error of a tensor's file can have named."""
    function = unsafe_function(error)
    module = function.partition(".")[0]
    return module.isidentifier() and module not in ("torch", "collections")


def unsafe_function(error: BaseException) -> str:
    """The function that a file would call and torch.load(weights_only=True) refused; "" for other errors."""
    match = re.search(r"GLOBAL (\S+)|unrecognized function (\S+)", str(error))
    return (match[1] or match[2]) if match else ""


def _fill(content: memoryview, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
    """Copies a chunk's parts into the tensors that need them."""
    if any(item.type != filesystem.LoadItemType.TENSOR for item in items):
        planner.load_bytes(items[0], io.BytesIO())  # which refuses it
    stored = torch.load(_MemoryFile(content), map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    for item in items:
        part = narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
        target = planner.resolve_tensor(item).detach()
        if target.size() != part.size():
            raise DamagedFile(
                f"{item.storage_index.fqn}: the checkpoint contains a part of shape {list(part.size())}, but "
                f"its index says {list(target.size())}"
            )
        target.copy_(part)
        planner.commit_tensor(item, target)


class _MemoryFile(io.RawIOBase):
    """A file in memory that is read without a copy of all of its content."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._position = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._content)}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        part = self._content[self._position : self._position + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)
