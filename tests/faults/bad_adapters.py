"""LoRA files with one fault, or in another convention, made from a good adapter of the embedded model."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from faults.inputs import Bad, Generator
from faults.jobs import Result
from faults.outcomes import Expected, Words

BLOCKS = ("transformer_blocks.0", "transformer_blocks.1", "single_transformer_blocks.0")
LAYERS = ("attn.to_q", "attn.to_k", "attn.to_v")


@cache
def widths() -> dict[str, tuple[int, int]]:
    """Layer of the embedded model -> (rows, columns) of its weight, of those that exist in every block."""
    from safetensors import safe_open

    from g2rpo.models.tiny import tiny_folder

    found = {}
    for file in sorted((tiny_folder()[0] / "transformer").glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (no mapping)
                layer = key.removesuffix(".weight")
                if layer != key and layer.endswith(LAYERS):
                    found[layer] = tuple(tensors.get_slice(key).get_shape())
    assert found
    return found


def good(draw: Any, rank: int = 2) -> dict[str, Any]:
    """Tensors of a small adapter, with names as diffusers writes them."""
    import torch

    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    tensors = {}
    for layer, (rows, width) in draw.sample(sorted(widths().items()), 4):
        tensors[f"transformer.{layer}.lora_A.weight"] = 0.1 * torch.randn(rank, width, generator=generator)
        tensors[f"transformer.{layer}.lora_B.weight"] = 0.1 * torch.randn(rows, rank, generator=generator)
    return tensors


def save(tensors: dict[str, Any], path: Path, metadata: dict[str, str] | None = None) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata)


def command(draw: Any, file: str) -> list[str]:
    if draw.random() < 0.25:
        return ["doctor", "--verify", file, "--base", "tiny"]
    drawing = ["--prompt", "a red circle", "--steps", "1", "--out", "images", "--device", "cpu"]
    return ["sample", file, "--base", "tiny", *drawing]


def _bad(draw: Any, folder: Path, kind: str, tensors: dict[str, Any], **says: Words) -> Bad:
    name = f"adapter_{draw.randrange(1000)}.safetensors"
    save(tensors, folder / name)
    return Bad(f"adapter: {kind}", command(draw, name), Expected(**{"file": name, **says}))


def _one(draw: Any, tensors: dict[str, Any], end: str = "") -> tuple[str, str]:
    """A key, and its layer as a message names it."""
    key = draw.choice([key for key in tensors if f"lora_{end}" in key])
    return key, key.removeprefix("transformer.").partition(".lora_")[0].replace(".", r"\.")


def not_finite(draw: Any, folder: Path) -> Bad:
    tensors = good(draw)
    key, layer = _one(draw, tensors)
    value = draw.choice(["nan", "inf", "-inf"])
    tensors[key].view(-1)[draw.randrange(tensors[key].numel())] = float(value)
    return _bad(draw, folder, "not finite", tensors, place=layer, found="NaN|Inf|not finite", allowed=".")


def dtype(draw: Any, folder: Path) -> Bad:
    import torch

    tensors = good(draw)
    key, layer = _one(draw, tensors)
    kind, name = draw.choice(
        [
            (torch.int8, "I8|int8"),
            (torch.int32, "I32|int32"),
            (torch.bool, "BOOL"),
            (torch.float8_e4m3fn, "F8_E4M3|float8"),
        ]
    )
    tensors[key] = tensors[key].to(kind)
    return _bad(draw, folder, "another dtype", tensors, place=layer, found=name, allowed="F32|float32")


def half_a_pair(draw: Any, folder: Path) -> Bad:
    tensors = good(draw)
    key, layer = _one(draw, tensors)
    del tensors[key]
    return _bad(
        draw,
        folder,
        "half a pair",
        tensors,
        place=layer,
        found="only [AB]|without|missing",
        allowed="both|needs",
    )


def ranks(draw: Any, folder: Path) -> Bad:
    import torch

    tensors = good(draw)
    key, layer = _one(draw, tensors, "B")
    rank = draw.choice([1, 3, 5])
    tensors[key] = torch.ones(len(tensors[key]), rank)
    return _bad(draw, folder, "ranks differ", tensors, place=layer, found=rf"\b{rank}\b", allowed="rank")


def width(draw: Any, folder: Path) -> Bad:
    import torch

    tensors = good(draw)
    key, layer = _one(draw, tensors, "A")
    wrong = tensors[key].shape[1] + draw.choice([-1, 1, 64])
    tensors[key] = torch.ones(2, wrong)
    return _bad(
        draw,
        folder,
        "another width",
        tensors,
        place=layer,
        found=rf"\b{wrong}\b",
        allowed=rf"\b{wrong}\b|fit",
    )


def unknown_layers(draw: Any, folder: Path) -> Bad:
    tensors = good(draw)
    keys = draw.sample([key for key in tensors if "lora_A" in key], draw.randint(1, 3))
    for key in keys:
        for one in (key, key.replace("lora_A", "lora_B")):
            tensors[one.replace("attn.", "attention_of_another_model.")] = tensors.pop(one)
    count = 2 * len(keys)
    return _bad(
        draw,
        folder,
        "unknown layers",
        tensors,
        place="attention_of_another_model",
        found=rf"\b{count} of {len(tensors)}\b",
        allowed=".",
    )


def no_tensors(draw: Any, folder: Path) -> Bad:
    return _bad(draw, folder, "no tensors", {}, found="empty|no tensors", allowed=".")


def other_kind(draw: Any, folder: Path) -> Bad:
    import torch

    tensors = good(draw)
    _, layer = _one(draw, tensors)
    part, name = draw.choice(
        [
            ("hada_w1_a", "LoHa"),
            ("lokr_w1", "LoKr"),
            ("dora_scale", "DoRA"),
            ("lora_magnitude_vector", "DoRA"),
            ("diff", "full differences?"),
            ("lora_B.bias", "bias"),
        ]
    )
    tensors[f"transformer.{layer.replace(chr(92), '')}.{part}"] = torch.ones(2, 2)
    return _bad(draw, folder, f"{part}", tensors, found=name, allowed=".")


def alpha(draw: Any, folder: Path) -> Bad:
    import torch

    tensors = good(draw)
    _, layer = _one(draw, tensors)
    value, found = draw.choice(
        [
            (torch.tensor(float("nan")), "nan"),
            (torch.tensor(-2.0), "-2"),
            (torch.ones(3), r"\(3,\)|not a single number"),
            (torch.tensor(float("inf")), "inf"),
        ]
    )
    tensors[f"transformer.{layer.replace(chr(92), '')}.alpha"] = value
    return _bad(draw, folder, "alpha", tensors, place=layer, found=found, allowed="finite|number|from 0")


def changes_nothing(draw: Any, folder: Path) -> Bad:
    import torch

    tensors = good(draw)
    how = draw.choice(["B", "A", "alpha"])
    for key in list(tensors):
        if how == "alpha" and "lora_A" in key:
            tensors[key.replace("lora_A.weight", "alpha")] = torch.tensor(0.0)
        elif f"lora_{how}" in key:
            tensors[key] = torch.zeros_like(tensors[key])

    def says(result: Result) -> str:
        words = ("nothing", "no effect", "zero", "unchanged")
        return (
            ""
            if any(word in result.text for word in words)
            else "the adapter changes nothing, and nothing says so"
        )

    bad = _bad(draw, folder, "changes nothing", tensors, found="nothing|no effect|zero|unchanged", allowed="")
    return Bad(bad.kind, bad.words, bad.expected, accepted=says)


def _images(folder: Path) -> list[bytes]:
    """Pixels of the images of a folder; their grid names the model."""
    from PIL import Image

    return [Image.open(path).convert("RGB").tobytes() for path in sorted(folder.glob("[0-9]*.png"))]


def _reference(tensors: dict[str, Any], folder: Path) -> list[bytes]:
    """Pixels of the image that diffusers' convention gives, drawn in a process of its own."""
    import os
    import sys

    save(tensors, folder / "reference" / "adapter.safetensors")
    words = [
        "sample",
        str(folder / "reference" / "adapter.safetensors"),
        "--base",
        "tiny",
        "--prompt",
        "a red circle",
    ]
    words += ["--steps", "1", "--out", str(folder / "reference" / "images"), "--device", "cpu"]
    pid = os.fork()
    if pid == 0:
        try:
            log = os.open(folder / "reference" / "log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.argv = ["g2rpo", *words]
            from g2rpo.__main__ import app

            app(prog_name="g2rpo", standalone_mode=False)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    images = _images(folder / "reference" / "images")
    assert images, "the reference was not drawn"
    return images


def convention(draw: Any, folder: Path) -> Bad:
    """Other conventions are read as the same adapter, or refused by their name."""
    import torch

    tensors = good(draw)
    expected = _reference(tensors, folder)
    names = {
        "kohya": lambda key: (
            "lora_transformer_"
            + key.removeprefix("transformer.").partition(".lora_")[0].replace(".", "_")
            + (".lora_down.weight" if "lora_A" in key else ".lora_up.weight")
        ),
        "_orig_mod.": lambda key: key.replace("transformer.", "transformer._orig_mod.", 1),
        "PEFT": lambda key: key.replace("transformer.", "base_model.model.", 1),
        "doubled prefix": lambda key: f"transformer.{key}",
        "no prefix": lambda key: key.removeprefix("transformer."),
        "an adapter's name": lambda key: key.replace("lora_A.", "lora_A.default.").replace(
            "lora_B.", "lora_B.default."
        ),
    }
    kind = draw.choice([*names, "PEFT folder"])
    if kind == "PEFT folder":
        target = "adapter_folder"
        converted = {names["PEFT"](key): value for key, value in tensors.items()}
        save(converted, folder / target / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["to_q", "to_k", "to_v"]}
        (folder / target / "adapter_config.json").write_text(json.dumps(config))
    else:
        target = f"adapter_{draw.randrange(1000)}.safetensors"
        converted = {names[kind](key): value for key, value in tensors.items()}
        if kind == "kohya":
            converted |= {
                key.replace("lora_down.weight", "alpha"): torch.tensor(2.0)
                for key in list(converted)
                if "lora_down" in key
            }
        save(converted, folder / target)

    def same(result: Result) -> str:
        return (
            ""
            if _images(folder / "images") == expected
            else f"{kind}: another image than the same adapter in diffusers' names"
        )

    words = [
        "sample",
        target,
        "--base",
        "tiny",
        "--prompt",
        "a red circle",
        "--steps",
        "1",
        "--out",
        "images",
        "--device",
        "cpu",
    ]
    said = {
        "an adapter's name": "adapter's name",
        "doubled prefix": "prefix",
        "kohya": "lora_transformer_|kohya",
    }.get(kind, kind.replace(" folder", ""))
    return Bad(f"adapter: {kind}", words, Expected(target, "", said, "."), accepted=same)


GENERATORS: tuple[Generator, ...] = (
    not_finite,
    half_a_pair,
    dtype,
    convention,
    ranks,
    width,
    unknown_layers,
    changes_nothing,
    other_kind,
    no_tensors,
    alpha,
    convention,
)
