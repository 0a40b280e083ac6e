"""The networks of the four reward models, in transformers' classes, from published files or at random."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.models.loading.files import read_json
from g2rpo.rewards.clip import layouts
from g2rpo.rewards.preprocess import MEAN, STD
from g2rpo.rewards.published import read_state, weights_at

OPENCLIP_CONFIG = "open_clip_config.json"
OPENCLIP_FILES = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "open_clip_pytorch_model.bin",
)
TRANSFORMERS_FILES = ("model.safetensors", "pytorch_model.bin")

VIT_H_14: dict[str, Any] = {
    "embed_dim": 1024,
    "vision_cfg": {"image_size": 224, "layers": 32, "width": 1280, "head_width": 80, "patch_size": 14},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 1024, "heads": 16, "layers": 24},
}
"""OpenCLIP's ViT-H-14: HPS-v2.1, DFN5B (with quick_gelu) and, in transformers' layout, PickScore."""

Heads = Sequence[int] | None
"""(vision, text) attention heads, which weights do not tell; None: those of the published architecture."""


def checked_heads(heads: Any) -> Heads:
    """The option as it is.

    Raises:
        ValueError: neither None nor two whole numbers.
    """
    two = isinstance(heads, list | tuple) and len(heads) == 2
    if heads is not None and not (two and all(type(number) is int and number > 0 for number in heads)):
        raise ValueError(f"heads={heads!r}; it is [vision, text], two whole numbers of attention heads")
    return heads


def is_openclip(keys: Mapping[str, Any]) -> bool:
    return "visual.conv1.weight" in keys


def clip_network(place: Path, names: Sequence[str], *, quick_gelu: bool, heads: Heads = None) -> nn.Module:
    """A CLIPModel with the weights at `place`, in their own dtype, on the CPU.

    Args:
        place: a weight file, or a folder with one of `names`; a configuration beside it counts
            (open_clip_config.json, or config.json in transformers' layout, where it is needed).
        quick_gelu, heads: of files in OpenCLIP's layout without a configuration.

    Raises:
        ValueError: no weights, or such as do not fit.
    """
    file = weights_at(place, names)
    state = read_state(file)
    network, layout = meta_clip(file, state, quick_gelu=quick_gelu, heads=heads)
    layouts.fill(network, state, layout, file)
    return network


def meta_clip(
    file: Path, state: Mapping[str, Tensor], *, quick_gelu: bool, heads: Heads = None
) -> tuple[nn.Module, layouts.Layout]:
    """The network that a file's weights are of, without storage, and the file's layout."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CLIPConfig

    beside = file.parent / OPENCLIP_CONFIG
    try:
        if not is_openclip(state):
            return clip_of(CLIPConfig(**_transformers_config(file, state))), layouts.transformers
        known = beside.is_file()
        model = _openclip_config(beside) if known else _told_by_shapes(file, state, quick_gelu, heads)
        return clip_of(clip_config(model)), layouts.openclip
    except StrictDataclassError as error:  # of transformers, which is no ValueError
        told = " ".join(str(error).split())
        raise ValueError(f"{file}: what is said of its network does not fit: {told}") from error


def clip_of(config: Any) -> nn.Module:
    """A CLIPModel on the meta device."""
    from transformers import CLIPModel

    with torch.device("meta"):
        return CLIPModel(config)


def clip_config(model: Mapping[str, Any]) -> Any:
    """transformers' CLIPConfig of OpenCLIP's `model_cfg`: embed_dim, vision_cfg, text_cfg, quick_gelu."""
    from transformers import CLIPConfig

    vision, text = model["vision_cfg"], model["text_cfg"]
    both = {
        "hidden_act": "quick_gelu" if model.get("quick_gelu") else "gelu",
        "layer_norm_eps": 1e-5,
        "projection_dim": model["embed_dim"],
    }
    towers = {
        name: {
            "hidden_size": tower["width"],
            "intermediate_size": int(tower["width"] * tower.get("mlp_ratio", 4.0)),
            "num_hidden_layers": tower["layers"],
            "num_attention_heads": num_heads,
            **both,
        }
        for name, tower, num_heads in (
            ("vision_config", vision, vision["width"] // vision.get("head_width", 64)),
            ("text_config", text, text["heads"]),
        )
    }
    towers["vision_config"] |= {"patch_size": vision["patch_size"], "image_size": vision["image_size"]}
    end = text["vocab_size"] - 1  # pooled there; OpenCLIP looks for the largest id, which it is
    towers["text_config"] |= {
        "vocab_size": text["vocab_size"],
        "max_position_embeddings": text["context_length"],
        "eos_token_id": end,
        "bos_token_id": end - 1,
        "pad_token_id": 0,
    }
    return CLIPConfig(**towers, projection_dim=model["embed_dim"])


def _openclip_config(file: Path) -> dict[str, Any]:
    content = read_json(file)
    model: Any = content.get("model_cfg")
    preparation = content.get("preprocess_cfg", {})
    try:
        wanted = [
            model["embed_dim"],
            *(model["vision_cfg"][key] for key in ("image_size", "layers", "width", "patch_size")),
        ]
        wanted += [
            model["text_cfg"][key] for key in ("context_length", "vocab_size", "width", "heads", "layers")
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} describes no CLIP of two plain transformers (lacks {error})") from error
    if not all(isinstance(number, int) and number > 0 for number in wanted):
        raise ValueError(f"{file} describes no CLIP of two plain transformers: sizes {wanted}")
    for key, ours in (("mean", MEAN), ("std", STD)):
        if key in preparation and not all(map(math.isclose, preparation[key], ours)):
            raise ValueError(
                f"{file}: pictures with {key} {preparation[key]}; only CLIP's {list(ours)} is read"
            )
    return model


def _transformers_config(file: Path, state: Mapping[str, Tensor]) -> dict[str, Any]:
    if "vision_model.embeddings.patch_embedding.weight" not in state:
        raise ValueError(
            f"{file} holds no CLIP, neither in OpenCLIP's layout (visual.conv1.weight …) nor in "
            f"transformers' (vision_model.embeddings …); its keys are {layouts.first_few(sorted(state))}"
        )
    config = read_json(file.parent / "config.json")  # the only place that says how many heads there are
    if config.get("model_type", "clip") != "clip":
        raise ValueError(f"{file.parent / 'config.json'} is that of a {config['model_type']}, not of a clip")
    return config


def _told_by_shapes(
    file: Path, state: Mapping[str, Tensor], quick_gelu: bool, heads: Heads
) -> dict[str, Any]:
    """OpenCLIP's configuration: ViT-H-14's at its pixels, or what shapes tell where `heads` are given."""
    needed = (
        "visual.conv1.weight",
        "visual.positional_embedding",
        "visual.proj",
        "token_embedding.weight",
        "positional_embedding",
    )
    if absent := [key for key in needed if key not in state or state[key].ndim < 2]:
        raise ValueError(f"{file} is no whole CLIP in OpenCLIP's layout; it lacks {', '.join(absent)}")
    conv, tokens = state["visual.conv1.weight"], state["token_embedding.weight"]
    width, text_width = conv.shape[0], tokens.shape[1]
    side = math.isqrt(state["visual.positional_embedding"].shape[0] - 1)
    published = (VIT_H_14["vision_cfg"]["width"], VIT_H_14["text_cfg"]["width"])
    if heads is None:
        if (width, text_width) != published:
            raise ValueError(
                f"{file} is {width} and {text_width} wide, not {published[0]} and {published[1]} as a "
                f"ViT-H-14; its weights do not tell its heads: put its {OPENCLIP_CONFIG} beside it"
            )
        vision = {**VIT_H_14["vision_cfg"], "image_size": side * conv.shape[-1]}
        return {**VIT_H_14, "vision_cfg": vision, "quick_gelu": quick_gelu}
    return {
        "embed_dim": state["visual.proj"].shape[1],
        "quick_gelu": quick_gelu,
        "vision_cfg": {
            "image_size": side * conv.shape[-1],
            "layers": count_layers(state, "visual.transformer.resblocks."),
            "width": width,
            "head_width": width // heads[0],
            "patch_size": conv.shape[-1],
        },
        "text_cfg": {
            "context_length": state["positional_embedding"].shape[0],
            "vocab_size": tokens.shape[0],
            "width": text_width,
            "heads": heads[1],
            "layers": count_layers(state, "transformer.resblocks."),
        },
    }


def count_layers(keys: Mapping[str, Any], prefix: str) -> int:
    """How many numbered blocks there are under `prefix`."""
    return len({key[len(prefix) :].split(".")[0] for key in keys if key.startswith(prefix)})
