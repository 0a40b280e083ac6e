"""Randomness that does not depend on where it is drawn.

Every random tensor has a key, such as (seed, iteration, prompt, step, member). The key is hashed to a
seed of its own and drawn on the CPU in float32, so one process or eight, and any kind of GPU, see the
same noise, and any part of a run can be drawn again by itself. Code from outside, such as a reward, draws
from the process's generators: `seed_everything` sets those.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

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
