"""Architecture: what the shared code must know of a family's transformer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from g2rpo.models.loading.rows import Source

Config = Mapping[str, Any]


@dataclass(frozen=True)
class OriginalLayout:
    """The key layout of a network's original release, where it differs from diffusers'.

    Attributes:
        recognises: whether keys are those of weights (not adapters) in this layout, with or without a prefix.
        sources: key in diffusers' layout -> its rows in this layout, without a prefix.
        layer_sources: diffusers' name of each linear layer -> its rows in this layout's layer.
        to_diffusers: converts tensors to diffusers' keys; raises ValueError if they do not fit the config.
        to_original: converts tensors to this layout, without a prefix.
    """

    recognises: Callable[[Iterable[str]], bool]
    sources: Callable[[Config], dict[str, Source]]
    layer_sources: Callable[[Config], dict[str, Source]]
    to_diffusers: Callable[[Mapping[str, Tensor], Config], dict[str, Tensor]]
    to_original: Callable[[Mapping[str, Tensor], Config], dict[str, Tensor]]


@dataclass(frozen=True)
class Architecture:
    """A transformer class of diffusers, as the shared code uses it.

    Attributes:
        network: name of the class.
        vae: name of the class of the image decoder.
        pipeline: name of the stock pipeline's class.
        blocks: attributes that hold the repeated blocks, in the order of the forward.
        lora_targets: pattern of the full names of the linears that get adapters by default.
        layout: key layout of the original release; None: only diffusers' keys are read.
        restore: rebuilds everything that the network holds beside its parameters (buffers, tensors that are
            plain attributes) on a device, because a network that was built on the meta device has no values
            there; None: it holds nothing else, which is checked.
    """

    network: str
    vae: str
    pipeline: str
    blocks: tuple[str, ...]
    lora_targets: str
    layout: OriginalLayout | None = None
    restore: Callable[[Any, torch.device], None] | None = None

    @property
    def network_class(self) -> Any:
        """The network's class in diffusers."""
        import diffusers

        return getattr(diffusers, self.network)

    def on_meta_device(self, config: Config) -> Any:
        """Creates the network without storage, in evaluation mode."""
        import torch

        with torch.device("meta"):
            return self.network_class.from_config(dict(config)).eval()

    def blocks_of(self, module: Any) -> list[nn.Module]:
        """Returns the repeated blocks of a network, in order."""
        return [block for name in self.blocks for block in getattr(module, name)]
