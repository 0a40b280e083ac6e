"""What reward models share: batches, captions read once, one dtype for weights, and where they lie."""

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
"""float16 on a GPU, float32 on a CPU: docs/rewards.md has the noise of each dtype that decided it."""

OFFLOADS = ("none", "cpu")
CAPTIONS_KEPT = 4096
"""Encoded captions that a reward keeps, the least recently used go first; 4 KB each or less."""


def scoring_dtype(name: str, device_type: str) -> torch.dtype:
    """What "auto" or a name of `DTYPES` means on a kind of device."""
    if name == AUTO:
        return torch.float32 if device_type == "cpu" else torch.float16
    return DTYPES[name]


@dataclass(frozen=True)
class Use:
    """How a reward's network is to be used; checked before any file is read.

    Attributes:
        device: where it scores.
        batch: pictures, or captions, in one forward.
        dtype: of weights and activations, or "auto"; pixels and the last product are float32 anyway.
        offload: "cpu": the weights wait in main memory between scoring phases; "none": they stay.
    """

    device: torch.device
    batch: int = 32
    dtype: str = AUTO
    offload: str = "none"

    def __post_init__(self) -> None:
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 1:
            raise ValueError(f"batch={self.batch!r}; it is a whole number of pictures, at least 1")
        for name, known in (("dtype", (AUTO, *DTYPES)), ("offload", OFFLOADS)):
            if (given := getattr(self, name)) not in known:
                raise ValueError(
                    f"{name}={given!r}{did_you_mean(str(given), known)}; it is {' or '.join(known)}"
                )


class ModelReward:
    """A network that scores pictures against captions; subclasses say how, in `encode` and `judge`.

    `scoring()` is a phase: with offload="cpu" the weights are moved in at its start and out at its end,
    however many calls it holds; a call outside of one is a phase of its own.
    """

    def __init__(self, network: nn.Module, use: Use, frame: FrameRule, size: int) -> None:
        """Args: network with its weights, any dtype, on the CPU; how pictures of what size are framed."""
        self.network: Any = network.eval().requires_grad_(False)
        self.use, self.device, self.dtype = use, use.device, scoring_dtype(use.dtype, use.device.type)
        self._frame, self._size = frame, size
        self._captions: OrderedDict[str, Tensor] = OrderedDict()
        self._phases = 0
        self._home: list[tuple[dict[str, Any], str, Tensor]] = []
        self.set_dtype()
        if use.offload == "cpu":
            self._home = [(group, name, self._kept(tensor)) for group, name, tensor in _tensors(network)]
        else:
            network.to(self.device)

    def encode(self, prompts: list[str]) -> Tensor:
        """What is kept of captions, [N, ...], on the device."""
        raise NotImplementedError

    def judge(self, pixels: Tensor, captions: Tensor) -> Tensor:
        """[N], float32, from normalised pixels [N, 3, size, size], float32, and N encoded captions."""
        raise NotImplementedError

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Around several calls: the weights are on the device, and float32 products are exact."""
        self._phases += 1
        try:
            if self._phases == 1:
                for group, name, tensor in self._home:
                    group[name] = _moved(tensor, self.device)
            yield
        finally:
            self._phases -= 1
            if self._phases == 0:
                for group, name, tensor in self._home:
                    group[name] = tensor

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: Metadata | None = None) -> Tensor:
        """As `Reward.__call__`; NaN only where a picture, or what the network makes of it, is no number.

        Raises:
            ValueError: images of another form or range, or another number of prompts.
        """
        check_images(images)
        if len(images) != len(prompts):
            raise ValueError(f"{len(images)} images but {len(prompts)} prompts")
        if not prompts:
            return torch.empty(0, device=self.device)
        batch, (height, width) = self.use.batch, images.shape[2:]
        frame = self._frame(height, width, self._size)
        with self.scoring(), _exact_float32():
            pixels = shared_pixels(images, frame, self.device, batch)
            captions = self._encoded(prompts)
            scores = [
                self.judge(seen, asked)
                for seen, asked in zip(pixels.split(batch), captions.split(batch), strict=True)
            ]
        return torch.cat(scores)

    def _encoded(self, prompts: list[str]) -> Tensor:
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._captions]
        for low in range(0, len(new), self.use.batch):
            some = new[low : low + self.use.batch]
            self._captions |= {one: row.clone() for one, row in zip(some, self.encode(some), strict=True)}
        for prompt in dict.fromkeys(prompts):
            self._captions.move_to_end(prompt)
        encoded = torch.stack([self._captions[prompt] for prompt in prompts])
        while len(self._captions) > CAPTIONS_KEPT:
            self._captions.popitem(last=False)
        return encoded

    def set_dtype(self) -> None:
        """Casts the weights, all of them unless a subclass knows better."""
        self.network.to(self.dtype)

    def _kept(self, tensor: Tensor) -> Tensor:
        """Page-locked where a GPU will ask for it: it comes several times faster from there."""
        return _like(tensor, tensor.detach().pin_memory()) if self.device.type == "cuda" else tensor


@contextmanager
def scoring(rewards: Iterable[Any]) -> Iterator[None]:
    """`ModelReward.scoring()` of all rewards that are models, checked or not; others have no such phases."""
    with ExitStack() as stack:
        for reward in rewards:
            inner = getattr(reward, "reward", reward)  # of a CheckedReward
            if isinstance(inner, ModelReward):
                stack.enter_context(inner.scoring())
        yield


def _tensors(network: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """(mapping, name, tensor) of all parameters and buffers; writing into the mapping replaces them."""
    for module in network.modules():
        for group in (module._parameters, module._buffers):
            yield from ((group, name, tensor) for name, tensor in group.items() if tensor is not None)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return _like(tensor, tensor.detach().to(device, non_blocking=True))


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    return nn.Parameter(other, requires_grad=False) if isinstance(tensor, nn.Parameter) else other


@contextmanager
def _exact_float32() -> Iterator[None]:
    """float32 products of all 24 bits on a GPU, whatever the policy's precision is."""
    matmul, convolution = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolution
