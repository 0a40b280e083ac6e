"""PolicyOptions: the single list of what determines how a policy is loaded.

Settings, inference, evaluation, planning and tests all pass this object. Importing this module needs no
torch, because settings are validated without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

Precision = Literal["float32", "tf32", "bfloat16", "float64"]
SigmaRounding = Literal["exact", "released"]
TailsPrecision = Literal["compute", "float8"]
BaseDtype = Literal["compute", "float8"]

Size = tuple[int, int]
"""Height and width of an image, in pixels."""

CONDITIONS = (
    "precision",
    "guidance",
    "true_cfg",
    "negative_prompt",
    "resolution",
    "max_sequence_length",
    "sigma_rounding",
)
"""Options that, beside the weights, determine the images that a model generates."""

_CHOICES: dict[str, tuple[Any, ...]] = {
    "precision": get_args(Precision),
    "sigma_rounding": get_args(SigmaRounding),
    "tails_precision": get_args(TailsPrecision),
    "base_dtype": get_args(BaseDtype),
}


@dataclass(frozen=True)
class PolicyOptions:
    """Everything, besides its name and device, that determines how a policy is loaded.

    Attributes:
        precision: "float32"; "tf32": float32 weights with matrix products of 10-bit mantissas on a GPU;
            "bfloat16": autocast over float32 master weights if all weights are trained, or over a frozen
            bfloat16 base with float32 adapters if lora_rank > 0, or bfloat16 weights if nothing is trained
            (`trainable`); or "float64", for tests. The choice between
            float32 and tf32 holds for the process: the policy loaded last sets it for all.
        guidance: guidance scale, an input of guidance-distilled models; no effect on others.
        true_cfg: scale of classifier-free guidance against the negative prompt, v = v0 + true_cfg (v1 - v0),
            with two forwards per sample; 1: none.
        negative_prompt: text of the negative prompt; None: that of the model family. Only with true_cfg != 1.
        resolution: (height, width) of the images in pixels, also given as a side or a list; None: the size of
            the model.
        max_sequence_length: largest number of tokens of a prompt; None: the model's own limit.
        sigma_rounding: "exact", or "released": int(1000 sigma) / 1000, as in G2RPO's released code.
        lora_rank: rank of the trained adapters; 0 trains all weights of the network.
        lora_alpha: the adapters' scale times their rank; None: twice the rank.
        lora_targets: ends of the names of layers that get adapters; None: attention and MLP linears.
        base_dtype: "float8" stores a frozen base in 8 bits (e4m3) and computes in `precision`.
        tails_precision: "float8" multiplies in 8 bits within `Policy.tails` (needs bfloat16 and torchao).
        weights: weights that are first applied to the base's network, in order; each is a LoRA or full
            weights, as a folder or a .safetensors file.
        gradient_checkpointing: whether blocks are recomputed in the backward pass, which saves memory and
            costs one more forward.
        compile_blocks: whether forwards without gradient, and on a GPU the decoder, use torch.compile.
        trainable: whether the policy can be trained; custom families always get True. Without adapters, a
            bfloat16 model that is only sampled is stored in bfloat16. It needs a third of the memory, because
            it has neither float32 weights nor the copies that autocast makes of them.

    Raises:
        ValueError: a value is not allowed, or options contradict each other.
    """

    precision: Precision = "float32"
    guidance: float = 3.5
    true_cfg: float = 1.0
    negative_prompt: str | None = None
    resolution: Size | None = None
    max_sequence_length: int | None = None
    sigma_rounding: SigmaRounding = "exact"
    lora_rank: int = 0
    lora_alpha: float | None = None
    lora_targets: tuple[str, ...] | None = None
    base_dtype: BaseDtype = "compute"
    tails_precision: TailsPrecision = "compute"
    weights: tuple[Path, ...] = ()
    gradient_checkpointing: bool = False
    compile_blocks: bool = False
    trainable: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "resolution", as_resolution(self.resolution))
        if self.lora_targets is not None:
            object.__setattr__(self, "lora_targets", tuple(self.lora_targets))
        object.__setattr__(self, "weights", tuple(Path(path).expanduser() for path in self.weights))
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(allowed)}")
        if self.base_dtype == "float8" and not self.lora_rank:
            raise ValueError(
                f"base_dtype={self.base_dtype!r} with lora_rank={self.lora_rank}: choose compute, or float8 "
                "for the frozen base of adapters"
            )
        if self.negative_prompt is not None and self.true_cfg == 1:
            raise ValueError(
                f"negative_prompt={self.negative_prompt!r} has no effect with true_cfg=1; set true_cfg, or "
                "remove negative_prompt"
            )
        if self.tails_precision == "float8":
            from g2rpo.models.loading.low_precision import check_float8  # needs torch: only where it is used

            check_float8(self.precision, self.base_dtype)

    def with_given(self, **changes: Any) -> PolicyOptions:
        """Returns a copy in which the fields of `changes` whose value is not None are replaced."""
        return replace(self, **without_none(changes))

    def for_inference(self) -> PolicyOptions:
        """Returns a copy for sampling, without the options that only make training faster or smaller."""
        return replace(
            self,
            gradient_checkpointing=False,
            compile_blocks=False,
            tails_precision="compute",
            trainable=False,
        )

    def conditions(self) -> dict[str, Any]:
        """Returns the options of CONDITIONS as JSON values, which `of_conditions` reads.

        The negative prompt is one of them only with classifier-free guidance.
        """
        values = {name: getattr(self, name) for name in CONDITIONS}
        values["resolution"] = None if self.resolution is None else plain_resolution(self.resolution)
        if self.true_cfg == 1:
            del values["negative_prompt"]
        return values


OPTION_NAMES = tuple(field.name for field in fields(PolicyOptions) if field.name != "trainable")
"""Names of the options that the settings of a run have too; its policy is always trainable."""


def as_resolution(value: Any) -> Size | None:
    """Returns a resolution as (height, width) in pixels.

    Args:
        value: the side of a square image, [height, width], or a text: "720" or "512x768" (height x width);
            None: the size of the model.

    Raises:
        ValueError: `value` is neither of these, or a size is not positive.
    """
    if value is None:
        return None
    sides: Any = value
    if isinstance(value, str):
        parts = [int(part) if part.strip().isdecimal() else 0 for part in value.lower().split("x")]
        sides = parts * 2 if len(parts) == 1 else parts
    elif isinstance(value, int):
        sides = [value, value]
    is_pair = isinstance(sides, Sequence) and len(sides) == 2
    if not is_pair or not all(type(side) is int and side > 0 for side in sides):
        raise ValueError(
            f"resolution={value!r}: give the side of a square image in pixels, such as 512, or "
            "[height, width] (on the command line HEIGHTxWIDTH), such as 512x768"
        )
    return sides[0], sides[1]


def plain_resolution(size: Size) -> int | list[int]:
    """Returns a size as settings and records store it: the side of a square, otherwise [height, width]."""
    height, width = size
    return height if height == width else [height, width]


def size_text(size: Size) -> str:
    """Returns a size as text: "512 x 768" (height x width, pixels)."""
    return f"{size[0]} x {size[1]}"


def without_none(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of `changes` whose value is not None."""
    return {name: value for name, value in changes.items() if value is not None}
