"""Prompt files that recipes name and that are published elsewhere: what they hold and how to get them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PublishedPrompts:
    """A prompt file that does not come with g2rpo.

    Attributes:
        content: what it holds.
        command: shell command that gets it, under the name that the recipes use.
        also: another place where the prompts are.
    """

    content: str
    command: str
    also: str


PUBLISHED = {
    "hpsv2_train.json": PublishedPrompts(
        "the training prompts of HPSv2 (the dataset HPDv2), on which the paper trains",
        "hf download ymhao/HPDv2 train.json --repo-type dataset --local-dir . "
        "&& mv train.json hpsv2_train.json",
        "data/prompts.txt in github.com/Tencent-Hunyuan/MixGRPO",
    ),
}
"""Name of the file in recipes -> where it comes from."""


def where_from(source: str | Path) -> str:
    """Returns how to get a published prompt file, as a clause that ends a message; "" for other files."""
    published = PUBLISHED.get(Path(source).name)
    if published is None:
        return ""
    return (
        f"it contains {published.content}; to download it: `{published.command}` (as text: {published.also})"
    )
