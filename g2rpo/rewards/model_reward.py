"""Base class of rewards that are networks: batching, cached captions, dtype and placement of the weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.rewards.base import Metadata
from g2rpo.rewards.preprocess import FrameRule, check_images, shared_pixels
from g2rpo.runtime.text import did_you_mean

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTO = "auto"
"""float16 on a GPU, float32 on a CPU; docs/rewards.md gives the rounding noise of each dtype."""

OFFLOADS = ("none", "cpu")
CAPTIONS_KEPT = 4096
"""Maximum number of encoded captions that a reward caches (LRU), at most 4 KB each."""


def scoring_dtype(name: str, device_type: str) -> torch.dtype:
    """Returns the dtype for "auto" or a name of `DTYPES` on a type of device."""
    if name == AUTO:
        return torch.float32 if device_type == "cpu" else torch.float16
    return DTYPES[name]


@dataclass(frozen=True)
class ScoringOptions:
    """How the network of a reward computes; checked before any file is read.

    Attributes:
        device: where the network computes.
        batch: number of images or captions per forward, >= 1.
        dtype: dtype of weights and activations, or "auto"; pixels and the last product are always float32.
        offload: "cpu" = the weights are in main memory between scoring phases; "none" = always on the device.
    """

    device: torch.device
    batch: int = 32
    dtype: str = AUTO
    offload: str = "none"

    def __post_init__(self) -> None:
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 1:
            raise ValueError(
                f"batch={self.batch!r} must be an integer >= 1, the number of images per forward"
            )
        for name, allowed in (("dtype", (AUTO, *DTYPES)), ("offload", OFFLOADS)):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(
                    f"{name}={value!r} must be {' or '.join(allowed)}{did_you_mean(str(value), allowed)}"
                )


class ModelReward:
    """A network that scores images against captions; subclasses implement `encode` and `score_pixels`.

    `scoring()` opens a scoring phase: with offload="cpu" the weights are moved to the device at its start and
    back at its end, for any number of calls; a call outside a phase is a phase of its own.
    """

    def __init__(self, network: nn.Module, options: ScoringOptions, frame: FrameRule, size: int) -> None:
        """Prepares the network for scoring.

        Args:
            network: the network with its weights, in any dtype, on the CPU.
            options: device, batch, dtype and offload.
            frame: gives the square that the network sees of an image.
            size: side of that square in pixels.
        """
        self.network: Any = network.eval().requires_grad_(False)
        self.options, self.device = options, options.device
        self.dtype = scoring_dtype(options.dtype, options.device.type)
        self._frame, self._size = frame, size
        self._captions: OrderedDict[tuple[int, str], Tensor] = OrderedDict()  # by size of the batch, too
        self._phases = 0
        self._cpu_tensors: list[tuple[dict[str, Any], str, Tensor]] = []
        self.set_dtype()
        if options.offload == "cpu":
            self._cpu_tensors = [(group, name, self._pinned(t)) for group, name, t in _tensors(network)]
        else:
            network.to(self.device)

    def encode(self, prompts: list[str]) -> Tensor:
        """Encodes captions to [N, ...] on the device; the rows are cached."""
        raise NotImplementedError

    def score_pixels(self, pixels: Tensor, captions: Tensor) -> Tensor:
        """Scores normalised pixels [N, 3, size, size], float32, against N encoded captions: [N], float32."""
        raise NotImplementedError

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Context manager of a scoring phase, in which the weights are on the device."""
        self._phases += 1
        try:
            if self._phases == 1:
                for group, name, tensor in self._cpu_tensors:
                    group[name] = _moved(tensor, self.device)
            yield
        finally:
            self._phases -= 1
            if self._phases == 0:
                for group, name, tensor in self._cpu_tensors:
                    group[name] = tensor

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        """Scores images as `Reward.__call__` does; NaN if an image or the network's output is not finite.

        Raises:
            ValueError: images of a wrong shape, dtype or range, or a wrong number of prompts.
        """
        check_images(images)
        if len(images) != len(prompts):
            raise ValueError(f"{len(images)} images but {len(prompts)} prompts")
        if not prompts:
            return torch.empty(0, device=self.device)
        batch, (height, width) = self.options.batch, images.shape[2:]
        frame = self._frame(height, width, self._size)
        with self.scoring(), _full_float32():
            pixels = shared_pixels(images, frame, self.device, batch)
            captions = self._encoded(prompts)
            scores = [
                self.score_pixels(pixel_batch, caption_batch)
                for pixel_batch, caption_batch in zip(pixels.split(batch), captions.split(batch), strict=True)
            ]
        return torch.cat(scores)

    def _encoded(self, prompts: list[str]) -> Tensor:
        distinct = list(dict.fromkeys(prompts))
        rows: dict[str, Tensor] = {}
        for low in range(0, len(distinct), self.options.batch):
            part = distinct[low : low + self.options.batch]
            # The last bits of a row depend on the size of its batch, so that this is part of the key: a score
            # must not depend on what was scored before, or a resumed run would differ.
            keys = [(len(part), prompt) for prompt in part]
            if any(key not in self._captions for key in keys):
                encoded = (row.clone() for row in self.encode(part))
                self._captions |= dict(zip(keys, encoded, strict=True))
            for key in keys:
                self._captions.move_to_end(key)
                rows[key[1]] = self._captions[key]
        while len(self._captions) > CAPTIONS_KEPT:
            self._captions.popitem(last=False)
        return torch.stack([rows[prompt] for prompt in prompts])

    def set_dtype(self) -> None:
        """Casts the weights; a subclass may keep some of them in float32."""
        self.network.to(self.dtype)

    def _pinned(self, tensor: Tensor) -> Tensor:
        """Returns the tensor in page-locked memory for a GPU: copies from there are several times as fast."""
        return _like(tensor, tensor.detach().pin_memory()) if self.device.type == "cuda" else tensor


@contextmanager
def scoring(rewards: Iterable[Any]) -> Iterator[None]:
    """Opens a scoring phase of every ModelReward among the rewards, wrapped or not.

    A CheckedReward and a PerFrame hold the reward that they wrap as `reward`.
    """
    with ExitStack() as stack:
        for inner in rewards:
            for _ in range(3):  # PerFrame may wrap a CheckedReward, and is in one
                inner = inner if isinstance(inner, ModelReward) else getattr(inner, "reward", inner)
            if isinstance(inner, ModelReward):
                stack.enter_context(inner.scoring())
        yield


def _tensors(network: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yields (mapping, name, tensor) of all parameters and buffers; writing to the mapping replaces them."""
    for module in network.modules():
        for group in (module._parameters, module._buffers):
            yield from ((group, name, tensor) for name, tensor in group.items() if tensor is not None)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return _like(tensor, tensor.detach().to(device, non_blocking=True))


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    return nn.Parameter(other, requires_grad=False) if isinstance(tensor, nn.Parameter) else other


@contextmanager
def _full_float32() -> Iterator[None]:
    """Computes float32 products on a GPU with full precision (no TF32), whatever the policy's setting is."""
    matmul, convolution = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolution
