"""Checks of a reward before a run begins: its signature, and a dry call on two blank images.

The signature is checked before anything is created. The dry call gives one black and one white image with two
prompts of the run. A result that is not one float32 per image is an error. So is an exception, if the
reward also raises one for images of noise; a reward that cannot score blank images alone is used. A
reward that asks servers is not called: it contacts them when it is created.

A dry call leaves no trace in the run: random numbers and error reports of the reward are as before. A reward
that counts its own calls sees one or two more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn

from g2rpo.rewards.base import Metadata, is_groupwise, media_of
from g2rpo.rewards.checked import CheckedReward
from g2rpo.rewards.exits import WrongResult, location_of
from g2rpo.runtime.random import keyed_generator, random_state, set_random_state
from g2rpo.runtime.secrets import masked

POINTWISE = "(images, prompts, metadata), where images is [N, 3, H, W]"
GROUPWISE = "(images, prompt, metadata), where images is [n, 3, H, W] of one prompt"


def check_signature(name: str, reward: Any) -> None:
    """Checks that a reward, or the class that makes it, can be called with images, prompts and metadata.

    Args:
        name: name of the reward.
        reward: a function, a class, or an object.

    Raises:
        ValueError: it is not callable, is an async or generator function, or takes other arguments.
    """
    function, own = _function_of(name, reward)
    for matches, kind in (
        (inspect.iscoroutinefunction, "an async function"),
        (inspect.isasyncgenfunction, "an async generator"),
        (inspect.isgeneratorfunction, "a generator function"),
    ):
        if matches(function):
            raise ValueError(
                f"reward {name!r}{_place(function)} is {kind}; a reward returns a tensor when it is "
                "called: write a plain function, which may call asyncio.run"
            )
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # implemented in C: the dry call decides
        return
    try:
        signature.bind(*own, None, None, None)
    except TypeError as error:
        arguments = GROUPWISE if is_groupwise(reward) else POINTWISE
        raise ValueError(
            f"reward {name!r}{_place(function)} cannot be called: {error}. It takes {signature}, and is "
            f"called as {arguments}; metadata may be None"
        ) from error


def _function_of(name: str, reward: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the function that scores, and its arguments before the images."""
    kind = reward if isinstance(reward, type) else type(reward)
    if issubclass(kind, nn.Module) and kind.__call__ is nn.Module.__call__:
        return kind.forward, (reward,)
    if not isinstance(reward, type):
        bound = reward if inspect.isroutine(reward) else getattr(reward, "__call__", reward)  # noqa: B004
        return cast("Callable[..., Any]", bound), ()
    method = next(
        (owner.__dict__["__call__"] for owner in kind.__mro__ if "__call__" in owner.__dict__), None
    )
    if method is None:
        raise ValueError(
            f"reward {name!r}: objects of class {kind.__name__} cannot be called; give it a method "
            "__call__(self, images, prompts, metadata=None)"
        )
    return (method.__func__, ()) if isinstance(method, staticmethod) else (method, (None,))


def _place(function: Any) -> str:
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    module, qualified = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    line = "" if code is None else f", line {code.co_firstlineno}"
    return f" ({module}.{qualified}{line})" if module and qualified else ""


def dry_call(
    reward: CheckedReward,
    prompts: Sequence[str],
    metadata: Metadata | None,
    size: tuple[int, int],
    *,
    device: torch.device,
    num_frames: int = 1,
    group_size: int = 2,
    raises: bool = True,
) -> str | None:
    """Calls a reward with two blank images.

    Args:
        reward: the reward.
        prompts, metadata: two prompts of the run; a groupwise reward gets the first.
        size: (height, width) of the images in pixels.
        device: where the images are.
        num_frames: frames of a video.
        group_size: number of images of noise for a groupwise reward, which may ask for a complete group.
        raises: whether an exception of the reward is an error here.

    Returns:
        Why the reward gave no score, if it raised an exception; None: it did not.

    Raises:
        WrongResult, RewardExited: as in any call.
        ValueError: the reward raised an exception for blank images and for noise.
    """
    if getattr(reward.reward, "contacts_servers", False):
        return None
    frames = (num_frames,) if media_of(reward.reward) == "video" else ()
    blank = torch.tensor([0.0, 1.0], device=device).view(2, *[1] * (len(frames) + 3))
    blank = blank.expand(2, *frames, 3, *size).contiguous()
    errors: list[BaseException] = []
    generators, last_error = random_state(), reward.last_error
    try:
        members = max(2, group_size) if reward.groupwise else 2
        for make in (lambda: blank, lambda: _noise(members, blank)):
            images = make()
            outcome = reward.attempt(_call(reward, images, prompts, metadata), len(images))
            if isinstance(outcome, Tensor):
                return None
            errors.append(outcome)
    except WrongResult as wrong:
        raise WrongResult(f"{wrong} (in a dry call on two blank images, before the run)") from wrong
    finally:
        set_random_state(generators)
        reward.last_error = last_error
    error = errors[0]
    reason = masked(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
    problem = f"reward {reward.name!r}{location_of(error)} raised {reason}"
    if raises:
        raise ValueError(
            f"{problem}, in a dry call on two blank images of {size[1]} x {size[0]} pixels, and also on "
            f"{members} of noise: no image would get a score. Correct the reward; for a single image without "
            "a score, return NaN"
        ) from error
    return problem


def _call(
    reward: CheckedReward, images: Tensor, prompts: Sequence[str], metadata: Metadata | None
) -> Callable[[], Any]:
    inner: Any = reward.reward
    entries = None if metadata is None else deepcopy(list(metadata[:2]))
    if reward.groupwise:
        return lambda: inner(images, prompts[0], None if entries is None else entries[0])
    return lambda: inner(images, list(prompts[:2]), entries)


def _noise(number: int, images: Tensor) -> Tensor:
    noise = torch.rand(number, *images.shape[1:], generator=keyed_generator(0, "dry call"))
    return ((255 * noise).round() / 255).to(images.device)
