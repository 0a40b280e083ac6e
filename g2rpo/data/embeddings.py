"""Cache of prompt embeddings on disk, so that a run needs its text encoders at most once.

    CACHE/<encoder>/identity.txt             everything that determines the embeddings, except the prompt
    CACHE/<encoder>/<keys>.safetensors       up to 64 prompts: the tensors [n, ...] of their conditioning, and
                                             their keys; of a ragged tensor the rows without padding, in one
                                             tensor [sum of lengths, ...], and NAME.lengths [n]

A key is sha256(identity, prompt); the identity covers the encoders' files, dtype and token length, so the
cache of a changed encoder is empty. Shards are written atomically (rename) and are their own index: an
interrupted run continues where it stopped, and processes may share a folder. With slow encoders a shard is
written every few seconds, so that an interrupt loses no more than that.

A shard's metadata has a checksum per prompt, which is compared when the prompt is read, and for the prompts
of a run before its model is loaded (`missing`). A damaged shard is set aside (NAME.damaged), and its prompts
are encoded again. Shards of earlier versions have no checksums: of those only the file's length is checked.

A tensor without lengths is stored as the model reads it, padding included, because an encoder's output at the
padding may depend on the entire prompt, so it could not be restored; bit-identical results matter more than
disk space. 512 padded tokens of 4,096 channels in bfloat16 take 4 MiB per prompt.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from g2rpo.models.loading.reading import read_header
from g2rpo.models.policy import Conditioning
from g2rpo.runtime.files import DiskFull, atomic_path, write_atomic
from g2rpo.runtime.progress import phase
from g2rpo.runtime.records import CHECKSUM, DamagedFile

LOG = logging.getLogger(__name__)

SHARD_PROMPTS = 64
"""Maximum number of prompts per shard."""
SHARD_SECONDS = 5.0
"""A shard is written after this time, even if it is not full."""

LENGTHS = ".lengths"
"""Ending of the name under which the lengths of a ragged tensor are stored."""

SHARDS = "[!.]*.safetensors"
"""Pattern of complete shards; a shard that is being written has a name that starts with a dot."""


class Encoder(Protocol):
    """The part of a policy that the cache uses."""

    @property
    def device(self) -> torch.device: ...

    @property
    def encoder_identity(self) -> str: ...

    def encode(self, prompts: list[str]) -> Conditioning: ...


class EmbeddingCache:
    """Embeddings of prompts, read from a folder; missing ones are encoded and added.

    Args:
        folder: created if needed; models, runs and processes may share it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self._index: dict[str, dict[str, tuple[Path, int]]] = {}

    def get(
        self, policy: Encoder, prompts: Sequence[str], *, progress: Callable[[int, int], None] | None = None
    ) -> Conditioning:
        """Returns the conditioning of each prompt, in order; bit-identical to `policy.encode`.

        Args:
            policy: encodes missing prompts; the result is on its device.
            prompts: at least one prompt; repeats are allowed.
            progress: called with (encoded, missing) after each shard that is written.

        Raises:
            DiskFull: too little disk space.
            ValueError: no prompts.
        """
        if not prompts:
            raise ValueError("no prompts to embed; give at least one")
        self.fill(policy, prompts, progress=progress)
        index = self._open(policy.encoder_identity)
        try:
            rows = _read([index[_key(policy.encoder_identity, prompt)] for prompt in prompts])
        except DamagedFile:  # since the run began, when `missing` read them
            self.missing(policy, prompts, verify=True)
            self.fill(policy, prompts, progress=progress)
            rows = _read([index[_key(policy.encoder_identity, prompt)] for prompt in prompts])
        return rows.to(policy.device)

    def fill(
        self, policy: Encoder, prompts: Sequence[str], *, progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Encodes and writes the missing prompts; returns their number. See `get`."""
        missing = self.missing(policy, prompts)
        rows: list[Conditioning] = []
        written, began = 0, time.monotonic()
        with phase("embedding", len(missing), "prompts") as embedding:
            for prompt in missing:
                rows.append(policy.encode([prompt]).to("cpu"))
                embedding.add()
                if written == 0 and len(rows) == 1:
                    self._check_space(policy, rows[0], len(missing))
                done = written + len(rows)
                overdue = time.monotonic() - began > SHARD_SECONDS
                if len(rows) == SHARD_PROMPTS or overdue or done == len(missing):
                    self._write(policy, missing[written:done], Conditioning.cat(rows))
                    rows, written, began = [], done, time.monotonic()
                    if progress is not None:
                        progress(done, len(missing))
        return len(missing)

    def missing(self, policy: Encoder, prompts: Sequence[str], *, verify: bool = False) -> list[str]:
        """Returns the prompts that the cache lacks for this encoder, each once, in order.

        Args:
            verify: also read the others and compare their checksums; a damaged shard is set aside.
        """
        identity = policy.encoder_identity
        index = self._open(identity)
        if verify:
            present = [
                index[key] for prompt in dict.fromkeys(prompts) if (key := _key(identity, prompt)) in index
            ]
            for shard in dict.fromkeys(path for path, _ in present):
                try:
                    _read([(path, row) for path, row in present if path == shard], keep=False)
                except DamagedFile as error:
                    self._set_aside(identity, shard, str(error))
        return [prompt for prompt in dict.fromkeys(prompts) if _key(identity, prompt) not in index]

    def other_encoders(self, policy: Encoder) -> list[Path]:
        """Returns the folders of other encoders or settings, whose embeddings this policy cannot use."""
        own = self._encoder_folder(policy.encoder_identity)
        return sorted(p.parent for p in self.folder.glob("*/identity.txt") if p.parent != own)

    def held(self, policy: Encoder) -> tuple[Path, int, int]:
        """Returns the folder of this encoder's embeddings, their number, and their size on disk in bytes."""
        folder = self._encoder_folder(policy.encoder_identity)
        size = sum(shard.stat().st_size for shard in folder.glob(SHARDS))
        return folder, len(self._open(policy.encoder_identity)), size

    def _encoder_folder(self, identity: str) -> Path:
        return self.folder / hashlib.sha256(identity.encode()).hexdigest()[:16]

    def _open(self, identity: str) -> dict[str, tuple[Path, int]]:
        """Returns key -> (shard, row), read from the shards' headers at first use."""
        if identity not in self._index:
            index: dict[str, tuple[Path, int]] = {}
            for shard in sorted(self._encoder_folder(identity).glob(SHARDS)):
                try:
                    index |= {key: (shard, row) for row, key in enumerate(_keys_of(shard))}
                except DamagedFile as error:
                    self._set_aside(identity, shard, str(error))
            self._index[identity] = index
        return self._index[identity]

    def _set_aside(self, identity: str, shard: Path, problem: str) -> None:
        """Forgets a damaged shard, and renames it if the folder can be written."""
        index = self._index.get(identity, {})
        for key in [key for key, (path, _) in index.items() if path == shard]:
            del index[key]
        with suppress(OSError):  # a cache for reading only, or another process was faster
            os.replace(shard, shard.with_name(f"{shard.name}.damaged"))
        LOG.warning("%s; its prompts are encoded again", problem)

    def _check_space(self, policy: Encoder, row: Conditioning, count: int) -> None:
        folder = self._encoder_folder(policy.encoder_identity)
        folder.mkdir(parents=True, exist_ok=True)
        needed = count * sum(tensor.nbytes for tensor in _stored(row).values())
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise DiskFull(
                f"{needed / 2**20:.0f} MiB of embeddings do not fit on {folder}, which has "
                f"{free / 2**20:.0f} MiB free; free some space, or choose another cache folder"
            )

    def _write(self, policy: Encoder, prompts: list[str], rows: Conditioning) -> None:
        from safetensors.torch import save_file

        self._check_space(policy, rows, 1)  # other processes may have filled the disk
        identity = policy.encoder_identity
        keys = [_key(identity, prompt) for prompt in prompts]
        folder = self._encoder_folder(identity)
        write_atomic(folder / "identity.txt", identity + "\n")
        # Processes that encode the same prompts write the same content to the same file.
        shard = folder / f"{hashlib.sha256(''.join(keys).encode()).hexdigest()[:32]}.safetensors"
        with atomic_path(shard) as temporary:
            save_file(_stored(rows), temporary, metadata=_metadata(keys, rows))
        self._index[identity] |= {key: (shard, row) for row, key in enumerate(keys)}


def _key(identity: str, prompt: str) -> str:
    return hashlib.sha256(f"{identity}\0{prompt}".encode()).hexdigest()


def _keys_of(shard: Path) -> list[str]:
    from safetensors import safe_open

    try:
        read_header(shard)  # names the cause of any damage
    except (ValueError, OSError) as error:
        raise DamagedFile(f"damaged embeddings {error}") from error
    with safe_open(shard, framework="pt") as file:
        try:
            keys = json.loads((file.metadata() or {})["keys"])
        except (ValueError, KeyError, RecursionError) as error:
            raise DamagedFile(f"damaged embeddings {shard}: it does not list its prompts") from error
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise DamagedFile(f"damaged embeddings {shard}: its prompts are not a list")
    return keys


def _metadata(keys: Sequence[str], rows: Conditioning) -> dict[str, str]:
    checksums = [_checksum(rows, row) for row in range(len(keys))]
    return {"keys": json.dumps(keys), CHECKSUM: json.dumps(checksums)}


def _checksum(rows: Conditioning, row: int) -> str:
    """The crc32 of one prompt's tensors as they are stored: without padding, in the order of their names."""
    value = 0
    for name in sorted(rows.tensors):
        tensor = rows.tensors[name][row]
        if name in rows.lengths:
            tensor = tensor[: int(rows.lengths[name][row])]
        content: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        value = zlib.crc32(content, value)
    return f"{value:08x}"


def _stored(rows: Conditioning) -> dict[str, Tensor]:
    """Returns the tensors of a shard: ragged rows without their padding, and their lengths."""
    tensors = {}
    for name, tensor in rows.tensors.items():
        if name in rows.lengths:
            lengths = rows.lengths[name]
            tensors[name + LENGTHS] = lengths
            tensor = torch.cat([row[:length] for row, length in zip(tensor, lengths.tolist(), strict=True)])
        tensors[name] = tensor.contiguous()
    return tensors


def _read(positions: list[tuple[Path, int]], *, keep: bool = True) -> Conditioning:
    """Reads the rows at the given (shard, row) positions, in order.

    Args:
        keep: False: only verify the rows; the first one is returned.

    Raises:
        DamagedFile: a shard cannot be read, or a checksum differs.
    """
    from safetensors import SafetensorError, safe_open

    rows: dict[tuple[Path, int], Conditioning] = {}
    for shard in dict.fromkeys(path for path, _ in positions):
        try:
            with safe_open(shard, framework="pt") as file:
                names = sorted(file.keys())
                lengths = {name: file.get_tensor(name + LENGTHS) for name in names if name + LENGTHS in names}
                of_lengths = {name + LENGTHS for name in lengths}
                slices = {name: file.get_slice(name) for name in names if name not in of_lengths}
                stored = json.loads(file.metadata().get(CHECKSUM, "[]"))
                for row in dict.fromkeys(row for path, row in positions if path == shard):
                    read = _row(slices, lengths, row)
                    if stored and _checksum(read, 0) != stored[row]:
                        raise DamagedFile(f"damaged embeddings {shard} (the checksum of row {row} differs)")
                    if keep or not rows:
                        rows[shard, row] = read
        except (SafetensorError, OSError, RuntimeError, IndexError) as error:
            raise DamagedFile(f"damaged embeddings {shard} ({error})") from error
    return Conditioning.cat([rows[position] for position in positions] if keep else list(rows.values()))


def _row(slices: Mapping[str, Any], lengths: Mapping[str, Tensor], row: int) -> Conditioning:
    """Reads one row of a shard."""
    tensors = {}
    for name, stored in slices.items():
        if name in lengths:
            first = int(lengths[name][:row].sum())
            tensors[name] = stored[first : first + int(lengths[name][row])][None]
        else:
            tensors[name] = stored[row : row + 1]
    return Conditioning(tensors, {name: own[row : row + 1] for name, own in lengths.items()})
