"""The Policy protocol: everything that the rest of the package needs from a model.

A policy is a velocity field over packed latent tokens (rectified flow, arXiv:2209.03003):

    x_sigma = (1 - sigma) * image + sigma * noise,     velocity = dx/dsigma = noise - image

The rest of the package uses a model through the methods below, so a new model family needs a new folder in
`models/` and no change elsewhere. Latents are float32 outside the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from g2rpo.flow.schedule import Shift
from g2rpo.runtime.processes import copied_to
from g2rpo.runtime.sharding import resident


@dataclass(frozen=True, eq=False)
class Conditioning:
    """Embeddings of N prompts; row i belongs to sample i.

    Attributes:
        tensors: name -> [N, ...]. The rows of a ragged tensor [N, longest, ...] are padded with zeros.
        lengths: name of a ragged tensor -> [N], int64: the number of valid positions on its axis 1. They are
            always on the CPU, so that the host knows them without waiting for the device.

    Raises:
        ValueError: there is no tensor, the numbers of rows differ, or lengths do not belong to a tensor.
    """

    tensors: Mapping[str, Tensor]
    lengths: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = {len(tensor) if tensor.ndim else None for tensor in self.tensors.values()}
        rows |= {len(lengths) for lengths in self.lengths.values()}
        if len(rows) != 1 or None in rows:
            shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in self.tensors.items())
            raise ValueError(f"conditioning needs tensors [N, ...] with the same N, got {shapes or 'none'}")
        for name, lengths in self.lengths.items():
            if lengths.device.type != "cpu" or lengths.dtype != torch.int64 or lengths.ndim != 1:
                raise ValueError(
                    f"lengths of {name!r} must be int64 [N] on the CPU, got {lengths.dtype} "
                    f"{tuple(lengths.shape)} on {lengths.device}"
                )
            if name not in self.tensors or self.tensors[name].ndim < 2:
                raise ValueError(f"lengths are given for {name!r}, which is not a tensor [N, longest, ...]")

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: Tensor | slice) -> Conditioning:
        """Selects rows; the row axis is kept, and ragged tensors are trimmed to the longest selected row.

        Args:
            index: a slice, row numbers (repeats are allowed) or a mask, on any device. With ragged tensors an
                index on the CPU avoids waiting for the device.
        """
        lengths = {
            name: rows[index if isinstance(index, slice) else index.cpu()]
            for name, rows in self.lengths.items()
        }
        selected = {
            name: tensor[index if isinstance(index, slice) else copied_to(tensor.device, index)]
            for name, tensor in self.tensors.items()
        }
        return Conditioning(_trimmed(selected, lengths), lengths)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Conditioning:
        """Moves the tensors and casts those of floating point; None keeps their device or dtype.

        Lengths stay on the CPU.
        """
        moved = {
            name: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
            for name, tensor in self.tensors.items()
        }
        return Conditioning(moved, self.lengths)

    @staticmethod
    def cat(parts: Sequence[Conditioning]) -> Conditioning:
        """Concatenates the rows of all parts in order; ragged tensors are padded to the longest row.

        Raises:
            ValueError: there are no parts, or they differ in names or in a size other than N and the length
                of ragged rows.
        """
        if not parts:
            raise ValueError("cannot concatenate an empty list of conditionings: give at least one")
        first = parts[0]
        if any(
            p.tensors.keys() != first.tensors.keys() or p.lengths.keys() != first.lengths.keys()
            for p in parts
        ):
            names = sorted({", ".join(part.tensors) for part in parts})
            raise ValueError(f"cannot concatenate conditionings with different names: {' and '.join(names)}")
        tensors = {}
        for name in first.tensors:
            rows = [part.tensors[name] for part in parts]
            if name in first.lengths:
                longest = max(tensor.shape[1] for tensor in rows)
                rows = [_padded(tensor, longest) for tensor in rows]
            tensors[name] = torch.cat(rows)
        lengths = {name: torch.cat([part.lengths[name] for part in parts]) for name in first.lengths}
        return Conditioning(_trimmed(tensors, lengths), lengths)


def _trimmed(tensors: Mapping[str, Tensor], lengths: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Removes the positions of ragged tensors that are padding in every row."""
    return {
        name: tensor[:, : max(lengths[name].tolist(), default=0)] if name in lengths else tensor
        for name, tensor in tensors.items()
    }


def _padded(tensor: Tensor, length: int) -> Tensor:
    missing = length - tensor.shape[1]
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(len(tensor), missing, *tensor.shape[2:])], 1)


class Policy(Protocol):
    """A text-to-image flow model whose velocity network is trained.

    A class that inherits from this one needs to define the first three attributes, `encode`, `velocity` and
    `decode`; everything else has a default.

    Attributes:
        latent_shape: (L, C), the numbers of tokens and channels of a packed latent.
        device: device of the networks and their latents.
        modules: name -> velocity network, whose parameters with `requires_grad` are trained. Most families
            have one; a model with an expert per range of noise levels has one for each.
        forwards_per_sample: network forwards per row of `velocity`: 1, or 2 with classifier-free guidance.
        resolution: (height, width) of the decoded images in pixels; None: not known.
        negative_prompt: text that `velocity` needs for classifier-free guidance; None: it needs none.
        folder: folder of the base model's files; None: it has none.
    """

    latent_shape: tuple[int, int]
    device: torch.device
    modules: dict[str, nn.Module]
    forwards_per_sample: int = 1
    resolution: tuple[int, int] | None = None
    negative_prompt: str | None = None
    folder: Path | None = None

    def encode(self, prompts: list[str]) -> Conditioning:
        """Encodes prompts with the frozen text encoders, without gradient; row i depends only on prompt i."""
        ...

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """Predicts the velocity, noise - image; differentiable in the network's parameters.

        Args:
            x: latents [N, L, C], float32.
            sigma: noise level of each row [N], float32, in [0, 1]; 1 is noise. With several modules, all rows
                belong to the same one (`expert_of`).
            cond: conditioning of N rows.

        Returns:
            [N, L, C], float32.
        """
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes clean latents [N, L, C] to images [N, 3, H, W], float32 in [0, 1], without gradient."""
        ...

    def expert_of(self, sigma: float) -> str:
        """Returns the name of the module that predicts velocities at this noise level."""
        (name,) = self.modules
        return name

    def resident(self) -> AbstractContextManager[None]:
        """Keeps all weights gathered within the block, so that forwards without gradient do not communicate.

        Weights must not change within the block.
        """
        return resident_modules(self.modules)

    def tails(self) -> AbstractContextManager[None]:
        """Runs forwards whose results only a reward sees, in whatever cheaper way the model has."""
        return nullcontext()

    @property
    def conditions(self) -> dict[str, Any]:
        """Options that, beside the weights, determine the images (`options.CONDITIONS`), as JSON values."""
        return {}

    @property
    def guidance(self) -> float | None:
        """Scale of the guidance that `velocity` applies; None: the model has none."""
        return None

    def with_guidance(self, scale: float) -> AbstractContextManager[None]:
        """Replaces the guidance scale within the block; only a policy whose `guidance` is not None can.

        Args:
            scale: the scale, >= 0, of the same kind as `guidance`.
        """
        raise ValueError(f"{type(self).__name__} has no guidance scale; sample without one")

    @property
    def encoder_identity(self) -> str:
        """Key of the embedding cache: everything that `encode` depends on beside the prompt.

        The default is the name of the class; override it if `encode` depends on anything else.
        """
        return f"{type(self).__module__}.{type(self).__qualname__}"

    def set_negative(self, cond: Conditioning) -> None:
        """Sets the embedding of `negative_prompt`, one row, so that no encoder is loaded for it."""
        raise ValueError(f"{type(self).__name__} has no classifier-free guidance; set true_cfg=1")

    def pipeline_shift(self) -> Shift:
        """Returns the shift of the sigmas that the model's stock pipeline applies to images of this size.

        It is an argument of `flow.schedule.shifted_sigmas`.

        Raises:
            ValueError: the model states no such shift.
        """
        raise ValueError("this model states no shift of its sigmas; give a number instead")


@contextmanager
def resident_modules(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Keeps the sharded parameters of all modules gathered within the block."""
    with ExitStack() as stack:
        for module in modules.values():
            stack.enter_context(resident(module))
        yield


def root_module(policy: Policy) -> nn.Module:
    """Returns the module that holds all trained parameters: the only one, or a container of all of them.

    Checkpoints, EMA and optimizer name parameters as this module does; with several networks the names start
    with that of the network.
    """
    modules = list(policy.modules.values())
    return modules[0] if len(modules) == 1 else nn.ModuleDict(policy.modules)


def trained_parameters(policy: Policy) -> dict[str, nn.Parameter]:
    """Returns the trained parameters of all modules, named as in `root_module`."""
    return {name: p for name, p in root_module(policy).named_parameters() if p.requires_grad}


def has_adapters(policy: Policy) -> bool:
    """Returns whether adapters are trained over frozen weights."""
    return any(getattr(module, "peft_config", None) for module in policy.modules.values())
