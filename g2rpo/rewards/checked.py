"""A reward whose answers are checked before they can become advantages: a failure is never a number.

What a reward raises, be it a server's silence or a user's bug, means that the samples of that batch have no
score (NaN); it is logged with its traceback, once for each place that raises. Enough of them stop the run
with a checkpoint (max_invalid_fraction). An answer of the wrong kind, shape or type is an error at once: it
would be wrong each time, and so is code that ends the program (exits.py).

Rewards do not disturb each other: each call gets images, prompts and metadata of its own, so whatever a
reward writes into them, then or later, reaches nobody else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from g2rpo.rewards.exits import RewardExited, exits_reported

if TYPE_CHECKING:
    from g2rpo.rewards.base import Metadata, Reward

LOG = logging.getLogger(__name__)


@dataclass
class CheckedReward:
    """A reward by name.

    Attributes:
        options: what it was made with.
        last_error: why samples had no score, as far as the reward told: what it raised, or its own
            `last_error` (None, or words about its last call). Whoever reads it sets it back to None.
    """

    name: str
    reward: Reward
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    last_error: str | None = field(default=None, init=False, compare=False)
    _told: set[str] = field(default_factory=set, init=False, compare=False, repr=False)

    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        """As `Reward.__call__`; all NaN where the reward raised, and NaN for a picture that is not finite.

        Raises:
            ValueError: inputs of unequal length, or an answer that is not one float32 per image.
            RewardExited: the reward's code ended the program (a ValueError).
            KeyboardInterrupt: as it came.
        """
        n = len(images)
        if len(prompts) != n or (metadata is not None and len(metadata) != n):
            lengths = f"{len(prompts)} prompts" + ("" if metadata is None else f", {len(metadata)} metadata")
            raise ValueError(f"reward {self.name!r} was given {n} images but {lengths}; they must be equal")
        inputs = own_inputs(self.reward, images, prompts, metadata)
        try:
            with exits_reported(self.name, "while scoring"):
                scores = self.reward(*inputs)
                self.last_error = getattr(self.reward, "last_error", None) or self.last_error
        except (KeyboardInterrupt, RewardExited):
            raise
        except BaseException as error:  # the only place that catches all: tests/test_house.py
            # Of BaseException too: a cancelled task, or a class of the reward's own, is one call's failure.
            self._tell(error, n)
            return torch.full((n,), torch.nan)
        if not isinstance(scores, Tensor):
            raise ValueError(f"reward {self.name!r} returned {type(scores).__name__}, not a torch.Tensor")
        if scores.shape != (n,) or scores.dtype != torch.float32:
            raise ValueError(
                f"reward {self.name!r} returned {scores.dtype} {tuple(scores.shape)} for {n} images; "
                f"it must return float32 ({n},), NaN for a sample without a score"
            )
        broken = ~images.flatten(1).isfinite().all(1)
        if bool(broken.any()):  # whatever a reward makes of one, as 8 bits or by the pixels that are left
            self.last_error = self.last_error or f"{int(broken.sum())} of {n} pictures hold NaN or infinity"
        return scores.detach().masked_fill(broken.to(scores.device), torch.nan)

    def describe(self) -> str | None:
        """What the reward says of itself (its `describe()`), for the log; None where it says nothing."""
        with exits_reported(self.name, "while describing itself"):
            describe = getattr(self.reward, "describe", None)
            return str(describe()) if callable(describe) else None

    def _tell(self, error: BaseException, samples: int) -> None:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        self.last_error = said if len(said) <= 300 else f"{said[:297]}..."
        place = f"{type(error).__name__} {_place(error.__traceback__)}"
        if place not in self._told:
            self._told.add(place)
            LOG.error(
                "reward %r failed: the %d samples of this batch have no score. More of the same is counted "
                "(invalid_fraction/%s), not printed",
                self.name,
                samples,
                self.name,
                exc_info=error,
            )


def own_inputs(
    reward: Any, images: Tensor, prompts: list[str], metadata: Metadata | None
) -> tuple[Tensor, list[str], Metadata | None]:
    """Copies for one reward alone; of the metadata one per image, though images of a prompt share theirs.

    Only networks of this package get the images themselves: they write into none, and those that frame images
    alike know by them that they may share the preprocessed ones (`preprocess.SharedPixels`).
    """
    from g2rpo.rewards.model_reward import ModelReward  # which imports this package

    shares = isinstance(reward, ModelReward) and type(reward).__module__.startswith("g2rpo.")
    own = images if shares else images.detach().clone()
    return own, list(prompts), None if metadata is None else [deepcopy(one) for one in metadata]


def ask(reward: Reward, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
    """The answer of a reward, checked or not, to inputs of its own."""
    if not isinstance(reward, CheckedReward):  # which makes its copies by itself
        images, prompts, metadata = own_inputs(reward, images, prompts, metadata)
    return reward(images, prompts, metadata)


def _place(trace: TracebackType | None) -> str:
    """file:line of the innermost frame."""
    place = ""
    while trace is not None:
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
