"""Captions to token ids, as each reward's original does it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

CLIP_TOKENIZER = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
BERT_TOKENIZER = "google-bert/bert-base-uncased"
TOKENIZER_FILES = ("tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.json")

_OPENCLIP_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"
"""What BPE works on, one by one; transformers' has <|endoftext|> as a word besides."""


def openclip_clean(text: str) -> str:
    """What OpenCLIP does before BPE: mends the text, undoes HTML twice, single spaces, lower case.

    Curly quotes become straight, full-width letters narrow, `&amp;` an ampersand, `cafÃ©` a café.
    """
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split()).lower()


class ClipTokenizer:
    """CLIP's byte-pair encoding: `[N] texts -> [N, context]` ids, int64, end token last, then padding."""

    def __init__(self, folder: Path, context: int, vocabulary: int, *, openclip: bool) -> None:
        """Args:
            folder: with vocab.json and merges.txt, or tokenizer.json.
            context: most tokens of a text; the rest is cut off, its end token stays.
            vocabulary: number of tokens that the network knows.
            openclip: OpenCLIP's cleaning, ids and padding with 0; else as transformers does it.

        Raises:
            ValueError: a folder without a tokenizer, or with that of another network.
        """
        from transformers import CLIPTokenizer

        _check_tokenizer_folder(folder, ("tokenizer.json",), ("vocab.json", "merges.txt"))
        self._tokenizer: Any = CLIPTokenizer.from_pretrained(folder)
        self._context, self._openclip = context, openclip
        end = self._tokenizer.eos_token_id
        if end != vocabulary - 1:  # the end token is the last one, and is found as that
            raise ValueError(
                f"the tokenizer in {folder} has {end + 1:,} tokens, the network knows {vocabulary:,}; "
                "give the tokenizer of this network (tokenizer=FOLDER)"
            )
        if openclip:
            from tokenizers import Regex, normalizers, pre_tokenizers

            backend = self._tokenizer.backend_tokenizer
            backend.normalizer = normalizers.Sequence([])  # all of it is in openclip_clean
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(_OPENCLIP_WORDS), "removed", invert=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )

    def __call__(self, texts: Sequence[str]) -> Tensor:
        texts = [openclip_clean(text) for text in texts] if self._openclip else list(texts)
        encoded = self._tokenizer(
            texts,
            padding="max_length",
            truncation=True,
            max_length=self._context,
            return_tensors="pt",
            split_special_tokens=self._openclip,  # a caption that spells an end token does not end there
        )
        return encoded.input_ids * encoded.attention_mask if self._openclip else encoded.input_ids


class BertTokenizer:
    """ImageReward's: bert-base-uncased with [DEC] and [ENC] added: `[N] texts -> [N, length]` ids, int64.

    Padding is 0; no text has that id elsewhere.
    """

    def __init__(self, folder: Path, vocabulary: int, length: int = 35) -> None:
        """Args: folder with vocab.txt or tokenizer.json; ids that the network knows; most tokens of a text.

        Raises:
            ValueError: a folder without a tokenizer, or with that of another network.
        """
        from transformers import BertTokenizer

        _check_tokenizer_folder(folder, ("tokenizer.json",), ("vocab.txt",))
        self._tokenizer: Any = BertTokenizer.from_pretrained(folder)
        self._tokenizer.add_special_tokens({"bos_token": "[DEC]", "extra_special_tokens": ["[ENC]"]})
        self._length = length
        if len(self._tokenizer) != vocabulary or self._tokenizer.pad_token_id != 0:
            raise ValueError(
                f"the tokenizer in {folder} has {len(self._tokenizer):,} tokens with [DEC] and [ENC], the "
                f"network knows {vocabulary:,}; give that of bert-base-uncased (tokenizer=FOLDER)"
            )

    def __call__(self, texts: Sequence[str]) -> Tensor:
        return self._tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=self._length, return_tensors="pt"
        ).input_ids


def has_tokenizer(folder: Path, *sets: tuple[str, ...]) -> bool:
    """Whether all files of one of the sets are there."""
    return any(all((folder / name).is_file() for name in names) for names in sets)


def _check_tokenizer_folder(folder: Path, *sets: tuple[str, ...]) -> None:
    if not has_tokenizer(folder, *sets):
        wanted = " or ".join(" with ".join(names) for names in sets)
        raise ValueError(f"{folder} holds no tokenizer ({wanted}); give a folder with one (tokenizer=FOLDER)")
