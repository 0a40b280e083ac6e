"""Cache of prompt embeddings on disk, so that a run needs its text encoders at most once.

    CACHE/<encoder>/identity.txt             everything that determines the embeddings, except the prompt
    CACHE/<encoder>/<keys>.safetensors       up to 64 prompts: text [n, Lt, Ct], pooled [n, Cp], their keys

A key is sha256(identity, prompt); the identity covers the encoders' files, dtype and token length, so the
cache of a changed encoder is empty. Shards are written atomically (rename) and are their own index: an
interrupted run continues where it stopped, and processes may share a folder. With slow encoders a shard is
written every few seconds, so that an interrupt loses no more than that.

Rows are stored padded. FLUX attends to T5's padding, and the encoder's output there depends on the entire
prompt, so it cannot be restored from the unpadded part; bit-identical results matter more than disk space. A
row takes Lt Ct bytes-per-number: 4 MiB for FLUX.1 (512 x 4096, bfloat16), 1 MiB at max_sequence_length=128.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from g2rpo.models.policy import Conditioning
from g2rpo.runtime.files import atomic_path, write_atomic

SHARD_PROMPTS = 64
"""Maximum number of prompts per shard."""
SHARD_SECONDS = 5.0
"""A shard is written after this time, even if it is not full."""

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
            ValueError: no prompts, too little disk space, or a damaged shard.
        """
        if not prompts:
            raise ValueError("no prompts to embed; give at least one")
        self.fill(policy, prompts, progress=progress)
        index = self._open(policy.encoder_identity)
        rows = [index[_key(policy.encoder_identity, prompt)] for prompt in prompts]
        return _read(rows).to(policy.device)

    def fill(
        self, policy: Encoder, prompts: Sequence[str], *, progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Encodes and writes the missing prompts; returns their number. See `get`."""
        missing = self.missing(policy, prompts)
        rows: list[Conditioning] = []
        written, began = 0, time.monotonic()
        for prompt in missing:
            rows.append(policy.encode([prompt]).to("cpu"))
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

    def missing(self, policy: Encoder, prompts: Sequence[str]) -> list[str]:
        """Returns the prompts that the cache lacks for this encoder, each once, in order."""
        identity = policy.encoder_identity
        index = self._open(identity)
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
                index |= {key: (shard, row) for row, key in enumerate(_keys_of(shard))}
            self._index[identity] = index
        return self._index[identity]

    def _check_space(self, policy: Encoder, row: Conditioning, count: int) -> None:
        folder = self._encoder_folder(policy.encoder_identity)
        folder.mkdir(parents=True, exist_ok=True)
        needed = count * (row.text.nbytes + row.pooled.nbytes)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise ValueError(
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
        tensors = {"text": rows.text.contiguous(), "pooled": rows.pooled.contiguous()}
        with atomic_path(shard) as temporary:
            save_file(tensors, temporary, metadata={"keys": json.dumps(keys)})
        self._index[identity] |= {key: (shard, row) for row, key in enumerate(keys)}


def _key(identity: str, prompt: str) -> str:
    return hashlib.sha256(f"{identity}\0{prompt}".encode()).hexdigest()


def _keys_of(shard: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(shard, framework="pt") as file:
            keys: list[str] = json.loads(file.metadata()["keys"])
    except SafetensorError as error:
        raise ValueError(
            f"damaged embeddings {shard} ({error}); delete this file, and it will be written again"
        ) from error
    return keys


def _read(positions: list[tuple[Path, int]]) -> Conditioning:
    """Reads the rows at the given (shard, row) positions, in order."""
    from safetensors import safe_open

    rows: dict[tuple[Path, int], Conditioning] = {}
    for shard in dict.fromkeys(path for path, _ in positions):
        with safe_open(shard, framework="pt") as file:
            text, pooled = file.get_slice("text"), file.get_slice("pooled")
            for row in dict.fromkeys(row for path, row in positions if path == shard):
                rows[shard, row] = Conditioning(text[row : row + 1], pooled[row : row + 1])
    return Conditioning.cat([rows[position] for position in positions])
