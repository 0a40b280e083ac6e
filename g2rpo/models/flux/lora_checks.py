"""Whether the adapters of a LoRA file can work on a network: one set of checks for every command.

`inspect_lora` collects all problems (`g2rpo doctor --verify` lists them), `check_lora` raises them as one
message before anything is loaded, and `read_lora` returns the adapters. Headers are checked first; only a
file whose header is right is read, for its values: adapters are small.

Files in diffusers' names (with `transformer.` or without) and in the original's (`lora_unet_…`,
`diffusion_model.…`) go through the same checks. Other conventions are refused by name (models/lora_keys.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.models.flux.layout import Source, layer_sources
from g2rpo.models.flux.lora_keys import LAYOUTS, foreign_keys, listed
from g2rpo.models.flux.lora_layout import comfyui_names, split
from g2rpo.models.flux.lora_strength import Strength, strengths
from g2rpo.models.loading.reading import Header, read_header, value_range

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of A and B, as safetensors names them."""

ALPHA_DTYPES = (*FLOATS, "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64")

AGAIN = "fetch or export the file again"
OTHER = "it is of another architecture or layout; name the model it belongs to with --base"

LayerShapes = Mapping[str, tuple[int, ...]]
"""diffusers' name of each linear layer of a network -> [out, in] of its weight."""


@dataclass(frozen=True)
class Problem:
    """One kind of problem.

    Attributes:
        found: how many, what, and where.
        advice: what is allowed, and what to do.
    """

    found: str
    advice: str


@dataclass(frozen=True)
class Target:
    """Where the adapters of a layer of the file go.

    Attributes:
        shape: of the layer's weight.
        parts: diffusers' name of each layer that its rows belong to -> those rows; in diffusers' names the
            layer itself and None.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, Source | None]


@dataclass(frozen=True)
class LoraFile:
    """What was found in a file.

    Attributes:
        path: of the file.
        problems: reasons why it cannot be used.
        layers: name in the file -> its keys, "A", "B" and perhaps "alpha"; complete where nothing is wrong.
        header: of the file.
        note: what a user should know of adapters that can be used; mostly empty.
    """

    path: Path
    problems: tuple[Problem, ...]
    layers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    header: Header = field(default_factory=dict)
    note: str = ""

    @property
    def ranks(self) -> list[int]:
        """The ranks that occur, rising."""
        return sorted({self.header[parts["A"]][1][0] for parts in self.layers.values()})

    def refuse_problems(self) -> None:
        """Raises ValueError with all problems, if there are any."""
        if not self.problems:
            return
        lines = [f"{problem.found}; {problem.advice}" for problem in self.problems]
        several = "".join(f"\n  {line}" for line in lines)
        raise ValueError(
            f"{self.path} cannot be put onto this model:{several if len(lines) > 1 else f' {lines[0]}'}"
        )


def linear_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The argument `shapes` of the checks below, of a network that may be on the meta device."""
    return {n: tuple(m.weight.shape) for n, m in module.named_modules() if isinstance(m, nn.Linear)}


def check_lora(path: Path, shapes: LayerShapes, config: Mapping[str, Any]) -> str:
    """Raises ValueError if the adapters cannot work on this network; returns `LoraFile.note`."""
    file = inspect_lora(path, shapes, config)
    file.refuse_problems()
    return file.note


def inspect_lora(path: Path, shapes: LayerShapes, config: Mapping[str, Any]) -> LoraFile:
    """Everything that is wrong with the adapters of a file, for a network; headers first, then values.

    Args:
        path: a safetensors file.
        shapes: as `linear_shapes` gives them.
        config: of the FluxTransformer2DModel.
    """
    return _inspect(path, shapes, config)[0]


def read_lora(
    path: Path, shapes: LayerShapes, config: Mapping[str, Any]
) -> tuple[dict[str, tuple[Tensor, Tensor, float]], str]:
    """diffusers' layer -> (A [r, in], B [out, r], scale): its weight grows by scale B A; and the note.

    Raises:
        ValueError: as `check_lora`.
    """
    file, tensors, scales = _inspect(path, shapes, config, keep=True)
    file.refuse_problems()
    targets = _targets(shapes, config)
    adapters = {}
    for name, parts in file.layers.items():
        down, up = tensors[parts["A"]], tensors[parts["B"]]
        for layer, source in targets[name].parts.items():
            adapters[layer] = (down, up if source is None else source.read(up), scales[name])
    return adapters, file.note


def _inspect(
    path: Path, shapes: LayerShapes, config: Mapping[str, Any], *, keep: bool = False
) -> tuple[LoraFile, dict[str, Tensor], dict[str, float]]:
    """The file, its tensors if they are kept, and the scale of each layer (by its name in the file)."""
    from safetensors import safe_open

    try:
        header = read_header(path)
    except ValueError as error:
        return LoraFile(path, (Problem(str(error), AGAIN),)), {}, {}
    targets = _targets(shapes, config)
    layers, problems = _header_problems(header, targets)
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata() or {}
        if problems:
            return LoraFile(path, tuple(problems), header=header), {}, {}
        alphas = {
            name: float(opened.get_tensor(parts["alpha"]).item())
            for name, parts in layers.items()
            if "alpha" in parts
        }
        strength = strengths(
            {name: header[parts["A"]][1][0] for name, parts in layers.items()},
            alphas,
            metadata,
            {n: layer for n in layers for layer, source in targets[n].parts.items() if source is None},
        )
        problems += [Problem(found, advice) for found, advice in strength.problems]
        tensors: dict[str, Tensor] = {}
        not_finite, zeros = [], set()
        for key in (parts[end] for parts in layers.values() for end in ("A", "B")):
            tensor = opened.get_tensor(key)
            low, high = value_range(tensor)
            if not (math.isfinite(low) and math.isfinite(high)):
                not_finite.append(f"{key} ({_count_of(tensor)})")
            elif low == high == 0:
                zeros.add(key)
            if keep:
                tensors[key] = tensor
    if not_finite:
        found = f"{len(not_finite)} tensors with values that are not finite: {listed(not_finite)}"
        problems.append(
            Problem(found, f"every value must be finite; {AGAIN}, from a training that did not break")
        )
    note = "" if problems else _note(layers, zeros, strength)
    return LoraFile(path, tuple(problems), layers, header, note), tensors, strength.scales


def _count_of(tensor: Tensor) -> str:
    counts = {
        "NaN": int(torch.isnan(tensor).sum()),
        "+Inf": int(torch.isposinf(tensor).sum()),
        "-Inf": int(torch.isneginf(tensor).sum()),
    }
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def _note(layers: Mapping[str, Mapping[str, str]], zeros: set[str], strength: Strength) -> str:
    """What should be said of adapters that can be used, but change nothing."""
    weak = [name for name in layers if strength.scales[name] == 0]
    still = [n for n, parts in layers.items() if n in weak or parts["A"] in zeros or parts["B"] in zeros]
    if len(still) < len(layers):
        if not weak:
            return ""  # B of a layer that was never trained is 0
        return f"{len(weak)} of {len(layers)} layers have alpha 0 and change nothing: {listed(weak)}"
    why = "alpha is 0" if len(weak) == len(layers) else "A or B is all zeros, or alpha is 0,"
    return f"the adapters change nothing: {why} in each of the {len(layers)} layers; the model stays as it is"


# ---- what the header says


def _targets(shapes: LayerShapes, config: Mapping[str, Any]) -> dict[str, Target]:
    """Every name that a LoRA file may give a layer -> where its adapters go."""
    targets = {layer: Target(shape, {layer: None}) for layer, shape in shapes.items()}
    targets |= {f"transformer.{layer}": target for layer, target in targets.items()}
    parts: dict[str, dict[str, Source | None]] = {}
    for layer, source in layer_sources(config).items():
        parts.setdefault(source.key, {})[layer] = source
    for name, layer in comfyui_names(config).items():
        rows = sum(shapes[part][0] for part in parts[layer])
        targets[name] = Target((rows, shapes[next(iter(parts[layer]))][1]), parts[layer])
    return targets


def _header_problems(
    header: Header, targets: Mapping[str, Target]
) -> tuple[dict[str, dict[str, str]], list[Problem]]:
    """Layers of the file, by their names there, and what is wrong with them without reading a tensor."""
    if not header:
        return {}, [
            Problem("it is empty: the file has no tensors", f"a LoRA has A and B of its layers; {AGAIN}")
        ]
    problems = []
    foreign = foreign_keys(header)
    for kind, keys in foreign.items():
        found = f"{len(keys)} of {len(header)} keys are {kind.what}: {listed(keys)}"
        problems.append(Problem(found, kind.advice))
    set_aside = {key for keys in foreign.values() for key in keys}
    layers, strange = split({key: key for key in header if key not in set_aside})
    if strange:
        found = f"{len(strange)} of {len(header)} keys are no part of a LoRA: {listed(strange)}"
        problems.append(Problem(found, f"g2rpo reads {LAYOUTS}"))
    unknown = {name: parts for name, parts in layers.items() if name not in targets}
    if unknown:
        num_unknown = sum(map(len, unknown.values()))
        num_known = sum(map(len, layers.values())) - num_unknown
        found = (
            f"{num_unknown} of {len(header)} keys are of {len(unknown)} unknown layers, {num_known} keys "
            f"are of known ones: {listed(unknown)}"
        )
        problems.append(Problem(found, OTHER))
    layers = {name: parts for name, parts in layers.items() if name in targets}
    complete = {name: parts for name, parts in layers.items() if {"A", "B"} <= parts.keys()}
    problems += [
        *_lone(layers),
        *_repeated(layers, targets),
        *_dtype_problems(layers, header),
        *_shape_problems(complete, header, targets),
    ]
    if not layers and not problems:
        problems.append(Problem("no layer has adapters", AGAIN))
    return layers, problems


def _problem(found: Sequence[str], label: str, advice: str) -> Iterable[Problem]:
    return [Problem(f"{len(found)} {label}: {listed(found)}", advice)] if found else []


def _lone(layers: Mapping[str, Mapping[str, str]]) -> Iterable[Problem]:
    lone = [
        f"{name} (only {' and '.join(sorted(parts))})"
        for name, parts in layers.items()
        if not {"A", "B"} <= parts.keys()
    ]
    return _problem(
        lone,
        f"of {len(layers)} layers without one of the two matrices A and B",
        f"each layer needs both, A [rank, in] and B [out, rank]; {AGAIN}",
    )


def _repeated(layers: Mapping[str, Any], targets: Mapping[str, Target]) -> Iterable[Problem]:
    names: dict[str, list[str]] = {}
    for name in layers:
        for part in targets[name].parts:
            names.setdefault(part, []).append(name)
    twice = [f"{part} ({', '.join(sorted(several))})" for part, several in names.items() if len(several) > 1]
    return _problem(
        twice,
        "layers with several adapters",
        "a file holds one LoRA, in one naming; fetch or export the file again",
    )


def _dtype_problems(layers: Mapping[str, Mapping[str, str]], header: Header) -> Iterable[Problem]:
    wrong = [
        f"{key} is {header[key][0]}"
        for parts in layers.values()
        for end, key in parts.items()
        if header[key][0] not in (ALPHA_DTYPES if end == "alpha" else FLOATS)
    ]
    return _problem(
        wrong,
        "tensors of a dtype that is not allowed",
        f"allowed are {', '.join(FLOATS)}; convert the file to BF16, or take it before quantisation",
    )


def _shape_problems(
    layers: Mapping[str, Mapping[str, str]], header: Header, targets: Mapping[str, Target]
) -> Iterable[Problem]:
    not_2d, empty, ranks, widths, alphas = [], [], [], [], []
    for name, parts in layers.items():
        down, up = header[parts["A"]][1], header[parts["B"]][1]
        shape = targets[name].shape
        both = f"{name} (A {down}, B {up} on {shape})"
        if len(down) != 2 or len(up) != 2:
            not_2d.append(both)
        elif not down[0] or not up[1]:
            empty.append(both)
        elif down[0] != up[1]:
            ranks.append(both)
        elif (up[0], down[1]) != shape:
            widths.append(both)
        if "alpha" in parts and math.prod(alpha := header[parts["alpha"]][1]) != 1:
            alphas.append(f"{parts['alpha']} {alpha}")
    fit = "A is [rank, in] and B [out, rank] for a weight [out, in]"
    return [
        *_problem(not_2d, "adapters that are no matrices", f"{fit}; {AGAIN}"),
        *_problem(empty, "adapters of rank 0", f"the rank is at least 1; {AGAIN}"),
        *_problem(ranks, "pairs of A and B with different ranks", f"{fit}; {AGAIN}"),
        *_problem(widths, "shapes that do not fit", f"{fit}; {OTHER}"),
        *_problem(alphas, "alphas that are no single number", f"alpha is a scalar of a layer; {AGAIN}"),
    ]
