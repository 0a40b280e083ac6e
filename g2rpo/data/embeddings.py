"""Prompt embeddings on disk, so that a run needs its text encoders once or never.

    CACHE/<encoder>/identity.txt             what the embeddings depend on beside the prompt
    CACHE/<encoder>/<keys>.safetensors       up to 64 prompts: text [n, Lt, Ct], pooled [n, Cp], their keys

A key is sha256(identity, prompt); the identity covers the encoders' files, dtype and token length, so a
changed encoder finds nothing and encodes anew. Shards appear whole (rename) and are their own index:
an interrupted run goes on where it stopped, and processes may share a folder. Slow encoders write a shard
every few seconds, so that no more than those are lost.

Rows are stored padded. FLUX attends to T5's padding, and the encoder's output there depends on the whole
prompt, so it cannot be restored from the unpadded part; equal bits matter more than disk. A row takes
Lt Ct bytes-per-number: 4 MiB for FLUX.1 (512 x 4096, bfloat16), 1 MiB at max_sequence_length=128.
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
SHARD_SECONDS = 5.0

SHARDS = "[!.]*.safetensors"
"""Pattern of complete shards; a shard that is being written has a name that starts with a dot."""


class Encoder(Protocol):
    """What the cache needs of a policy."""

    @property
    def device(self) -> torch.device: ...

    @property
    def encoder_identity(self) -> str: ...

    def encode(self, prompts: list[str]) -> Conditioning: ...


class EmbeddingCache:
    """Embeddings of prompts, read from a folder and added to it where missing.

    Args:
        folder: made if needed; may be shared by models, runs and processes.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self._index: dict[str, dict[str, tuple[Path, int]]] = {}

    def get(
        self, policy: Encoder, prompts: Sequence[str], *, progress: Callable[[int, int], None] | None = None
    ) -> Conditioning:
        """Conditioning of each prompt, in order, on the policy's device; bit-equal to `policy.encode`.

        Args:
            progress: called with (encoded, missing) after each shard that is written.

        Raises:
            ValueError: no prompts, no space for them, or a damaged shard.
        """
        if not prompts:
            raise ValueError("no prompts to embed; give at least one")
        self.fill(policy, prompts, progress=progress)
        index = self._open(policy.encoder_identity)
        places = [index[_key(policy.encoder_identity, prompt)] for prompt in prompts]
        return _read(places).to(policy.device)

    def fill(
        self, policy: Encoder, prompts: Sequence[str], *, progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Encodes and writes what is missing of `prompts`; returns how many that were."""
        missing = self.missing(policy, prompts)
        rows: list[Conditioning] = []
        written, began = 0, time.monotonic()
        for prompt in missing:
            rows.append(policy.encode([prompt]).to("cpu"))
            if written == 0 and len(rows) == 1:
                self._check_space(policy, rows[0], len(missing))
            done = written + len(rows)
            late = time.monotonic() - began > SHARD_SECONDS
            if len(rows) == SHARD_PROMPTS or late or done == len(missing):
                self._write(policy, missing[written:done], Conditioning.cat(rows))
                rows, written, began = [], done, time.monotonic()
                if progress is not None:
                    progress(done, len(missing))
        return len(missing)

    def missing(self, policy: Encoder, prompts: Sequence[str]) -> list[str]:
        """The prompts not in the cache for this encoder, each once, in order."""
        identity = policy.encoder_identity
        index = self._open(identity)
        return [prompt for prompt in dict.fromkeys(prompts) if _key(identity, prompt) not in index]

    def other_encoders(self, policy: Encoder) -> list[Path]:
        """Folders of embeddings by other encoders or settings: of no use to this policy."""
        own = self._encoder_folder(policy.encoder_identity)
        return sorted(p.parent for p in self.folder.glob("*/identity.txt") if p.parent != own)

    def held(self, policy: Encoder) -> tuple[Path, int, int]:
        """Where this encoder's embeddings lie, how many there are, and their bytes on disk."""
        folder = self._encoder_folder(policy.encoder_identity)
        size = sum(shard.stat().st_size for shard in folder.glob(SHARDS))
        return folder, len(self._open(policy.encoder_identity)), size

    def _encoder_folder(self, identity: str) -> Path:
        return self.folder / hashlib.sha256(identity.encode()).hexdigest()[:16]

    def _open(self, identity: str) -> dict[str, tuple[Path, int]]:
        """Key -> (shard, row), read from the shards' headers at first use."""
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
                f"{free / 2**20:.0f} MiB free; free some, or choose another cache folder"
            )

    def _write(self, policy: Encoder, prompts: list[str], rows: Conditioning) -> None:
        from safetensors.torch import save_file

        self._check_space(policy, rows, 1)  # others fill the disk too
        identity = policy.encoder_identity
        keys = [_key(identity, prompt) for prompt in prompts]
        folder = self._encoder_folder(identity)
        write_atomic(folder / "identity.txt", identity + "\n")
        # Two processes that encode the same prompts write the same content under the same name.
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
            f"damaged embeddings {shard} ({error}); delete this file, it is made again"
        ) from error
    return keys


def _read(places: list[tuple[Path, int]]) -> Conditioning:
    from safetensors import safe_open

    rows: dict[tuple[Path, int], Conditioning] = {}
    for shard in dict.fromkeys(path for path, _ in places):
        with safe_open(shard, framework="pt") as file:
            text, pooled = file.get_slice("text"), file.get_slice("pooled")
            for row in dict.fromkeys(row for path, row in places if path == shard):
                rows[shard, row] = Conditioning(text[row : row + 1], pooled[row : row + 1])
    return Conditioning.cat([rows[place] for place in places])
