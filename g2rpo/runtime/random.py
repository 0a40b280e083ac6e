"""Keyed randomness: every random tensor depends on a key alone, not on the process that computes it.

The key, such as (seed, iteration, prompt, step, member), is hashed to a seed, and the tensor is drawn on the
CPU in float32. One process or eight, and any kind of GPU, therefore get the same noise, and any part of a run
can be reproduced in isolation. Foreign code, such as a reward, draws from the global generators, which
`seed_everything` sets, in a stream of its own: what it draws or seeds reaches no other code (foreign_stream).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    _streams.clear()
    hashed = key_seed(seed, "process")
    torch.manual_seed(hashed)
    random.seed(hashed)
    np.random.seed(hashed % 2**32)


def random_state() -> dict[str, Any]:
    """Returns the states of the process's global generators and of the streams of foreign code.

    All values are plain JSON values.
    """
    # The run's noise is keyed and needs none of this; a reward or a model's dropout may use these generators.
    state = _as_json(_generators())
    if torch.cuda.is_available() and "cuda" not in state:
        state["cuda"] = _to_hex(torch.cuda.get_rng_state())
    if _streams:
        state["foreign"] = {name: _as_json(stream) for name, stream in _streams.items()}
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores the global generators and the streams of foreign code to a result of `random_state`."""
    _set_generators(_from_json(state))
    _streams.clear()
    _streams.update({name: _from_json(stream) for name, stream in state.get("foreign", {}).items()})


@contextmanager
def other_random_numbers(seed: int) -> Iterator[None]:
    """Context manager for calls in addition to those of the run: seeds the global generators differently.

    On exit they and the streams of foreign code are as before, so that the calls change no later number. A
    reward that draws random numbers does not draw the same again.
    """
    before = random_state()
    seed_everything(seed)
    try:
        yield
    finally:
        set_random_state(before)


_streams: dict[str, dict[str, Any]] = {}
"""Name of foreign code, such as a reward -> states of the generators where its last block ended."""


@contextmanager
def foreign_stream(name: str | None) -> Iterator[None]:
    """Context manager for foreign code, which draws from the global generators: on exit they are as before.

    Args:
        name: of the code, whose next block continues where this one ends. Its first block begins where the
            global generators are, as in earlier versions, where code had no stream of its own. None: nothing
            is kept.
    """
    outside = _generators()
    if name in _streams:
        _set_generators(_streams[name])
    try:
        yield
    finally:
        ended = _generators()
        if not _equal(outside, ended):
            if name is not None:
                _streams[name] = ended
            _set_generators(outside)


def _generators() -> dict[str, Any]:
    """The states of the global generators; of a GPU's, if this process uses it."""
    state = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
    }
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def _set_generators(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if "numpy" in state:  # a checkpoint of an earlier version has none
        np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    # A GPU that is used for the first time in the block has no state of before.
    return all(_comparable(one[name]) == _comparable(other[name]) for name in one.keys() & other.keys())


def _comparable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.numpy().tobytes()
    return tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in value)


def _as_json(state: Mapping[str, Any]) -> dict[str, Any]:
    version, numbers, gauss = state["python"]
    plain: dict[str, Any] = {"cpu": _to_hex(state["cpu"]), "python": [version, list(numbers), gauss]}
    kind, words, *rest = state["numpy"]
    plain["numpy"] = [kind, [int(word) for word in words], *rest]
    return plain | ({"cuda": _to_hex(state["cuda"])} if "cuda" in state else {})


def _from_json(state: Mapping[str, Any]) -> dict[str, Any]:
    version, numbers, gauss = state["python"]
    read: dict[str, Any] = {"cpu": _from_hex(state["cpu"]), "python": (version, tuple(numbers), gauss)}
    if "numpy" in state:
        read["numpy"] = tuple(state["numpy"])
    return read | ({"cuda": _from_hex(state["cuda"])} if "cuda" in state else {})


def _to_hex(tensor: Tensor) -> str:
    return bytes(tensor.tolist()).hex()


def _from_hex(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
