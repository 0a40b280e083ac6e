"""Layouts of published weight files: how OpenCLIP, transformers and ImageReward store our parameters.

A layout is a function from our key to the stored one. In this direction, mismatches are reported by the keys
of the file, and one comparison serves both loading and `g2rpo doctor --verify`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from g2rpo.models.loading.reading import all_finite

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """How a file stores one of our parameters.

    Attributes:
        key: key in the file.
        part: index of the third of the stored rows that holds it (q, k, v in one tensor); None = all rows.
        transposed: whether it is stored as [in, out].
    """

    key: str
    part: int | None = None
    transposed: bool = False

    def shape(self, ours: Shape) -> Shape:
        """Returns the shape that the file must have for a parameter of shape `ours`."""
        if self.part is not None:
            return (3 * ours[0], *ours[1:])
        return ours[::-1] if self.transposed else ours

    def read(self, tensor: Tensor) -> Tensor:
        """Extracts our parameter from the stored tensor."""
        if self.part is not None:
            return tensor.chunk(3)[self.part]
        return tensor.T.contiguous() if self.transposed else tensor


Layout = Callable[[str], Stored]

# From the names of transformers' CLIPModel to OpenCLIP's, applied in this order.
_OPENCLIP = (
    (r"^visual_projection\.weight$", "visual.proj"),
    (r"^text_projection\.weight$", "text_projection"),
    (r"^vision_model\.", "visual."),
    (r"^text_model\.", ""),
    (r"^visual\.embeddings\.(class_embedding)$", r"visual.\1"),
    (r"embeddings\.patch_embedding\.", "conv1."),
    (r"embeddings\.position_embedding\.weight$", "positional_embedding"),
    (r"embeddings\.token_embedding\.", "token_embedding."),
    (r"\bpre_layrnorm\.", "ln_pre."),
    (r"\bpost_layernorm\.", "ln_post."),
    (r"\bfinal_layer_norm\.", "ln_final."),
    (r"encoder\.layers\.", "transformer.resblocks."),
    (r"layer_norm([12])\.", r"ln_\1."),
    (r"self_attn\.out_proj\.", "attn.out_proj."),
    (r"self_attn\.[qkv]_proj\.", "attn.in_proj_"),
    (r"mlp\.fc1\.", "mlp.c_fc."),
    (r"mlp\.fc2\.", "mlp.c_proj."),
)

# From the names of our ImageRewardNetwork to the released ones, applied in this order.
_IMAGEREWARD = (
    (r"^mlp\.", "mlp.layers."),
    (r"^text\.", "blip.text_encoder."),
    (r"^vision\.", "blip.visual_encoder."),
    (r"embeddings\.class_embedding$", "cls_token"),
    (r"embeddings\.position_embedding$", "pos_embed"),
    (r"embeddings\.patch_embedding\.", "patch_embed.proj."),
    (r"visual_encoder\.encoder\.layers\.", "visual_encoder.blocks."),
    (r"layer_norm([12])\.", r"norm\1."),
    (r"self_attn\.qkv\.", "attn.qkv."),
    (r"self_attn\.projection\.", "attn.proj."),
    (r"visual_encoder\.post_layernorm\.", "visual_encoder.norm."),
)


def openclip(key: str) -> Stored:
    """OpenCLIP's layout: q, k and v in one tensor, projections transposed."""
    letter = re.search(r"self_attn\.([qkv])_proj\.", key)
    return Stored(
        _renamed(key, _OPENCLIP),
        part="qkv".index(letter[1]) if letter else None,
        transposed=key in ("visual_projection.weight", "text_projection.weight"),
    )


def transformers(key: str) -> Stored:
    """The layout of transformers' CLIPModel, which is ours."""
    return Stored(key)


def imagereward(key: str) -> Stored:
    """The layout of the released ImageReward, with the prefixes `blip.` and `mlp.`."""
    return Stored(_renamed(key, _IMAGEREWARD))


def _renamed(key: str, rules: Iterable[tuple[str, str]]) -> str:
    for pattern, name in rules:
        key = re.sub(pattern, name, key)
    return key


def is_unused(key: str) -> bool:
    """Whether a file may hold this key although no reward uses it: position ids, BLIP's training heads."""
    return key.endswith(".position_ids") or key.startswith(("blip.vision_proj.", "blip.text_proj."))


def stored_shapes(network: nn.Module, layout: Layout) -> dict[str, Shape]:
    """Returns the shape of every stored key that `network` needs."""
    return {
        (stored := layout(key)).key: stored.shape(tuple(value.shape))
        for key, value in network.state_dict().items()
    }


def mismatches(stored: Mapping[str, Shape], expected: Mapping[str, Shape]) -> dict[str, list[str]]:
    """Compares the shapes of a file with the expected ones.

    Returns:
        Kind of problem -> the keys that have it; empty if the file matches.
    """
    kinds = {
        "missing keys": sorted(expected.keys() - stored.keys()),
        "unknown keys": sorted(key for key in stored.keys() - expected.keys() if not is_unused(key)),
        "shapes that do not fit": [
            f"{key} {tuple(stored[key])}, not {shape}"
            for key, shape in expected.items()
            if key in stored and tuple(stored[key]) != shape
        ],
    }
    return {kind: items for kind, items in kinds.items() if items}


def first_few(items: list[str]) -> str:
    """Joins the first three items for a message."""
    return ", ".join(items[:3]) + (", …" if len(items) > 3 else "")


def assign_weights(network: nn.Module, state: Mapping[str, Tensor], layout: Layout, file: object) -> None:
    """Assigns a file's tensors to a network on the meta device; tensors stored as ours are not copied.

    Args:
        network: the network on the meta device, changed in place.
        state: the tensors of the file.
        layout: how the file stores our parameters.
        file: the file, for messages.

    Raises:
        ValueError: keys are missing, unknown or of another shape, or values are not finite; the message
            names the first few.
    """
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    if problems := mismatches(shapes, stored_shapes(network, layout)):
        details = "; ".join(f"{len(items)} {kind}: {first_few(items)}" for kind, items in problems.items())
        raise ValueError(f"{file} does not match the network of its configuration, or is damaged: {details}")
    ours = {key: (stored := layout(key)).read(state[stored.key]) for key in network.state_dict()}
    broken = [key for key, value in ours.items() if not value.is_meta and not all_finite(value)]
    if broken:
        keys = [layout(key).key for key in broken]
        raise ValueError(
            f"{file}: {len(keys)} tensors have NaN or infinite values: {first_few(keys)}; fetch it again"
        )
    network.load_state_dict(ours, assign=True)
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name == "position_ids" and buffer.is_meta:  # positions 0, 1, 2, ..., which are not in the file
                setattr(module, name, torch.arange(buffer.shape[-1]).expand(buffer.shape))
