"""FLUX models with random weights, for test runs at full size without a download.

    random:flux-dev   FLUX.1-dev's transformer and VAE, 24 GB, created on the GPU in seconds
    random:tiny       the same classes with a few thousand weights, for tests on a CPU

Prompt embeddings are noise that depends on the prompt's text. Time, memory and communication are those of the
real model; the images are meaningless.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from g2rpo.models.flux.known import RANDOM
from g2rpo.models.flux.text import DTYPES, checked_length
from g2rpo.models.policy import Conditioning
from g2rpo.runtime.random import keyed_noise

PREFIX = "random:"


def is_random(name: str) -> bool:
    """Returns whether `name` is the name of a model with random weights."""
    return name.startswith(PREFIX)


def random_configs(name: str) -> dict[str, dict[str, Any]]:
    """Returns the configuration of each part of a model with random weights.

    Raises:
        ValueError: there is no such architecture.
    """
    if name not in RANDOM:
        raise ValueError(f"no model {name!r}; with random weights there are: {', '.join(RANDOM)}")
    return RANDOM[name]


def random_vae(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Creates an AutoencoderKL with torch's initial weights, which are the same on every process."""
    from diffusers import AutoencoderKL

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Module.to(AutoencoderKL.from_config(dict(config)), device, dtype)


class RandomText:
    """Replacement for the text encoders: standard normal embeddings, keyed by the prompt's text."""

    def __init__(
        self,
        configs: Mapping[str, Mapping[str, Any]],
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
        return Conditioning(torch.stack(text), torch.stack(pooled)).to(self.device, self.dtype)

    def unload(self) -> None:
        """Does nothing, because no encoder is loaded."""
