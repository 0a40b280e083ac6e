"""What a reward is: the protocols of pointwise and groupwise rewards, and the facts about a reward, its spec.

Reward        scores each image, or each video, by itself; nearly all rewards are of this kind
GroupReward   compares the images of one group with each other, for example in pairs
RewardSpec    how a reward is made, which files it needs, its parameters and its measured time
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

Metadata = list[dict[str, Any]]
"""One dictionary per image: the fields of the prompt's record, except its text."""

Options = Mapping[str, Any]
"""Keyword arguments of a reward's factory."""

Media = Literal["image", "video"]
"""What a reward scores: images [N, 3, H, W] or videos [N, F, 3, H, W], both in [0, 1]."""

MEDIA: tuple[Media, ...] = ("image", "video")


class Reward(Protocol):
    """Scores images, usually against their prompts.

    A reward for videos states it by the class attribute `media = "video"`; without it a reward scores images.
    """

    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        """Scores N images.

        Args:
            images: [N, 3, H, W] in [0, 1], float32; [N, F, 3, H, W] for media = "video".
            prompts: N prompts.
            metadata: N dictionaries with further fields of the prompts' records, or None.

        Returns:
            [N], float32, on any device; NaN marks an image without a score.
        """
        ...


class GroupReward(Protocol):
    """Scores the images of one group by comparing them with each other.

    Such a reward states it by the class attribute `groupwise = True`. It may also have a static method
    `comparisons(n) -> int`, the number of comparisons among n images, which `g2rpo plan` shows; without it,
    n images count as n comparisons.
    """

    @property
    def groupwise(self) -> bool:
        """True; a class attribute, so that it is known before the reward is created."""
        ...

    def __call__(self, images: Tensor, prompt: str, metadata: dict[str, Any] | None = None) -> Tensor:
        """Scores the valid members of one cell: one prompt, one noise step, one granularity.

        Args:
            images: [n, 3, H, W] in [0, 1], float32, with 2 <= n <= G; never the anchor's image.
            prompt: the prompt of all n images.
            metadata: further fields of the prompt's record, or None.

        Returns:
            [n], float32, on any device; NaN marks an image without a score. Scores of different cells are
            never compared with each other.
        """
        ...


@dataclass(frozen=True)
class Source:
    """Files of one hub repository.

    Attributes:
        repo: owner/name.
        files: names or patterns; each must match a file of the repository.
        also: names or patterns of optional files.
    """

    repo: str
    files: tuple[str, ...]
    also: tuple[str, ...] = ("README.md", "LICENSE*")


@dataclass(frozen=True)
class RewardSeconds:
    """Measured time of a reward.

    Attributes:
        per_call: seconds of a call, whatever the number of images, >= 0.
        per_image: seconds per image of a call, in addition, >= 0.
        machine: the machine, dtype and image size of the measurement.
    """

    per_call: float
    per_image: float
    machine: str


@dataclass(frozen=True)
class RewardSpec:
    """The facts about a reward, in the reward's own file, known before it is created.

    A registered reward has its spec in a module attribute (rewards/registry.py). The class or function of a
    custom reward may have one as its attribute `spec`; without it, `g2rpo plan` says that memory and time of
    the reward are not counted. None always means "unknown", never 0.

    Attributes:
        factory: makes the reward from a torch.device and keyword options. None in the spec of a custom
            reward, whose class is its own factory.
        sources: repositories of the weights (option `path`) and of the tokenizer (option `tokenizer`); empty
            if nothing is downloaded.
        origin: where the reward comes from if there are no sources, as `g2rpo fetch` shows it.
        num_params: parameters of the published network on the run's device; 0 if a server, the CPU or a
            formula computes the reward; None if unknown.
        dtype: dtype of these parameters, if the option `dtype` does not give another: a name of
            `model_reward.DTYPES`, or "auto".
        seconds: measured time, or None if it was not measured.
        title: its name in prose, for reports and model cards; "": its name in a recipe.
    """

    factory: Callable[..., Any] | None = None
    sources: tuple[Source, ...] = ()
    origin: str = "ships with g2rpo or a package that it needs"
    num_params: int | None = None
    dtype: str = "float32"
    seconds: RewardSeconds | None = None
    title: str = ""


def media_of(reward: Any) -> Media:
    """Returns what a reward, or its class, scores: its attribute `media`, or "image" without one.

    Raises:
        ValueError: `media` is neither "image" nor "video".
    """
    media: Media = getattr(reward, "media", "image")
    if media not in MEDIA:
        raise ValueError(f"media={media!r} must be {' or '.join(map(repr, MEDIA))}")
    return media


def is_groupwise(reward: Any) -> bool:
    """Whether a reward, or its class, is a `GroupReward`."""
    return bool(getattr(reward, "groupwise", False))
