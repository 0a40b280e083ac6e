"""Tokenizers of the reward networks: captions to token ids, as in each original."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from g2rpo.rewards.base import Source

CLIP_TOKENIZER = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
BERT_TOKENIZER = "google-bert/bert-base-uncased"
TOKENIZER_FILES = ("tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.json")

_OPTIONAL_FILES = ("tokenizer.json", "special_tokens_map.json", "README.md", "LICENSE*")
CLIP_TOKENIZER_SOURCE = Source(
    CLIP_TOKENIZER, ("tokenizer_config.json", "vocab.json", "merges.txt"), _OPTIONAL_FILES
)
BERT_TOKENIZER_SOURCE = Source(BERT_TOKENIZER, ("vocab.txt", "tokenizer_config.json"), _OPTIONAL_FILES)

_OPENCLIP_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"
"""The words to which BPE is applied; transformers' pattern also has <|endoftext|> as a word."""


def openclip_clean(text: str) -> str:
    """Cleans a text as OpenCLIP does before BPE: ftfy, HTML unescaping (twice), single spaces, lower case.

    For example, curly quotes become straight, full-width letters narrow, `&amp;` an ampersand, `cafÃ©` café.
    """
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split()).lower()


class ClipTokenizer:
    """CLIP's byte-pair encoding: N texts -> token ids [N, context], int64; padding follows the end token."""

    def __init__(self, folder: Path, context: int, vocabulary: int, *, openclip: bool) -> None:
        """Loads the tokenizer.

        Args:
            folder: contains vocab.json and merges.txt, or tokenizer.json.
            context: maximum number of tokens; longer texts are truncated before the end token.
            vocabulary: number of tokens of the network.
            openclip: whether to clean, tokenize and pad (with 0) as OpenCLIP does; else as transformers does.

        Raises:
            ValueError: the folder has no tokenizer, or that of another network.
        """
        from transformers import CLIPTokenizer

        _check_tokenizer_folder(folder, ("tokenizer.json",), ("vocab.json", "merges.txt"))
        self._tokenizer: Any = CLIPTokenizer.from_pretrained(folder)
        self._context, self._openclip = context, openclip
        end = self._tokenizer.eos_token_id
        if end != vocabulary - 1:  # the networks recognise the end token as the last one
            raise ValueError(
                f"the tokenizer in {folder} has {end + 1:,} tokens, the network {vocabulary:,}; "
                "give the tokenizer of this network (tokenizer=FOLDER)"
            )
        if openclip:
            from tokenizers import Regex, normalizers, pre_tokenizers

            backend = self._tokenizer.backend_tokenizer
            backend.normalizer = normalizers.Sequence([])  # openclip_clean does all of it
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(_OPENCLIP_WORDS), "removed", invert=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Tokenizes N texts to [N, context], int64."""
        texts = [openclip_clean(text) for text in texts] if self._openclip else list(texts)
        encoded = self._tokenizer(
            texts,
            padding="max_length",
            truncation=True,
            max_length=self._context,
            return_tensors="pt",
            split_special_tokens=self._openclip,  # an end token spelled in a caption is plain text
        )
        return encoded.input_ids * encoded.attention_mask if self._openclip else encoded.input_ids


class BertTokenizer:
    """ImageReward's tokenizer, bert-base-uncased with [DEC] and [ENC]: N texts -> ids [N, length], int64.

    Padding is 0, an id that no text contains.
    """

    def __init__(self, folder: Path, vocabulary: int, length: int = 35) -> None:
        """Loads the tokenizer.

        Args:
            folder: contains vocab.txt or tokenizer.json.
            vocabulary: number of tokens of the network.
            length: number of tokens of each row; longer texts are truncated.

        Raises:
            ValueError: the folder has no tokenizer, or that of another network.
        """
        from transformers import BertTokenizer

        _check_tokenizer_folder(folder, ("tokenizer.json",), ("vocab.txt",))
        self._tokenizer: Any = BertTokenizer.from_pretrained(folder)
        self._tokenizer.add_special_tokens({"bos_token": "[DEC]", "extra_special_tokens": ["[ENC]"]})
        self._length = length
        if len(self._tokenizer) != vocabulary or self._tokenizer.pad_token_id != 0:
            raise ValueError(
                f"the tokenizer in {folder} has {len(self._tokenizer):,} tokens with [DEC] and [ENC], the "
                f"network {vocabulary:,}; give that of bert-base-uncased (tokenizer=FOLDER)"
            )

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Tokenizes N texts to [N, length], int64."""
        return self._tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=self._length, return_tensors="pt"
        ).input_ids


def has_tokenizer(folder: Path, *sets: tuple[str, ...]) -> bool:
    """Whether the folder contains all files of at least one of the sets."""
    return any(all((folder / name).is_file() for name in names) for names in sets)


def _check_tokenizer_folder(folder: Path, *sets: tuple[str, ...]) -> None:
    if not has_tokenizer(folder, *sets):
        files = " or ".join(" with ".join(names) for names in sets)
        raise ValueError(
            f"{folder} contains no tokenizer ({files}); give a folder with one (tokenizer=FOLDER)"
        )
