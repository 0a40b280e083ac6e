"""Rewards for images, applied to the frames of videos."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from g2rpo.rewards.base import Media, Metadata, Reward, is_groupwise, media_of

Reduce = Literal["mean", "min", "first"]

REDUCTIONS: dict[Reduce, Callable[[Tensor], Tensor]] = {
    "mean": lambda scores: scores.mean(1),
    "min": lambda scores: scores.amin(1),
    "first": lambda scores: scores[:, 0],
}
"""Reduction of the frames' scores [N, frames] to [N]; NaN in any of them gives NaN."""


class PerFrame:
    """Scores a video by the scores that a reward for images gives to its frames.

    Attributes:
        reward: the reward for images.
    """

    media: Media = "video"

    def __init__(
        self,
        reward: Reward,
        frames: int | Sequence[int] | None = None,
        reduce: Reduce = "mean",
        *,
        batch: int | None = None,
    ) -> None:
        """Wraps a reward for images.

        Args:
            reward: scores the frames; not groupwise.
            frames: None = all frames; a number n = n frames at even distances, the first and the last among
                them (n = 1: the first); a list = these frames, from 0, negative ones from the end.
            reduce: the video's score is the mean or the lowest score of these frames, or that of the first
                of them, which is then the only one that is scored.
            batch: maximum number of frames in one call of the reward; None = all frames of all videos.

        Raises:
            ValueError: an argument is outside its range, or the reward is groupwise or scores videos.
        """
        if is_groupwise(reward) or media_of(reward) != "image":
            raise ValueError("PerFrame needs a reward that scores each image by itself")
        if reduce not in REDUCTIONS:
            raise ValueError(f"reduce={reduce!r} must be one of {', '.join(map(repr, REDUCTIONS))}")
        if (frames < 1) if isinstance(frames, int) else (frames is not None and not list(frames)):
            raise ValueError(f"frames={frames!r} must be a number >= 1, a list of frames, or None for all")
        if batch is not None and batch < 1:
            raise ValueError(f"batch={batch} must be >= 1, the number of frames per call, or None")
        self.reward, self.reduce, self.batch = reward, reduce, batch
        self.frames = frames if frames is None or isinstance(frames, int) else list(frames)

    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        """Scores N videos.

        Args:
            images: [N, F, 3, H, W] in [0, 1], float32.
            prompts, metadata: one per video.

        Returns:
            [N], float32; NaN if any frame that the score depends on has no score.

        Raises:
            ValueError: images of another shape, or a frame that the videos do not have.
        """
        if images.ndim != 5:
            raise ValueError(f"videos must be [N, F, 3, H, W], got shape {tuple(images.shape)}")
        chosen = self.chosen_frames(images.shape[1])
        pixels = images[:, chosen].flatten(0, 1)
        owners = [video for video in range(len(images)) for _ in chosen]
        size = self.batch or max(1, len(owners))
        scores = []
        for low in range(0, len(owners), size):
            rows = owners[low : low + size]
            entries = None if metadata is None else [metadata[row] for row in rows]
            part = self.reward(pixels[low : low + size], [prompts[row] for row in rows], entries)
            if part.shape != (len(rows),):
                raise ValueError(
                    f"the reward returned scores of shape {tuple(part.shape)} for {len(rows)} frames"
                )
            scores.append(part)
        if not scores:
            return images.new_empty(0, dtype=torch.float32)
        return REDUCTIONS[self.reduce](torch.cat(scores).unflatten(0, (len(images), len(chosen))))

    def chosen_frames(self, num_frames: int) -> list[int]:
        """Returns the indices of the frames that are scored of a video with so many frames.

        Raises:
            ValueError: the video has no frames, fewer than requested, or not the listed ones.
        """
        if self.frames is None:
            chosen = list(range(num_frames))
        elif isinstance(self.frames, int):
            chosen = torch.linspace(0, num_frames - 1, self.frames).round().long().tolist()
            chosen = list(dict.fromkeys(chosen))
        else:
            chosen = self.frames
        missing = [frame for frame in chosen if not -num_frames <= frame < num_frames]
        if missing or not chosen or (isinstance(self.frames, int) and len(chosen) < self.frames):
            raise ValueError(f"frames={self.frames!r} are requested, but the videos have {num_frames} frames")
        return chosen[:1] if self.reduce == "first" else chosen

    @property
    def last_error(self) -> str | None:
        """What the wrapped reward reports of its last call."""
        return getattr(self.reward, "last_error", None)

    def cannot_score(self, prompt: str, metadata: Mapping[str, Any] | None = None) -> str | None:
        """Returns what the wrapped reward says of this prompt; None: nothing."""
        reason_of = getattr(self.reward, "cannot_score", None)
        return reason_of(prompt, metadata) if callable(reason_of) else None

    def describe(self) -> str:
        """Returns a line for the log: the frames, the reduction, and the reward's own description."""
        frames = "all frames" if self.frames is None else f"frames {self.frames}"
        if isinstance(self.frames, int):
            frames = f"{self.frames} frames"
        describe = getattr(self.reward, "describe", None)
        own = describe() if callable(describe) else None
        return f"per frame: {self.reduce} of {frames}" + (f"; {own}" if own else "")
