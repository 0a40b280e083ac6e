"""The networks of the four reward models in transformers' classes, and how files are loaded into them."""

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
from g2rpo.rewards.published import read_state, weight_file

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
"""OpenCLIP's ViT-H-14, used by HPS-v2.1, DFN5B (with quick_gelu) and, in transformers' layout, PickScore."""

Heads = Sequence[int] | None
"""(vision, text) attention heads, which the weights do not show; None = those of the published network."""


def checked_heads(heads: Any) -> Heads:
    """Returns the option `heads` unchanged.

    Raises:
        ValueError: it is neither None nor two positive integers.
    """
    is_pair = isinstance(heads, list | tuple) and len(heads) == 2
    if heads is not None and not (is_pair and all(type(number) is int and number > 0 for number in heads)):
        raise ValueError(f"heads={heads!r} must be [vision, text], two positive numbers of attention heads")
    return heads


def is_openclip(keys: Mapping[str, Any]) -> bool:
    """Whether the keys are those of OpenCLIP's layout."""
    return "visual.conv1.weight" in keys


def clip_network(path: Path, names: Sequence[str], *, quick_gelu: bool, heads: Heads = None) -> nn.Module:
    """Loads a CLIPModel in the dtype of its weights, on the CPU.

    Args:
        path: a weight file, or a folder with one of `names`. A configuration beside the file is used:
            open_clip_config.json, or config.json, which transformers' layout needs.
        names: names of weight files, in order of preference.
        quick_gelu, heads: of files in OpenCLIP's layout without a configuration.

    Raises:
        ValueError: there are no weights, or they do not fit the network.
    """
    file = weight_file(path, names)
    state = read_state(file)
    network, layout = meta_clip(file, state, quick_gelu=quick_gelu, heads=heads)
    layouts.assign_weights(network, state, layout, file)
    return network


def meta_clip(
    file: Path, state: Mapping[str, Tensor], *, quick_gelu: bool, heads: Heads = None
) -> tuple[nn.Module, layouts.Layout]:
    """Builds the network of a file's weights on the meta device.

    Args:
        file: the weight file; a configuration beside it is used.
        state: its tensors, or meta tensors of their shapes.
        quick_gelu, heads: of files in OpenCLIP's layout without a configuration.

    Returns:
        The network and the file's layout.

    Raises:
        ValueError: the file holds no CLIP, or its configuration does not fit.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CLIPConfig

    config = file.parent / OPENCLIP_CONFIG
    try:
        if not is_openclip(state):
            return clip_of(CLIPConfig(**_transformers_config(file, state))), layouts.transformers
        if config.is_file():
            model = _openclip_config(config)
        else:
            model = _config_from_shapes(file, state, quick_gelu, heads)
        return clip_of(clip_config(model)), layouts.openclip
    except StrictDataclassError as error:  # of transformers, no subclass of ValueError
        details = " ".join(str(error).split())
        raise ValueError(f"{file}: the configuration of its network is inconsistent: {details}") from error


def clip_of(config: Any) -> nn.Module:
    """Builds a CLIPModel on the meta device."""
    from transformers import CLIPModel

    with torch.device("meta"):
        return CLIPModel(config)


def clip_config(model: Mapping[str, Any]) -> Any:
    """Converts OpenCLIP's `model_cfg` (embed_dim, vision_cfg, text_cfg, quick_gelu) to a CLIPConfig."""
    from transformers import CLIPConfig

    vision, text = model["vision_cfg"], model["text_cfg"]
    shared = {
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
            **shared,
        }
        for name, tower, num_heads in (
            ("vision_config", vision, vision["width"] // vision.get("head_width", 64)),
            ("text_config", text, text["heads"]),
        )
    }
    towers["vision_config"] |= {"patch_size": vision["patch_size"], "image_size": vision["image_size"]}
    end = text["vocab_size"] - 1  # the pooled token; OpenCLIP pools at the largest id, which is the end token
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
        sizes = [
            model["embed_dim"],
            *(model["vision_cfg"][key] for key in ("image_size", "layers", "width", "patch_size")),
        ]
        sizes += [
            model["text_cfg"][key] for key in ("context_length", "vocab_size", "width", "heads", "layers")
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{file} does not describe a CLIP of two plain transformers (missing: {error})"
        ) from error
    if not all(isinstance(number, int) and number > 0 for number in sizes):
        raise ValueError(f"{file} does not describe a CLIP of two plain transformers: sizes {sizes}")
    for key, ours in (("mean", MEAN), ("std", STD)):
        if key in preparation and not all(map(math.isclose, preparation[key], ours)):
            raise ValueError(
                f"{file}: preprocessing with {key} {preparation[key]} is unsupported; use CLIP's {list(ours)}"
            )
    return model


def _transformers_config(file: Path, state: Mapping[str, Tensor]) -> dict[str, Any]:
    if "vision_model.embeddings.patch_embedding.weight" not in state:
        raise ValueError(
            f"{file} contains no CLIP, neither in OpenCLIP's layout (visual.conv1.weight …) nor in "
            f"transformers' (vision_model.embeddings …); its keys are {layouts.first_few(sorted(state))}"
        )
    config = read_json(file.parent / "config.json")  # the only source of the number of heads
    if config.get("model_type", "clip") != "clip":
        raise ValueError(
            f"{file.parent / 'config.json'} has model_type {config['model_type']!r}; it must be 'clip'"
        )
    return config


def _config_from_shapes(
    file: Path, state: Mapping[str, Tensor], quick_gelu: bool, heads: Heads
) -> dict[str, Any]:
    """Returns ViT-H-14's configuration at the file's image size, or, with `heads`, that of the shapes."""
    needed = (
        "visual.conv1.weight",
        "visual.positional_embedding",
        "visual.proj",
        "token_embedding.weight",
        "positional_embedding",
    )
    if missing := [key for key in needed if key not in state or state[key].ndim < 2]:
        raise ValueError(f"{file} is not a complete CLIP in OpenCLIP's layout; it lacks {', '.join(missing)}")
    conv, tokens = state["visual.conv1.weight"], state["token_embedding.weight"]
    width, text_width = conv.shape[0], tokens.shape[1]
    side = math.isqrt(state["visual.positional_embedding"].shape[0] - 1)
    published = (VIT_H_14["vision_cfg"]["width"], VIT_H_14["text_cfg"]["width"])
    if heads is None:
        if (width, text_width) != published:
            raise ValueError(
                f"{file} has widths {width} and {text_width}, a ViT-H-14 {published[0]} and {published[1]}; "
                f"the number of heads is not in the weights: put {OPENCLIP_CONFIG} beside it"
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
    """Returns the number of numbered blocks whose keys begin with `prefix`."""
    return len({key[len(prefix) :].split(".")[0] for key in keys if key.startswith(prefix)})
