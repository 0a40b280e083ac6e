"""The stream of prompts of a run, in the same order on any number of processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property

from g2rpo.data.prompts import Prompt


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """Returns a hash of the prompts' texts, metadata and order."""
    texts = json.dumps([[p.text, p.metadata] for p in prompts], sort_keys=True, default=str)
    return hashlib.blake2b(texts.encode(), digest_size=8).hexdigest()


class PromptStream:
    """An endless stream of prompts; each epoch contains every prompt once, in its own order.

    A position counts prompts from the start of the run. The stream has no current position, which belongs to
    the run, so any process can read any part of it.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        """Creates the stream.

        Args:
            prompts: the prompts of an epoch, at least one.
            seed: determines the order of each epoch.

        Raises:
            ValueError: no prompts.
        """
        if not prompts:
            raise ValueError("a stream needs at least one prompt")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])  # the epoch that was read last, and its order

    @cached_property
    def identity(self) -> str:
        """The `prompts_hash` of the prompts."""
        return prompts_hash(self._prompts)

    def at(self, position: int, count: int) -> list[Prompt]:
        """Returns `count` prompts from `position` on.

        Raises:
            ValueError: a negative position or count.
        """
        if position < 0 or count < 0:
            raise ValueError(f"need position >= 0 and count >= 0, got {position=}, {count=}")
        prompts = []
        for prompt_index in range(position, position + count):
            epoch, offset = divmod(prompt_index, len(self._prompts))
            prompts.append(self._prompts[self._epoch_order(epoch)[offset]])
        return prompts

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = sorted(range(len(self._prompts)), key=lambda index: self._key(epoch, index))
            self._order = (epoch, order)
        return self._order[1]

    def _key(self, epoch: int, index: int) -> bytes:
        return hashlib.blake2b(f"{self._seed} {epoch} {index}".encode(), digest_size=16).digest()
