"""Where each parameter of our networks lies in a published file: OpenCLIP's, transformers', ImageReward's.

A layout is a function from our key to the stored one. Reading that way, a misfit is told in the file's own
keys, and the same comparison serves loading and `g2rpo doctor --verify`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A parameter in a file.

    Attributes:
        key: in the file.
        part: which third of the stored rows it is (q, k, v in one tensor); None: all of it.
        transposed: stored as [in, out].
    """

    key: str
    part: int | None = None
    transposed: bool = False

    def shape(self, ours: Shape) -> Shape:
        """What the file must hold for a parameter of shape `ours`."""
        if self.part is not None:
            return (3 * ours[0], *ours[1:])
        return ours[::-1] if self.transposed else ours

    def read(self, tensor: Tensor) -> Tensor:
        """Our parameter from the stored tensor."""
        if self.part is not None:
            return tensor.chunk(3)[self.part]
        return tensor.T.contiguous() if self.transposed else tensor


Layout = Callable[[str], Stored]

# A transformers CLIPModel's names to OpenCLIP's, applied in this order.
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

# ImageReward's network of ours (`vision` and `text` of transformers, `mlp`) to the released names.
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
    """OpenCLIP's: q, k, v in one, projections transposed."""
    letter = re.search(r"self_attn\.([qkv])_proj\.", key)
    return Stored(
        _renamed(key, _OPENCLIP),
        part="qkv".index(letter[1]) if letter else None,
        transposed=key in ("visual_projection.weight", "text_projection.weight"),
    )


def transformers(key: str) -> Stored:
    """That of transformers' CLIPModel: ours."""
    return Stored(key)


def imagereward(key: str) -> Stored:
    """The released ImageReward's, `blip.` and `mlp.`."""
    return Stored(_renamed(key, _IMAGEREWARD))


def _renamed(key: str, rules: Iterable[tuple[str, str]]) -> str:
    for pattern, name in rules:
        key = re.sub(pattern, name, key)
    return key


def unused(key: str) -> bool:
    """Keys that files may hold and no reward uses: counting numbers, heads of BLIP's training."""
    return key.endswith(".position_ids") or key.startswith(("blip.vision_proj.", "blip.text_proj."))


def stored_shapes(network: nn.Module, layout: Layout) -> dict[str, Shape]:
    """Key in the file -> shape, of everything that `network` needs."""
    return {
        (stored := layout(key)).key: stored.shape(tuple(value.shape))
        for key, value in network.state_dict().items()
    }


def misfits(found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> dict[str, list[str]]:
    """Kind of problem -> what has it; a file that fits gives none."""
    kinds = {
        "missing keys": sorted(wanted.keys() - found.keys()),
        "unknown keys": sorted(key for key in found.keys() - wanted.keys() if not unused(key)),
        "shapes that do not fit": [
            f"{key} {tuple(found[key])}, not {shape}"
            for key, shape in wanted.items()
            if key in found and tuple(found[key]) != shape
        ],
    }
    return {kind: items for kind, items in kinds.items() if items}


def first_few(items: list[str]) -> str:
    return ", ".join(items[:3]) + (", …" if len(items) > 3 else "")


def fill(network: nn.Module, state: Mapping[str, Tensor], layout: Layout, where: object) -> None:
    """Puts a file's tensors into a network made on the meta device, without copying those stored as ours.

    Raises:
        ValueError: keys are missing, unknown or of another shape; it names the first few.
    """
    found = {key: tuple(value.shape) for key, value in state.items()}
    if problems := misfits(found, stored_shapes(network, layout)):
        told = "; ".join(f"{len(items)} {kind}: {first_few(items)}" for kind, items in problems.items())
        raise ValueError(f"{where} is of another network than its configuration says, or damaged: {told}")
    ours = {key: (stored := layout(key)).read(state[stored.key]) for key in network.state_dict()}
    network.load_state_dict(ours, assign=True)
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name == "position_ids" and buffer.is_meta:  # counting numbers, in no file that counts
                setattr(module, name, torch.arange(buffer.shape[-1]).expand(buffer.shape))
