"""Does the picture show the words that its prompt puts in quotes? 1 - edit distance / length, in [0, 1].

The rule is that of Flow-GRPO (arXiv:2505.05470, section 4, and its released scorer): r = max(1 - N_e / N, 0)
with N_e the Levenshtein distance between what is read and the N characters asked for; a picture that shows
the text among other words scores 1. The words are read by RapidOCR's PP-OCR, which ships inside its wheel.
"""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from g2rpo.rewards.base import Metadata

PACKAGES = ("rapidocr", "onnxruntime", "rapidfuzz")
QUOTED = re.compile(r'"([^"]*)"|[“„]([^“”„]*)[”“]|«([^«»]*)»|「([^「」]*)」')


def text_asked_for(prompt: str, metadata: Mapping[str, Any] | None = None) -> str:
    """Metadata `text` if there is one, else what the prompt quotes, several quotes in their order; or "".

    Quotes are double ones: "…", “…”, „…“, «…» or 「…」; a single one may be an apostrophe.
    """
    given = (metadata or {}).get("text")
    if isinstance(given, str):
        return given
    return " ".join("".join(groups) for groups in QUOTED.findall(prompt))


def comparable(text: str) -> str:
    """Case, white space and typographic variants (Unicode NFKC) make no difference."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def similarity(read: str, asked: str, *, exact: bool = False) -> float:
    """How much of `asked` was read, in [0, 1].

    Args:
        read, asked: both `comparable`; `asked` is not empty.
        exact: other words beside the right ones count against it.
    """
    from rapidfuzz.distance import Levenshtein

    if asked in read and not exact:
        return 1.0
    return 1 - min(Levenshtein.distance(read, asked), len(asked)) / len(asked)


@dataclass
class Ocr:
    """Reads each picture by itself, on the CPU; NaN where neither prompt nor metadata asks for a text.

    Attributes:
        last_error: why a picture of the last call has no score, or None.
    """

    engine: Any
    exact: bool = False
    last_error: str | None = None

    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        known = metadata or [{}] * len(prompts)
        scores = torch.full((len(prompts),), torch.nan)
        self.last_error = None
        for row, (prompt, more) in enumerate(zip(prompts, known, strict=True)):
            if asked := comparable(text_asked_for(prompt, more)):
                read = comparable(self.read(images[row]))
                scores[row] = similarity(read, asked, exact=self.exact)
            else:
                self.last_error = f"no text in double quotes in {prompt[:80]!r}, and none in the metadata"
        return scores

    def read(self, image: Tensor) -> str:
        """Words of one picture [3, H, W] in [0, 1], in reading order; "" where there are none."""
        pixels = (image.detach().float().clamp(0, 1) * 255).round().to(torch.uint8).cpu()
        # RapidOCR reads arrays as OpenCV does: height, width, then blue, green, red.
        found = self.engine(pixels.permute(1, 2, 0).flip(-1).contiguous().numpy())
        return " ".join(found.txts or ())


def load(device: torch.device, *, exact: bool = False) -> Ocr:
    """The reader of the installed rapidocr: Chinese, Japanese and Latin script, without a network.

    Args:
        exact: other words in the picture count against it; otherwise, as in Flow-GRPO, they are free where
            the right ones are among them.

    Raises:
        ValueError: its packages are not installed.
    """
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f"reward 'ocr' needs {' and '.join(missing)}, not installed here: pip install "
            f"{' '.join(missing)}, or g2rpo with its extra [ocr]"
        )
    from rapidocr import RapidOCR

    # As in Flow-GRPO, no guess whether a line stands on its head.
    return Ocr(RapidOCR(params={"Global.use_cls": False, "Global.log_level": "error"}), exact)
