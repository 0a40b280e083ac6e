"""Checks that the adapters of a LoRA file fit a network, shared by all commands.

`inspect_lora` collects all problems (`g2rpo doctor --verify` lists them), `check_lora` raises them as one
error before anything is loaded, and `read_lora` returns the adapters. Headers are checked first; the values
are read, and checked too, only if the header is correct.

Files in diffusers' names and, where the architecture has another layout, in the original's pass the same
checks, under each of the names that programs give to a layer. Other conventions are rejected by name
(models/transformer/lora_keys.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.models.loading.reading import Header, read_header, value_range
from g2rpo.models.loading.rows import Source
from g2rpo.models.transformer.architecture import OriginalLayout
from g2rpo.models.transformer.lora_config import Configuration, configuration
from g2rpo.models.transformer.lora_keys import LAYOUTS, Names, adapter_names, foreign_keys, shorten, split
from g2rpo.models.transformer.lora_strength import Strength, strengths

FLOATS = ("F64", "F32", "F16", "BF16")
"""Allowed dtypes of A and B, as safetensors names them."""

ALPHA_DTYPES = (*FLOATS, "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64")
"""Allowed dtypes of alpha."""

FETCH_AGAIN = "fetch or export the file again"
WRONG_MODEL = "it is of another architecture or layout; give the model that it belongs to with --base"

LayerShapes = Mapping[str, tuple[int, ...]]
"""diffusers' name of each linear layer of a network -> shape (out, in) of its weight."""


@dataclass(frozen=True)
class Problem:
    """A kind of problem with a file.

    Attributes:
        description: how many cases there are, of what, and where.
        advice: what is allowed, and what to do.
    """

    description: str
    advice: str


@dataclass(frozen=True)
class Target:
    """The weights that the adapters of a layer of the file change.

    Attributes:
        shape: shape (out, in) of the layer's weight.
        parts: diffusers' name of each layer that rows of the weight belong to -> those rows. For a layer in
            diffusers' names these are the layer itself and None.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, Source | None]


@dataclass(frozen=True)
class LoraFile:
    """Contents of a LoRA file and the problems with it.

    Attributes:
        path: path of the file.
        problems: reasons why the file cannot be used.
        layers: name of a layer in the file -> its keys "A", "B" and optionally "alpha"; A and B are both
            present if there are no problems.
        header: header of the file.
        note: warning about adapters that can be used; usually empty.
    """

    path: Path
    problems: tuple[Problem, ...]
    layers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    header: Header = field(default_factory=dict)
    note: str = ""

    @property
    def ranks(self) -> list[int]:
        """Ranks that occur in the file, in ascending order."""
        return sorted({self.header[parts["A"]][1][0] for parts in self.layers.values()})

    def raise_problems(self) -> None:
        """Raises a ValueError that lists all problems, if there are any."""
        if not self.problems:
            return
        lines = [f"{problem.description}; {problem.advice}" for problem in self.problems]
        several = "".join(f"\n  {line}" for line in lines)
        raise ValueError(
            f"{self.path} cannot be put onto this model:{several if len(lines) > 1 else f' {lines[0]}'}"
        )


def linear_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Returns the shapes (out, in) of a network's linear layers by name; it may be on the meta device."""
    return {n: tuple(m.weight.shape) for n, m in module.named_modules() if isinstance(m, nn.Linear)}


def check_lora(
    path: Path, shapes: LayerShapes, config: Mapping[str, Any], layout: OriginalLayout | None
) -> str:
    """Checks that the adapters of a file fit a network.

    Arguments are those of `inspect_lora`.

    Returns:
        `LoraFile.note`.

    Raises:
        ValueError: there are problems; the message lists all of them.
    """
    file = inspect_lora(path, shapes, config, layout)
    file.raise_problems()
    return file.note


def inspect_lora(
    path: Path, shapes: LayerShapes, config: Mapping[str, Any], layout: OriginalLayout | None
) -> LoraFile:
    """Collects the problems with the adapters of a file for a network.

    Args:
        path: a safetensors file.
        shapes: result of `linear_shapes`.
        config: configuration of the network.
        layout: key layout of the network's original release; None: it has none.
    """
    return _inspect(path, shapes, config, layout)[0]


def read_lora(
    path: Path, shapes: LayerShapes, config: Mapping[str, Any], layout: OriginalLayout | None
) -> tuple[dict[str, tuple[Tensor, Tensor, float]], str]:
    """Reads the adapters of a file, which add scale B A to the weights.

    Arguments are those of `inspect_lora`.

    Returns:
        diffusers' name of a layer -> (A [r, in], B [out, r], scale), with tensors on the CPU in the dtypes of
        the file; and `LoraFile.note`.

    Raises:
        ValueError: as `check_lora`.
    """
    file, tensors, scales = _inspect(path, shapes, config, layout, keep=True)
    file.raise_problems()
    targets = _targets_of(file.layers, shapes, config, layout)
    adapters = {}
    for name, parts in file.layers.items():
        down, up = tensors[parts["A"]], tensors[parts["B"]]
        for layer, source in targets[name].parts.items():
            adapters[layer] = (down, up if source is None else source.read(up), scales[name])
    return adapters, file.note


def _inspect(
    path: Path,
    shapes: LayerShapes,
    config: Mapping[str, Any],
    layout: OriginalLayout | None,
    *,
    keep: bool = False,
) -> tuple[LoraFile, dict[str, Tensor], dict[str, float]]:
    """Returns the file, its tensors if `keep` is set, and the scale of each layer by its name in the file."""
    from safetensors import safe_open

    try:
        header = read_header(path)
    except ValueError as error:
        return LoraFile(path, (Problem(str(error), FETCH_AGAIN),)), {}, {}
    known = _targets(shapes, config, layout)
    layers, problems = _header_problems(header, known)
    with safe_open(path, framework="pt") as opened:
        described = configuration(path, header, opened.metadata() or {})
        problems += [Problem(description, advice) for description, advice in described.problems]
        if problems:
            return LoraFile(path, tuple(problems), header=header), {}, {}
        alphas = {
            name: float(opened.get_tensor(parts["alpha"]).item())
            for name, parts in layers.items()
            if "alpha" in parts
        }
        targets = _targets_of(layers, shapes, config, layout)
        strength = strengths(
            {name: header[parts["A"]][1][0] for name, parts in layers.items()},
            alphas,
            described,
            {name: _module_names(name, target, described) for name, target in targets.items()},
        )
        problems += [Problem(description, advice) for description, advice in strength.problems]
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
        problems.append(
            Problem(
                f"{len(not_finite)} tensors with values that are not finite: {shorten(not_finite)}",
                f"every value must be finite; {FETCH_AGAIN}, from a training run that did not diverge",
            )
        )
    note = "" if problems else _note(layers, zeros, strength) or described.note(len(alphas))
    return LoraFile(path, tuple(problems), layers, header, note), tensors, strength.scales


def _count_of(tensor: Tensor) -> str:
    counts = {
        "NaN": int(torch.isnan(tensor).sum()),
        "+Inf": int(torch.isposinf(tensor).sum()),
        "-Inf": int(torch.isneginf(tensor).sum()),
    }
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def _note(layers: Mapping[str, Mapping[str, str]], zeros: set[str], strength: Strength) -> str:
    """Returns a warning about usable adapters that change nothing, or the empty string."""
    alpha_0 = [name for name in layers if strength.scales[name] == 0]
    no_effect = [n for n, keys in layers.items() if n in alpha_0 or keys["A"] in zeros or keys["B"] in zeros]
    if len(no_effect) < len(layers):
        if not alpha_0:
            return ""  # B of a layer that was never trained is 0
        return f"{len(alpha_0)} of {len(layers)} layers have alpha 0 and change nothing: {shorten(alpha_0)}"
    reason = "alpha is 0" if len(alpha_0) == len(layers) else "A or B is all zeros, or alpha is 0,"
    return (
        f"the adapters change nothing: {reason} in each of the {len(layers)} layers; the model stays as it is"
    )


# ---- checks of the header


def _targets(
    shapes: LayerShapes, config: Mapping[str, Any], layout: OriginalLayout | None
) -> dict[str, Target]:
    """Returns the name of each layer in diffusers' and in the original's layout -> the weights it changes."""
    targets = {layer: Target(shape, {layer: None}) for layer, shape in shapes.items()}
    if layout is None:
        return targets
    parts: dict[str, dict[str, Source | None]] = {}
    for layer, source in layout.layer_sources(config).items():
        parts.setdefault(source.key, {})[layer] = source
    for name, of_name in parts.items():
        rows = sum(shapes[part][0] for part in of_name)
        targets[name] = Target((rows, shapes[next(iter(of_name))][1]), of_name)
    return targets


def _targets_of(
    names: Iterable[str], shapes: LayerShapes, config: Mapping[str, Any], layout: OriginalLayout | None
) -> dict[str, Target]:
    """Returns name of a layer in a file -> the weights that it changes, without unknown names."""
    known = _targets(shapes, config, layout)
    found, finder = {}, Names(known)
    for name in names:
        if (layer := finder.find(name)) is not None:
            found[name] = known[layer]
    return found


def _module_names(name: str, target: Target, described: Configuration) -> tuple[str, ...]:
    """Returns the names by which a configuration may describe a layer of the file, none if it does not."""
    own = [layer for layer, source in target.parts.items() if source is None]
    if described.beside_file and "." in name:
        return (name, *own)
    return tuple(own) if "." in name else ()


def _header_problems(
    header: Header, known: Mapping[str, Target]
) -> tuple[dict[str, dict[str, str]], list[Problem]]:
    """Returns the layers of the file by their names there, and the problems that the header shows."""
    if not header:
        advice = f"a LoRA has A and B of its layers; {FETCH_AGAIN}"
        return {}, [Problem("it is empty: the file has no tensors", advice)]
    problems = []
    foreign = foreign_keys(header)
    for kind, keys in foreign.items():
        description = f"{len(keys)} of {len(header)} keys are {kind.label}: {shorten(keys)}"
        problems.append(Problem(description, kind.advice))
    ignored = {key for keys in foreign.values() for key in keys}
    layers, unrecognised = split({key: key for key in header if key not in ignored})
    if unrecognised:
        description = (
            f"{len(unrecognised)} of {len(header)} keys are not part of a LoRA: {shorten(unrecognised)}"
        )
        problems.append(Problem(description, f"g2rpo reads {LAYOUTS}"))
    if len(names := adapter_names(header)) > 1:
        description = f"it contains {len(names)} adapters: {shorten(names)}"
        problems.append(
            Problem(description, "a file must contain one LoRA; save each into a file of its own")
        )
    finder = Names(known)
    targets = {name: known[layer] for name in layers if (layer := finder.find(name)) is not None}
    unknown = {name: parts for name, parts in layers.items() if name not in targets}
    if unknown:
        num_unknown = sum(map(len, unknown.values()))
        num_known = sum(map(len, layers.values())) - num_unknown
        description = (
            f"{num_unknown} of {len(header)} keys are of {len(unknown)} unknown layers, {num_known} keys "
            f"are of known ones: {shorten(unknown)}"
        )
        problems.append(Problem(description, WRONG_MODEL))
    layers = {name: parts for name, parts in layers.items() if name in targets}
    complete = {name: parts for name, parts in layers.items() if {"A", "B"} <= parts.keys()}
    problems += [
        *_incomplete_problems(layers),
        *_repeated_problems(layers, targets),
        *_dtype_problems(layers, header),
        *_shape_problems(complete, header, targets),
    ]
    if not layers and not problems:
        problems.append(Problem("no layer has adapters", FETCH_AGAIN))
    return layers, problems


def _problem(cases: Sequence[str], label: str, advice: str) -> Iterable[Problem]:
    """Returns one problem that summarises `cases`, or none if there are no cases."""
    return [Problem(f"{len(cases)} {label}: {shorten(cases)}", advice)] if cases else []


def _incomplete_problems(layers: Mapping[str, Mapping[str, str]]) -> Iterable[Problem]:
    incomplete = [
        f"{name} (only {' and '.join(sorted(parts))})"
        for name, parts in layers.items()
        if not {"A", "B"} <= parts.keys()
    ]
    return _problem(
        incomplete,
        f"of {len(layers)} layers without one of the two matrices A and B",
        f"each layer needs both, A [rank, in] and B [out, rank]; {FETCH_AGAIN}",
    )


def _repeated_problems(layers: Mapping[str, Any], targets: Mapping[str, Target]) -> Iterable[Problem]:
    names: dict[str, list[str]] = {}
    for name in layers:
        for part in targets[name].parts:
            names.setdefault(part, []).append(name)
    repeated = [f"{part} ({', '.join(sorted(n))})" for part, n in names.items() if len(n) > 1]
    return _problem(
        repeated,
        "layers with several adapters",
        f"a file must contain one LoRA in one naming; {FETCH_AGAIN}",
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
        f"allowed are {', '.join(FLOATS)}; convert the file to BF16, or use the unquantised file",
    )


def _shape_problems(
    layers: Mapping[str, Mapping[str, str]], header: Header, targets: Mapping[str, Target]
) -> Iterable[Problem]:
    not_2d, empty, ranks, widths, alphas = [], [], [], [], []
    for name, parts in layers.items():
        down, up = header[parts["A"]][1], header[parts["B"]][1]
        shape = targets[name].shape
        case = f"{name} (A {down}, B {up} on {shape})"
        if len(down) != 2 or len(up) != 2:
            not_2d.append(case)
        elif not down[0] or not up[1]:
            empty.append(case)
        elif down[0] != up[1]:
            ranks.append(case)
        elif (up[0], down[1]) != shape:
            widths.append(case)
        if "alpha" in parts and math.prod(alpha := header[parts["alpha"]][1]) != 1:
            alphas.append(f"{parts['alpha']} {alpha}")
    fit = "A is [rank, in] and B [out, rank] for a weight [out, in]"
    return [
        *_problem(not_2d, "adapters that are not matrices", f"{fit}; {FETCH_AGAIN}"),
        *_problem(empty, "adapters of rank 0", f"the rank is at least 1; {FETCH_AGAIN}"),
        *_problem(ranks, "pairs of A and B with different ranks", f"{fit}; {FETCH_AGAIN}"),
        *_problem(widths, "shapes that do not fit", f"{fit}; {WRONG_MODEL}"),
        *_problem(
            alphas, "alphas that are not a single number", f"alpha is one number per layer; {FETCH_AGAIN}"
        ),
    ]
