"""Files of tests/golden_rewards/: images, tiny networks in published layouts, results of the originals."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "golden_rewards"
PICTURES = ("square_astronaut", "landscape_coffee", "portrait_rocket", "small_chelsea", "large_noise")
MODELS = {
    "hps": "tiny_openclip_gelu",
    "clip": "tiny_openclip_quickgelu",
    "pickscore": "tiny_hf_clip",
    "imagereward": "tiny_imagereward",
}
"""Reward -> the tiny network in its layout."""


@cache
def golden_json(name: str) -> Any:
    """Reads a JSON file by its name without suffix."""
    return json.loads((FOLDER / f"{name}.json").read_text())


@cache
def tensors(name: str) -> dict[str, Tensor]:
    return load_file(FOLDER / f"{name}.safetensors")


@cache
def pixels(name: str) -> Tensor:
    """Reads an image as [1, 3, H, W] in [0, 1], float32."""
    array = np.asarray(Image.open(FOLDER / "images" / f"{name}.png").convert("RGB"))
    return torch.from_numpy(array.copy()).permute(2, 0, 1)[None].float() / 255


def golden_ids(reward: str) -> Any:
    """A tokenizer for the six golden captions, with the token ids of the reduced vocabularies."""
    io = tensors(MODELS[reward] + "_io")
    rows = dict(
        zip(golden_json(MODELS[reward])["captions"], io.get("token_ids", io.get("input_ids")), strict=True)
    )
    return lambda prompts: torch.stack([rows[prompt] for prompt in prompts])


def publish(reward: str, folder: Path, tokenizer: bool = True) -> Path:
    """Writes the tiny network of a reward with the file names and layout of the published one."""
    name = MODELS[reward]
    folder.mkdir(parents=True, exist_ok=True)
    config = golden_json(name)["config"]
    if reward == "hps":
        torch.save({"state_dict": tensors(name)}, folder / "HPS_v2.1_compressed.pt")
        (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    elif reward == "clip":
        torch.save(tensors(name), folder / "open_clip_pytorch_model.bin")
        (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    elif reward == "pickscore":
        save_file(tensors(name), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "clip", **config}))
    else:
        torch.save(tensors(name), folder / "ImageReward.pt")
    if tokenizer:
        if reward == "imagereward":
            bert_tokenizer(
                folder, 1198, {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}
            )
        else:
            clip_tokenizer(folder, 1000)
    return folder


def loading(reward: str) -> dict[str, Any]:
    """Options of the tiny network besides its path: the heads, which its files do not give."""
    return {"heads": [4, 4]} if reward == "imagereward" else {}


def clip_tokenizer(folder: Path, size: int = 49408) -> Path:
    """Writes CLIP's tokenizer files: the real ids of the golden captions, or `size` byte tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    known = golden_json("vocabularies")["clip"]
    vocabulary, merges = dict(known["vocab"]), known["merges"]
    if size != 49408:
        single = [token for token, index in vocabulary.items() if index < 512]
        filler = [f"unused{n}" for n in range(size - 514)]
        vocabulary = {t: n for n, t in enumerate([*single, *filler, "<|startoftext|>", "<|endoftext|>"])}
        merges = []
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return folder


def bert_tokenizer(folder: Path, size: int = 30522, known: dict[str, int] | None = None) -> Path:
    """Writes vocab.txt with `size` lines: the real ids of the golden captions, with fillers between them."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"[unused{n}]" for n in range(size)]
    for token, index in (known or golden_json("vocabularies")["bert"]).items():
        lines[index] = token
    (folder / "vocab.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return folder
