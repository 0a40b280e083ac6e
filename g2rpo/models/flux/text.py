"""FLUX's two frozen text encoders: CLIP for the pooled embedding, T5 for the token embeddings.

As in diffusers' FluxPipeline, the embeddings are CLIP's pooler output and T5's last hidden state. T5 runs on
the prompt padded to `max_sequence_length` without an attention mask, so outputs at the padding depend on the
text too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.models.family import TextEncoders, Truncation
from g2rpo.models.loading.files import component_class, fingerprint
from g2rpo.models.loading.precision import DTYPES
from g2rpo.models.loading.pretrained import check_finite, load_module, load_tokenizer
from g2rpo.models.policy import Conditioning
from g2rpo.runtime.quiet import quiet_packages


class FluxText(TextEncoders):
    """Text encoders of a folder in diffusers layout; the first call of `encode` loads their weights.

    A run whose prompts are all in the embedding cache never loads them (T5-XXL has 9.5 GB in bfloat16).

    Args:
        folder: the model's folder.
        device: device of the encoders.
        precision: a key of DTYPES, which sets their dtype and is part of `identity`.
        max_sequence_length: number of T5 tokens, padding included; None: the smaller of 512 and the limit of
            the model's second tokenizer.

    Raises:
        ValueError: max_sequence_length is outside that limit.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device,
        precision: str,
        max_sequence_length: int | None = None,
    ) -> None:
        self.folder, self.device, self.precision = folder, device, precision
        self.dtype = DTYPES[precision]
        self.tokenizer: Any = load_tokenizer(component_class(folder, "tokenizer"), folder / "tokenizer")
        self.tokenizer_2: Any = load_tokenizer(component_class(folder, "tokenizer_2"), folder / "tokenizer_2")
        limit = int(self.tokenizer_2.model_max_length)
        self.max_sequence_length = checked_length(max_sequence_length, limit, folder)
        self._encoders: tuple[nn.Module, nn.Module] | None = None
        self._identity: str | None = None

    @property
    def identity(self) -> str:
        """Key of the embedding cache: everything that an embedding depends on beside the prompt.

        It contains a hash of the files, the precision and the sequence length.
        """
        if self._identity is None:
            parts = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
            files = fingerprint(self.folder / part for part in parts)
            self._identity = f"flux-text:{files}:{self.precision}:{self.max_sequence_length}"
        return self._identity

    @torch.no_grad()
    def encode(self, prompts: list[str]) -> Conditioning:
        """Returns the embeddings of prompts: text [N, max_sequence_length, Ct] and pooled [N, Cp].

        Each forward encodes one prompt: matrix kernels round differently at other batch sizes, and a row must
        depend neither on the prompts encoded with it nor on whether it came from the cache.

        Raises:
            ValueError: there are no prompts.
        """
        if not prompts:
            raise ValueError("no prompts to encode; give at least one")
        clip, t5 = self._load()
        text, pooled = [], []
        for prompt in prompts:
            pooled.append(clip(self._tokens(self.tokenizer, prompt, self._clip_length())).pooler_output)
            text.append(t5(self._tokens(self.tokenizer_2, prompt, self.max_sequence_length))[0])
        return Conditioning(
            {"text": torch.cat(text).to(self.dtype), "pooled": torch.cat(pooled).to(self.dtype)}
        )

    def truncated(self, prompts: Sequence[str]) -> list[Truncation]:
        """Returns the prompts that CLIP and T5 truncate: one entry per encoder that truncates any."""
        truncations = []
        for encoder, tokenizer, limit, effect in (
            ("CLIP", self.tokenizer, self._clip_length(), "only their pooled embedding, not T5's input"),
            ("T5", self.tokenizer_2, self.max_sequence_length, "what the model reads"),
        ):
            ids = tokenizer(list(prompts), truncation=False, padding=False, verbose=False).input_ids
            long = tuple(prompt for prompt, row in zip(prompts, ids, strict=True) if len(row) > limit)
            truncations += [Truncation(encoder, limit, long, effect)] if long else []
        return truncations

    def unload(self) -> None:
        """Frees the memory of the encoders; the next `encode` loads them again."""
        self._encoders = None

    def _clip_length(self) -> int:
        return int(self.tokenizer.model_max_length)

    def _tokens(self, tokenizer: Any, prompt: str, length: int) -> Tensor:
        batch = tokenizer(
            [prompt], padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        )
        return batch.input_ids.to(self.device)

    @quiet_packages()
    def _load(self) -> tuple[nn.Module, nn.Module]:
        if self._encoders is None:
            loaded = []
            for part in ("text_encoder", "text_encoder_2"):
                kind = component_class(self.folder, part)
                encoder = load_module(kind, self.folder / part, dtype=self.dtype).to(self.device)
                check_finite(encoder, self.folder / part)
                loaded.append(encoder.eval().requires_grad_(False))
            self._encoders = (loaded[0], loaded[1])
        return self._encoders


def checked_length(requested: int | None, tokenizer_limit: int, model: str | Path) -> int:
    """Returns the number of T5 tokens per prompt.

    Args:
        requested: the setting max_sequence_length; None: the limit, the smaller of 512 and `tokenizer_limit`.
        tokenizer_limit: largest number of tokens of the model's second tokenizer.
        model: name of the model, for the error message.

    Raises:
        ValueError: the requested number is outside 1 to the limit.
    """
    limit = min(512, tokenizer_limit)
    if requested is not None and not 1 <= requested <= limit:
        raise ValueError(
            f"max_sequence_length={requested} is outside 1..{limit}, the tokens that {model}'s second "
            "tokenizer and FLUX accept"
        )
    return limit if requested is None else requested
