"""FLUX models with random weights, for test runs at full size without a download.

    random:flux-dev   FLUX.1-dev's transformer and VAE, 24 GB, created on the GPU in seconds
    random:tiny       the same classes with a few thousand weights, for tests on a CPU

Prompt embeddings are noise that depends on the prompt's text. Time, memory and communication are those of the
real model; the images are meaningless.
"""

from __future__ import annotations

import torch

from g2rpo.models.family import Configs, TextEncoders
from g2rpo.models.flux.text import checked_length
from g2rpo.models.loading.precision import DTYPES
from g2rpo.models.policy import Conditioning
from g2rpo.runtime.random import keyed_noise


class RandomText(TextEncoders):
    """Replacement for the text encoders: standard normal embeddings, keyed by the prompt's text."""

    def __init__(
        self,
        configs: Configs,
        *,
        device: torch.device,
        precision: str,
        length: int | None = None,
    ) -> None:
        self.device, self.precision, self.dtype = device, precision, DTYPES[precision]
        self.max_sequence_length = checked_length(length, 512, "this model")
        self._text_dim = int(configs["text_encoder_2"]["d_model"])
        self._pooled_dim = int(configs["text_encoder"]["projection_dim"])

    @property
    def identity(self) -> str:
        """Key of the embedding cache, as `FluxText.identity`."""
        sizes = f"{self.max_sequence_length}:{self._text_dim}:{self._pooled_dim}"
        return f"random-text:{self.precision}:{sizes}"

    def encode(self, prompts: list[str]) -> Conditioning:
        """Returns the embeddings of prompts, as `FluxText.encode`."""
        if not prompts:
            raise ValueError("no prompts to encode; give at least one")
        text = [keyed_noise((self.max_sequence_length, self._text_dim), 0, "text", p) for p in prompts]
        pooled = [keyed_noise((self._pooled_dim,), 0, "pooled", p) for p in prompts]
        cond = Conditioning({"text": torch.stack(text), "pooled": torch.stack(pooled)})
        return cond.to(self.device, self.dtype)
