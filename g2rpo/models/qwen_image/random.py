"""Qwen-Image models with random weights, for test runs at full size without a download.

    random:qwen-image   Qwen-Image's transformer and VAE, 41 GB in bfloat16, created on the GPU in seconds
    random:qwen-tiny    the same classes with a few thousand weights, for tests on a CPU

Prompt embeddings are noise that depends on the prompt's text; their number of tokens is close to what the
tokenizer would give. Time, memory and communication are those of the real model; the images are meaningless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from g2rpo.models.family import Truncation
from g2rpo.models.loading.precision import DTYPES
from g2rpo.models.policy import Conditioning
from g2rpo.models.qwen_image.text import checked_length, ragged
from g2rpo.runtime.random import keyed_noise

TEMPLATE_END_TOKENS = 5
"""Tokens of the template after the prompt."""
TOKENS_PER_WORD = 1.3
"""Typical number of tokens per word of an English prompt."""


class RandomText:
    """Replacement for the text encoder: standard normal embeddings, keyed by the prompt's text."""

    def __init__(
        self,
        configs: Mapping[str, Mapping[str, Any]],
        *,
        device: torch.device,
        precision: str,
        max_sequence_length: int | None = None,
    ) -> None:
        self.device, self.precision, self.dtype = device, precision, DTYPES[precision]
        self.max_sequence_length = checked_length(max_sequence_length)
        self._text_dim = int(configs["text_encoder"]["hidden_size"])

    @property
    def identity(self) -> str:
        """Key of the embedding cache, as `QwenText.identity`."""
        return f"random-qwen-image-text:{self.precision}:{self.max_sequence_length}:{self._text_dim}"

    def encode(self, prompts: list[str]) -> Conditioning:
        """Returns the embeddings of prompts, as `QwenText.encode`."""
        if not prompts:
            raise ValueError("no prompts to encode; give at least one")
        rows = [keyed_noise((self._length(prompt), self._text_dim), 0, "text", prompt) for prompt in prompts]
        return ragged(rows).to(self.device, self.dtype)

    def unload(self) -> None:
        """Does nothing, because no encoder is loaded."""

    def truncated(self, prompts: Sequence[str]) -> list[Truncation]:
        """Returns nothing, because there is no tokenizer."""
        return []

    def _length(self, prompt: str) -> int:
        length = round(TOKENS_PER_WORD * len(prompt.split())) + TEMPLATE_END_TOKENS
        return min(length, self.max_sequence_length)
