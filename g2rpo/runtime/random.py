"""Keyed randomness: every random tensor depends on a key alone, not on the process that computes it.

The key, such as (seed, iteration, prompt, step, member), is hashed to a seed, and the tensor is drawn on the
CPU in float32. One process or eight, and any kind of GPU, therefore get the same noise, and any part of a run
can be reproduced in isolation. Foreign code, such as a reward, draws from the process's global generators,
which `seed_everything` sets.
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
    """Returns the CPU generator of a key; keys that differ in value or length give different streams.

    torch's generator uses 32 bits of the seed: of N keys about N^2 / 2^33 pairs share a stream.
    """
    return torch.Generator().manual_seed(key_seed(seed, *key))


def keyed_noise(shape: Sequence[int], seed: int, *key: int | str) -> Tensor:
    """Returns standard normal noise of a key: [*shape], float32, on the CPU."""
    return torch.randn(tuple(shape), generator=keyed_generator(seed, *key), dtype=torch.float32)


def key_seed(seed: int, *key: int | str) -> int:
    """Returns a 63-bit hash of a key.

    Hashing keeps the streams of neighbouring seeds or members independent, which sums of the parts would not.
    """
    text = "/".join(f"{type(part).__name__}:{part}" for part in (int(seed), *key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int) -> None:
    """Seeds the process's global generators: torch's (CPU and GPUs), Python's and numpy's."""
    # Hashed, because torch's CPU generator and numpy's use only 32 bits of a seed.
    hashed = key_seed(seed, "process")
    torch.manual_seed(hashed)
    random.seed(hashed)
    np.random.seed(hashed % 2**32)


def random_state() -> dict[str, Any]:
    """Returns the states of the process's global generators, as plain JSON values."""
    # The run's noise is keyed and needs none of this; a reward or a model's dropout may use these generators.
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"cpu": _to_hex(torch.get_rng_state()), "python": [version, list(numbers), gauss]}
    kind, words, *rest = np.random.get_state(legacy=True)
    state["numpy"] = [kind, [int(word) for word in words], *rest]
    if torch.cuda.is_available():
        state["cuda"] = _to_hex(torch.cuda.get_rng_state())
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores the process's global generators to a result of `random_state`."""
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
