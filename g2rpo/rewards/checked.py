"""Checks on what a reward returns: a failed evaluation becomes NaN, never a score.

The same checks hold for rewards that score each image and for groupwise ones, which compare those of a group.

An exception in a reward, such as a server timeout or a bug in user code, leaves the samples of that batch
without a score (NaN). It is logged with its traceback, once per source line. If too many samples are invalid
(max_invalid_fraction), the run stops with a checkpoint. A result of the wrong type, shape or dtype stops the
run at once on all processes, because it would be wrong at every call; so does code that ends the program
(exits.py). A dry call finds both before a run begins (dry_call.py).

Rewards are isolated from each other: each call gets its own copies of images, prompts and metadata, so
nothing that a reward writes into them reaches another reward or the run.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from g2rpo.rewards.base import is_groupwise
from g2rpo.rewards.exits import RewardUnusable, WrongResult, exits_reported
from g2rpo.rewards.isolation import restored_state
from g2rpo.runtime.secrets import masked

if TYPE_CHECKING:
    from g2rpo.rewards.base import GroupReward, Metadata, Reward

LOG = logging.getLogger(__name__)


def _hide_secrets(record: logging.LogRecord) -> bool:
    """Filter that keeps secrets out of a logged traceback: a formatter uses `exc_text` where it is set."""
    if record.exc_info:
        record.exc_text = masked(logging.Formatter().formatException(record.exc_info))
    return True


LOG.addFilter(_hide_secrets)


@dataclass
class CheckedReward:
    """A named reward whose inputs are isolated and whose results are checked.

    Attributes:
        name: the registered name or `module:attribute`.
        reward: the wrapped reward.
        options: the options with which the reward was created.
        last_error: why samples had no score, if known: the exception, or the reward's own `last_error` (None,
            or a description of its last failure). The caller resets it to None after reading.
    """

    name: str
    reward: Reward | GroupReward
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    last_error: str | None = field(default=None, init=False, compare=False)
    _logged: set[str] = field(default_factory=set, init=False, compare=False, repr=False)

    @property
    def groupwise(self) -> bool:
        """Whether the reward compares the images of a group: then `judge` scores, else a call."""
        return is_groupwise(self.reward)

    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        """Scores images as `Reward.__call__` does.

        Returns:
            [N], float32. All scores are NaN if the reward raised; the score of a non-finite image is NaN.

        Raises:
            ValueError: the inputs have different lengths, or the reward is groupwise.
            WrongResult: the result is not one float32 per image (a ValueError).
            RewardExited: the reward's code ended the program (a ValueError).
            KeyboardInterrupt: the user interrupted the reward.
        """
        n = len(images)
        if self.groupwise:
            raise ValueError(f"reward {self.name!r} is groupwise: its `judge` scores the images of one group")
        if len(prompts) != n or (metadata is not None and len(metadata) != n):
            lengths = f"{len(prompts)} prompts" + ("" if metadata is None else f", {len(metadata)} metadata")
            raise ValueError(f"reward {self.name!r} was given {n} images but {lengths}; give one per image")
        reward = cast("Reward", self.reward)
        inputs = isolated_inputs(reward, images, prompts, metadata)
        scores = self._scores(lambda: reward(*inputs), n)
        non_finite = ~images.flatten(1).isfinite().all(1)
        if bool(non_finite.any()):  # a reward may score them after conversion to 8 bits or by other pixels
            self.last_error = self.last_error or f"{int(non_finite.sum())} of {n} images hold NaN or infinity"
        return scores.masked_fill(non_finite.to(scores.device), torch.nan)

    def judge(
        self,
        images: Tensor,
        prompt: str,
        metadata: Mapping[str, Any] | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Scores the images of one cell of a group by a groupwise reward.

        Args:
            images: [G, 3, H, W] in [0, 1], float32, of one prompt, noise step and granularity.
            prompt, metadata: of the group.
            valid: [G], bool; the reward gets only these images, and of them only those that are finite.

        Returns:
            [G], float32, on the device of the images. The score of an image that the reward did not get is
            NaN. All scores are NaN if the reward raised, or if it would get fewer than 2 images.

        Raises:
            ValueError: the reward is not groupwise.
            WrongResult, RewardExited, KeyboardInterrupt: as in a call.
        """
        if not self.groupwise:
            raise ValueError(f"reward {self.name!r} is not groupwise: it scores images when it is called")
        reward = cast("GroupReward", self.reward)
        finite = images.flatten(1).isfinite().all(1)
        members = finite if valid is None else finite & valid.to(images.device)
        scores = images.new_full((len(images),), torch.nan, dtype=torch.float32)
        judged = images[members]  # a copy
        if len(judged) < 2:
            self.last_error = self.last_error or (
                f"{len(judged)} of the {len(images)} images of a group can be compared; that needs 2"
            )
            return scores
        own_metadata = None if metadata is None else deepcopy(dict(metadata))
        scores[members] = self._scores(lambda: reward(judged, prompt, own_metadata), len(judged)).to(scores)
        return scores

    def attempt(self, call: Callable[[], Any], n: int) -> Tensor | BaseException:
        """Returns the checked result of a call of the reward for n images, or the error that it raised.

        Raises:
            WrongResult, RewardExited, KeyboardInterrupt: as in a call.
        """
        try:
            with exits_reported(self.name, "while scoring"), restored_state(self.name):
                scores = call()
                own_error = getattr(self.reward, "last_error", None)
                self.last_error = masked(str(own_error)) if own_error else self.last_error
        except (KeyboardInterrupt, RewardUnusable):
            raise
        except BaseException as error:  # the only handler of this kind: tests/repo/test_conventions.py
            # BaseException, because a cancelled task or a custom subclass is a failure of this call only.
            return error
        return self._checked(scores, n)

    def _scores(self, call: Callable[[], Tensor], n: int) -> Tensor:
        """Returns the checked result of a call of the reward for n images; all NaN if it raised."""
        scores = self.attempt(call, n)
        if isinstance(scores, Tensor):
            return scores
        self._log_failure(scores, n)
        return torch.full((n,), torch.nan)

    def _checked(self, scores: Any, n: int) -> Tensor:
        if inspect.iscoroutine(scores):
            scores.close()  # else Python warns that it was never awaited
            raise WrongResult(
                f"reward {self.name!r} returned a coroutine: an async function cannot be a reward; write a "
                "plain function, which may call asyncio.run"
            )
        if not isinstance(scores, Tensor):
            raise WrongResult(
                f"reward {self.name!r} returned {type(scores).__name__}, not a torch.Tensor; it must return "
                f"float32 ({n},) for {n} images"
            )
        if scores.shape != (n,) or scores.dtype != torch.float32 or scores.is_sparse or scores.is_meta:
            place = (
                ", sparse" if scores.is_sparse else ", without data (device meta)" if scores.is_meta else ""
            )
            raise WrongResult(
                f"reward {self.name!r} returned {scores.dtype} {tuple(scores.shape)}{place} for {n} images; "
                f"it must return float32 ({n},), NaN for a sample without a score"
            )
        scores = scores.detach()
        # Of a tensor from torch.inference_mode, autograd would refuse to save what is computed from it.
        return scores.clone() if scores.is_inference() else scores

    def cannot_score(self, prompt: str, metadata: Mapping[str, Any] | None = None) -> str | None:
        """Returns why no image of this prompt would get a score, as far as the reward says so, or None."""
        return self.unscorable([prompt], [dict(metadata or {})])[0]

    def unscorable(self, prompts: Sequence[str], metadata: Metadata) -> list[str | None]:
        """Asks the reward's own method `cannot_score(prompt, metadata)`, if it has one, about each prompt.

        Returns:
            Why no image of the prompt would get a score; None: there is no such method, or no such reason.

        Raises:
            ValueError: the method raised an exception.
        """
        reason_of = getattr(self.reward, "cannot_score", None)
        if not callable(reason_of):
            return [None] * len(prompts)
        with exits_reported(self.name, "while saying which prompts it can score"), restored_state(self.name):
            try:
                reasons = [
                    reason_of(prompt, deepcopy(entry))
                    for prompt, entry in zip(prompts, metadata, strict=True)
                ]
            except Exception as error:
                raise ValueError(
                    f"reward {self.name!r}: its method cannot_score raised {type(error).__name__}: "
                    f"{masked(str(error))}. It takes (prompt, metadata), and returns a reason or None"
                ) from error
        return [None if reason is None else masked(str(reason)) for reason in reasons]

    def describe(self) -> str | None:
        """Returns the reward's own description (its `describe()`) for the log, or None if it has none."""
        with exits_reported(self.name, "while describing itself"), restored_state(self.name):
            describe = getattr(self.reward, "describe", None)
            return masked(str(describe())) if callable(describe) else None

    def _log_failure(self, error: BaseException, num_samples: int) -> None:
        """Stores the error as `last_error`; logs it at its first occurrence."""
        message = masked(" ".join(f"{type(error).__name__}: {error}".split()))
        self.last_error = message if len(message) <= 300 else f"{message[:297]}..."
        occurrence = f"{type(error).__name__} {_innermost_line(error.__traceback__)}"
        if occurrence not in self._logged:
            self._logged.add(occurrence)
            LOG.error(
                "reward %r failed: the %d samples of this batch have no score. Further failures of this kind "
                "are counted (invalid_fraction/%s) but not printed",
                self.name,
                num_samples,
                self.name,
                exc_info=error,
            )


def score_batch(
    rewards: Mapping[str, Reward], images: Tensor, prompts: Sequence[str], metadata: Metadata | None = None
) -> Tensor:
    """Scores one batch of images with every reward; each reward gets its own copies of the inputs.

    Args:
        rewards: rewards by name; those that are not a CheckedReward are checked for the shape of the result.
        images: [N, 3, H, W] in [0, 1], float32.
        prompts: N prompts.
        metadata: N dictionaries, or None.

    Returns:
        [R, N], float32, on the device of the images; NaN marks an image without a score.

    Raises:
        WrongResult: a result that is not one score per image.
        RewardExited, KeyboardInterrupt: as in `CheckedReward.__call__`.
    """
    scores = images.new_empty(len(rewards), len(images), dtype=torch.float32)
    for row, (name, reward) in enumerate(rewards.items()):
        inputs = (images, list(prompts), metadata)
        if not isinstance(reward, CheckedReward):  # a CheckedReward makes its own copies
            inputs = isolated_inputs(reward, *inputs)
        result = reward(*inputs)
        if result.shape != (len(images),):
            raise WrongResult(
                f"reward {name!r} returned scores of shape {tuple(result.shape)} for {len(images)} images; "
                "it must return one score per image"
            )
        scores[row] = result
    return scores


def isolated_inputs(
    reward: Any, images: Tensor, prompts: list[str], metadata: Metadata | None
) -> tuple[Tensor, list[str], Metadata | None]:
    """Returns copies of the inputs for one reward; metadata is copied per image, even within one prompt.

    The networks of this package get the original images: they never write into them, and networks with the
    same preprocessing recognise by them that they can share its result (`preprocess.SharedPixels`).
    """
    from g2rpo.rewards.model_reward import ModelReward  # imports this module

    shares = isinstance(reward, ModelReward) and type(reward).__module__.startswith("g2rpo.")
    own_images = images if shares else images.detach().clone()
    return own_images, list(prompts), None if metadata is None else [deepcopy(entry) for entry in metadata]


def _innermost_line(trace: TracebackType | None) -> str:
    """Returns file:line of the innermost frame."""
    line = ""
    while trace is not None:
        line = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line
