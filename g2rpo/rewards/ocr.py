"""Rendered text: whether the image shows the words that its prompt puts in quotes, in [0, 1].

The rule is that of Flow-GRPO (arXiv:2505.05470, section 4, and its released scorer): r = max(1 - N_e / N, 0)
with N_e the Levenshtein distance between the recognised text and the N requested characters; an image that
shows the text among other words scores 1. The text is recognised by RapidOCR's PP-OCR, which its wheel holds.
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

from g2rpo.rewards.base import Metadata, RewardSeconds, RewardSpec

PACKAGES = ("rapidocr", "onnxruntime", "rapidfuzz")
QUOTED = re.compile(r'"([^"]*)"|[“„]([^“”„]*)[”“]|«([^«»]*)»|「([^「」]*)」')


def requested_text(prompt: str, metadata: Mapping[str, Any] | None = None) -> str:
    """Returns the metadata's `text`, else the quoted parts of the prompt joined by spaces, else "".

    Quotes are double ones: "…", “…”, „…“, «…» or 「…」; a single one may be an apostrophe.
    """
    given = (metadata or {}).get("text")
    if isinstance(given, str):
        return given
    return " ".join("".join(groups) for groups in QUOTED.findall(prompt))


def normalised(text: str) -> str:
    """Removes differences of case, white space and typographic variants (Unicode NFKC)."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def similarity(recognised: str, requested: str, *, exact: bool = False) -> float:
    """Returns how much of the requested text was recognised, in [0, 1].

    Args:
        recognised, requested: both `normalised`; the requested text is not empty.
        exact: whether additional text lowers the score.
    """
    from rapidfuzz.distance import Levenshtein

    if requested in recognised and not exact:
        return 1.0
    return 1 - min(Levenshtein.distance(recognised, requested), len(requested)) / len(requested)


@dataclass
class Ocr:
    """Recognises the text of each image on the CPU; NaN if neither prompt nor metadata requests a text.

    Attributes:
        engine: RapidOCR's reader.
        exact: whether additional text lowers the score.
        last_error: why an image of the last call has no score, or None.
    """

    engine: Any
    exact: bool = False
    last_error: str | None = None

    def cannot_score(self, prompt: str, metadata: Mapping[str, Any] | None = None) -> str | None:
        """Returns why no image of this prompt has a score, or None if a text is requested."""
        if normalised(requested_text(prompt, metadata)):
            return None
        return f"no text in double quotes in {prompt[:80]!r}, and none in the metadata"

    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        entries = metadata or [{}] * len(prompts)
        scores = torch.full((len(prompts),), torch.nan)
        self.last_error = None
        for row, (prompt, entry) in enumerate(zip(prompts, entries, strict=True)):
            if requested := normalised(requested_text(prompt, entry)):
                recognised = normalised(self.read(images[row]))
                scores[row] = similarity(recognised, requested, exact=self.exact)
            else:
                self.last_error = self.cannot_score(prompt, entry)
        return scores

    def read(self, image: Tensor) -> str:
        """Returns the words of one image, [3, H, W] in [0, 1], in reading order; "" if there are none."""
        pixels = (image.detach().float().clamp(0, 1) * 255).round().to(torch.uint8).cpu()
        # RapidOCR expects arrays in OpenCV's order: height, width, then blue, green, red.
        result = self.engine(pixels.permute(1, 2, 0).flip(-1).contiguous().numpy())
        return " ".join(result.txts or ())


def load(device: torch.device, *, exact: bool = False) -> Ocr:
    """Loads the reader of the installed rapidocr: Chinese, Japanese and Latin script, no download.

    Args:
        device: ignored; the reader runs on the CPU.
        exact: whether additional text in the image lowers the score; in Flow-GRPO it does not.

    Raises:
        ValueError: a required package is not installed.
    """
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f"reward 'ocr' needs {' and '.join(missing)}, which is not installed: pip install "
            f"{' '.join(missing)}, or g2rpo with its extra [ocr]"
        )
    from rapidocr import RapidOCR

    # As in Flow-GRPO, lines are not checked for being upside down.
    return Ocr(RapidOCR(params={"Global.use_cls": False, "Global.log_level": "error"}), exact)


SPEC = RewardSpec(
    load,
    title="rendered text (OCR)",
    num_params=0,  # the reader's networks are not on the device
    seconds=RewardSeconds(per_call=0.0, per_image=0.6, machine="one CPU core, square images up to 512 px"),
)
