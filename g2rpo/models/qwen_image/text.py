"""Qwen-Image's frozen text encoder: the language part of Qwen2.5-VL, which reads the prompt in a template.

As in diffusers' QwenImagePipeline, the embeddings are the last hidden states of the tokens after the start of
the template (34 tokens): those of the prompt and of the template's end. Their number depends on the prompt;
the transformer masks the padding of a batch, so rows are kept without it. The vision tower and the output
layer are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.models.family import Truncation
from g2rpo.models.loading.files import component_class, fingerprint
from g2rpo.models.loading.precision import DTYPES
from g2rpo.models.loading.pretrained import check_finite, load_module, load_tokenizer
from g2rpo.models.policy import Conditioning
from g2rpo.runtime.quiet import quiet_packages

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
"""Text that the encoder reads, with the prompt at {}."""
DROPPED_TOKENS = 34
"""Tokens of the template before the prompt, whose embeddings are dropped."""

DEFAULT_TOKENS, MOST_TOKENS = 512, 1024
"""Default and largest number of text tokens per prompt, as in QwenImagePipeline."""


class QwenText:
    """Text encoder of a folder in diffusers layout; the first call of `encode` loads its weights.

    A run whose prompts are all in the embedding cache never loads it (14 GB in bfloat16).

    Args:
        folder: the model's folder.
        device: device of the encoder.
        precision: a key of DTYPES, which sets its dtype and is part of `identity`.
        max_sequence_length: largest number of text tokens per prompt, the template's end included; None: 512.

    Raises:
        ValueError: max_sequence_length is outside 1..1024.
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
        self.max_sequence_length = checked_length(max_sequence_length)
        self.tokenizer: Any = load_tokenizer(component_class(folder, "tokenizer"), folder / "tokenizer")
        self._encoder: nn.Module | None = None
        self._identity: str | None = None

    @property
    def identity(self) -> str:
        """Key of the embedding cache: everything that an embedding depends on beside the prompt.

        It contains a hash of the files, the precision and the largest number of tokens.
        """
        if self._identity is None:
            files = fingerprint(self.folder / part for part in ("text_encoder", "tokenizer"))
            self._identity = f"qwen-image-text:{files}:{self.precision}:{self.max_sequence_length}"
        return self._identity

    @torch.no_grad()
    def encode(self, prompts: list[str]) -> Conditioning:
        """Returns the embeddings of prompts: the ragged tensor "text" [N, longest, Ct].

        Each forward encodes one prompt: matrix kernels round differently at other batch sizes, and a row must
        depend neither on the prompts encoded with it nor on whether it came from the cache. The encoder is
        causal, so tokens beyond max_sequence_length are cut off before the forward.

        Raises:
            ValueError: there are no prompts.
        """
        if not prompts:
            raise ValueError("no prompts to encode; give at least one")
        encoder = self._load()
        rows = []
        for ids in self._tokens(prompts):
            tokens = torch.tensor([ids[: DROPPED_TOKENS + self.max_sequence_length]], device=self.device)
            hidden: Tensor = encoder(input_ids=tokens, use_cache=False).last_hidden_state
            rows.append(hidden[0, DROPPED_TOKENS:].to(self.dtype))
        return ragged(rows)

    def unload(self) -> None:
        """Frees the memory of the encoder; the next `encode` loads it again."""
        self._encoder = None

    def truncated(self, prompts: Sequence[str]) -> list[Truncation]:
        """Returns the prompts with more than max_sequence_length tokens, the template's end included."""
        limit = self.max_sequence_length
        counts = [len(ids) - DROPPED_TOKENS for ids in self._tokens(prompts)] if prompts else []
        long = tuple(p for p, count in zip(prompts, counts, strict=True) if count > limit)
        return [Truncation("Qwen2.5-VL", limit, long)] if long else []

    def _tokens(self, prompts: Sequence[str]) -> list[list[int]]:
        texts = [TEMPLATE.format(prompt) for prompt in prompts]
        ids: list[list[int]] = self.tokenizer(texts, truncation=False, padding=False, verbose=False).input_ids
        return ids

    @quiet_packages()
    def _load(self) -> nn.Module:
        if self._encoder is None:
            folder = self.folder / "text_encoder"
            encoder = language_model(folder, self.dtype).to(self.device)
            check_finite(encoder, folder)
            self._encoder = encoder.eval().requires_grad_(False)
        return self._encoder


def language_model(folder: Path, dtype: torch.dtype) -> Any:
    """Reads the language part of a Qwen2_5_VLForConditionalGeneration.

    Raises:
        ValueError: the folder lacks some of its weights.
    """
    from transformers import Qwen2_5_VLTextModel

    class LanguageModel(Qwen2_5_VLTextModel):
        # Otherwise transformers prints a table of the weights that are left out.
        _keys_to_ignore_on_load_unexpected = (r"^(model\.)?visual\.", r"^lm_head\.")

    return load_module(
        LanguageModel, folder, dtype=dtype, key_mapping={r"^model\.language_model\.": "model."}
    )


def ragged(rows: Sequence[Tensor]) -> Conditioning:
    """Returns embeddings [length of the row, Ct] as a conditioning, padded with zeros to the longest."""
    lengths = torch.tensor([len(row) for row in rows])
    return Conditioning({"text": nn.utils.rnn.pad_sequence(list(rows), batch_first=True)}, {"text": lengths})


def checked_length(requested: int | None) -> int:
    """Returns the largest number of text tokens per prompt.

    Args:
        requested: the setting max_sequence_length; None: 512.

    Raises:
        ValueError: the requested number is outside 1..1024.
    """
    if requested is not None and not 1 <= requested <= MOST_TOKENS:
        raise ValueError(
            f"max_sequence_length={requested} is outside 1..{MOST_TOKENS}, the text tokens that Qwen-Image "
            f"accepts; {DEFAULT_TOKENS} is the default"
        )
    return DEFAULT_TOKENS if requested is None else requested
