"""The stream of prompts of a run: the same order on any number of processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property

from g2rpo.data.prompts import Prompt


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """Changes with any prompt's text or metadata, and with their order."""
    texts = json.dumps([[p.text, p.metadata] for p in prompts], sort_keys=True, default=str)
    return hashlib.blake2b(texts.encode(), digest_size=8).hexdigest()


class PromptStream:
    """The prompts without end: each epoch holds every prompt once, in an order of its own.

    A position counts prompts from the start of the run. `at` looks up, it moves nothing: the position
    belongs to the run, and any process can ask for any part of the stream.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        """Raises ValueError for an empty sequence."""
        if not prompts:
            raise ValueError("a stream needs at least one prompt")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])  # the epoch asked for last, and its order

    @cached_property
    def identity(self) -> str:
        """`prompts_hash` of them."""
        return prompts_hash(self._prompts)

    def at(self, position: int, count: int) -> list[Prompt]:
        """`count` prompts from `position` on.

        Raises:
            ValueError: a negative position or count.
        """
        if position < 0 or count < 0:
            raise ValueError(f"need position >= 0 and count >= 0, got {position=}, {count=}")
        found = []
        for place in range(position, position + count):
            epoch, offset = divmod(place, len(self._prompts))
            found.append(self._prompts[self._epoch_order(epoch)[offset]])
        return found

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = sorted(range(len(self._prompts)), key=lambda index: self._key(epoch, index))
            self._order = (epoch, order)
        return self._order[1]

    def _key(self, epoch: int, index: int) -> bytes:
        return hashlib.blake2b(f"{self._seed} {epoch} {index}".encode(), digest_size=16).digest()
