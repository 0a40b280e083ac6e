"""Randomness that depends on no process: every random tensor has a key.

The key, such as (seed, iteration, prompt, step, member), is hashed to a seed of its own, and the tensor is
drawn on the CPU in float32. So one process or eight, and any kind of GPU, see the same noise, and any part
of a run can be drawn again by itself. Code from outside, such as a reward, draws from the process's own
generators, which `seed_everything` sets.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def keyed_generator(seed: int, *key: int | str) -> torch.Generator:
    """CPU generator of one key. Different keys, or keys of different length, are different streams.

    torch's generator takes 32 of the seed's bits: of N keys about N^2 / 2^33 pairs share their stream.
    """
    return torch.Generator().manual_seed(key_seed(seed, *key))


def keyed_noise(shape: Sequence[int], seed: int, *key: int | str) -> Tensor:
    """Standard normal float32 noise of one key, on the CPU."""
    return torch.randn(tuple(shape), generator=keyed_generator(seed, *key), dtype=torch.float32)


def key_seed(seed: int, *key: int | str) -> int:
    """63-bit hash of a key: neighbouring seeds or members share nothing, as sums of the parts would."""
    text = "/".join(f"{type(part).__name__}:{part}" for part in (int(seed), *key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int) -> None:
    """Seeds the process's own generators: torch's (CPU and GPUs), Python's and numpy's."""
    # Hashed, because torch's CPU generator and numpy's heed 32 bits of a seed only.
    hashed = key_seed(seed, "process")
    torch.manual_seed(hashed)
    random.seed(hashed)
    np.random.seed(hashed % 2**32)


def random_state() -> dict[str, Any]:
    """The process's own generators, as plain JSON values."""
    # The run's own noise is keyed and needs none of this; a reward or a model's dropout may draw from them.
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"cpu": _to_hex(torch.get_rng_state()), "python": [version, list(numbers), gauss]}
    kind, words, *rest = np.random.get_state(legacy=True)
    state["numpy"] = [kind, [int(word) for word in words], *rest]
    if torch.cuda.is_available():
        state["cuda"] = _to_hex(torch.cuda.get_rng_state())
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Sets the process's own generators to what `random_state` gave."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(_from_hex(state["cpu"]))
    if "numpy" in state:  # a checkpoint of an earlier version has none
        np.random.set_state(tuple(state["numpy"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_hex(state["cuda"]))


def _to_hex(tensor: Tensor) -> str:
    return bytes(tensor.tolist()).hex()


def _from_hex(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
