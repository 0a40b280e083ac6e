"""Checks model files: keys, shapes and dtypes from their headers, and the values of adapters.

    a FLUX in diffusers layout     every part is compared with the network that its config.json describes
    a transformer in one file      diffusers' or the original's keys are compared with FLUX.1-dev or `base`
    a LoRA file                    its layers, ranks and shapes are compared with the same
    a reward model                 folder or file, see g2rpo.setup.verify_rewards

To add a kind of file, write a function that returns rows and add it to `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from g2rpo.inference.open import export_record
from g2rpo.models.flux.family import PARTS
from g2rpo.models.flux.known import FLUX_1_DEV
from g2rpo.models.flux.layout import is_original, original_prefix, to_original
from g2rpo.models.flux.network import ORIGINAL
from g2rpo.models.loading.files import component_class, read_json
from g2rpo.models.loading.reading import Header, read_header
from g2rpo.models.registry import find_model
from g2rpo.models.transformer.lora_checks import inspect_lora
from g2rpo.models.transformer.lora_keys import is_lora
from g2rpo.models.transformer.weights import weight_file
from g2rpo.setup.doctor import Row
from g2rpo.setup.headers import AGAIN, Shapes, compared, dtypes, problems
from g2rpo.setup.verify_rewards import REWARD_KINDS

OTHER = "another architecture or layout; name the model that it belongs to with --base"
TOKENIZERS = {
    "tokenizer": (("tokenizer.json",), ("vocab.json", "merges.txt")),
    "tokenizer_2": (("tokenizer.json",), ("spiece.model",)),
}
"""Tokenizer -> sets of files; one complete set is needed."""


def verify(path: str | Path, base: str | None = None) -> list[Row]:
    """Returns the rows of `g2rpo doctor --verify PATH`: one per valid file or part, one per problem.

    Args:
        path: a folder or a weight file.
        base: model that a bare file belongs to, as in `load_policy`; None: FLUX.1-dev.

    Raises:
        ValueError: `base` does not exist.
    """
    path = Path(path).expanduser()
    for recognise, check in (*REWARD_KINDS, *KINDS):
        if recognise(path):
            return check(path, base)
    problem = "neither a model's folder nor a weight file" if path.exists() else "not there"
    return [Row(str(path), "missing", problem, "give a folder in diffusers layout, or a weight file")]


# ---- kinds


def _pipeline(folder: Path, base: str | None) -> list[Row]:
    """Checks a complete FLUX pipeline by its own configuration; `base` is not used."""
    try:
        kind = read_json(folder / "model_index.json").get("_class_name")
    except ValueError as error:
        return [Row("model_index.json", "missing", str(error), AGAIN)]
    if kind != "FluxPipeline":
        return [Row("model_index.json", "missing", f"a {kind}", "g2rpo supports FluxPipeline models")]
    rows = []
    for part in PARTS:
        try:
            rows += _part(folder, part)
        except ValueError as error:  # a configuration that is missing or not JSON
            rows.append(Row(part, "missing", str(error), AGAIN))
    return rows


def _part(folder: Path, part: str) -> list[Row]:
    """Checks one folder of a pipeline; raises ValueError if its configuration cannot be read."""
    if part == "scheduler":
        kind = read_json(folder / part / "scheduler_config.json").get("_class_name")
        return [Row(part, "ok", str(kind))]
    if part in TOKENIZERS:
        return [_tokenizer(folder / part, part)]
    config = read_json(folder / part / "config.json")
    if part in ("transformer", "vae"):
        return _network(folder / part, "diffusion_pytorch_model.safetensors", _diffusers_shapes(part, config))
    shapes, ties = _text_encoder(component_class(folder, part), config)
    return _network(folder / part, "model.safetensors", shapes, ties)


def _tokenizer(folder: Path, part: str) -> Row:
    read_json(folder / "tokenizer_config.json")
    sets = TOKENIZERS[part]
    for names in sets:
        if all((folder / name).is_file() and (folder / name).stat().st_size for name in names):
            return Row(part, "ok", ", ".join(names))
    required = " or ".join(" with ".join(names) for names in sets)
    return Row(part, "missing", f"{folder} lacks {required}", AGAIN)


def _transformer_folder(folder: Path, base: str | None) -> list[Row]:
    """Checks a transformer's folder by its own configuration."""
    try:
        shapes = _diffusers_shapes("transformer", read_json(folder / "config.json"))
    except ValueError as error:
        return [Row(folder.name, "missing", str(error), AGAIN)]
    return _network(folder, "diffusion_pytorch_model.safetensors", shapes)


def _export_folder(folder: Path, base: str | None) -> list[Row]:
    """Checks a folder with a single weight file; an export of g2rpo records its base."""
    file = weight_file(folder)
    assert file is not None
    return _file(file, base or export_record(folder).get("base_model"))


def _file(path: Path, base: str | None) -> list[Row]:
    """Checks a file that holds a transformer or a LoRA."""
    try:
        header = read_header(path)
    except ValueError as error:
        return [Row(path.name, "missing", str(error), AGAIN)]
    config = _transformer_config(base)
    if not header or is_lora(header):
        return _lora(path, config)
    return _transformer(path.name, header, config)


def _transformer(name: str, header: Header, config: Mapping[str, Any]) -> list[Row]:
    shapes = _diffusers_shapes("transformer", config)
    if is_original(header):
        prefix = original_prefix(header)  # besides prefixed keys there may be a VAE and text encoders
        header = {key.removeprefix(prefix): value for key, value in header.items() if key.startswith(prefix)}
        shapes = _original_shapes(shapes, config)
    return compared(name, header, shapes, OTHER)


def _lora(path: Path, config: Mapping[str, Any]) -> list[Row]:
    """Checks a LoRA as loading does; adapters are small, so their values are read too."""
    shapes = _diffusers_shapes("transformer", config)
    layers = {key.removesuffix(".weight"): shape for key, shape in shapes.items() if len(shape) == 2}
    file = inspect_lora(path, layers, config, ORIGINAL)
    rows = [Row(path.name, "missing", problem.description, problem.advice) for problem in file.problems]
    summary = f"a LoRA on {len(file.layers)} layers, rank {_span(file.ranks)}, {dtypes(file.header)}"
    return rows or [Row(path.name, "ok", summary, file.note)]


KINDS: tuple[tuple[Callable[[Path], bool], Callable[[Path, str | None], list[Row]]], ...] = (
    (lambda path: (path / "model_index.json").is_file(), _pipeline),
    (lambda path: (path / "config.json").is_file() and weight_file(path) is None, _transformer_folder),
    (lambda path: path.is_dir() and weight_file(path) is not None, _export_folder),
    (lambda path: path.suffix == ".safetensors" and path.is_file(), _file),
)
"""(recognises a path, checks it) for each kind of file; the first that recognises a path is used."""


# ---- headers


def _network(folder: Path, stem: str, shapes: Shapes, ties: Mapping[str, str] | None = None) -> list[Row]:
    """Checks the files of one network, in one file or in shards.

    Args:
        stem: name of the file; with `.index.json`, name of the shards' index.
        ties: alias -> key, for tied weights that a file may store under either name.
    """
    index = folder / f"{stem}.index.json"
    if index.is_file():
        shard_of = {key: str(file) for key, file in read_json(index).get("weight_map", {}).items()}
    else:
        shard_of = {}
    files = [folder / name for name in sorted(set(shard_of.values()))] or [folder / stem]
    if absent := [file.name for file in files if not file.is_file()]:
        return problems(folder.name, {"missing files": (absent, AGAIN)})
    merged: Header = {}
    damaged = []
    for file in files:
        try:
            header = read_header(file)
        except ValueError as error:
            damaged.append(str(error))
            continue
        absent += [key for key, shard in shard_of.items() if shard == file.name and key not in header]
        merged |= header
    if damaged:
        return problems(folder.name, {"damaged files": (damaged, AGAIN)})
    if absent:
        return problems(folder.name, {f"keys not in the files that {index.name} says": (absent, AGAIN)})
    for alias, key in (ties or {}).items():
        if alias in merged:
            merged.setdefault(key, merged.pop(alias))
    merged = {
        key.removeprefix("text_model."): value
        for key, value in merged.items()
        if not key.endswith(".position_ids")  # old CLIP files store the numbers from 0
    }
    return compared(
        folder.name, merged, shapes, "config.json and weights are of two models: fetch both again"
    )


# ---- expected shapes


def _transformer_config(base: str | None) -> Mapping[str, Any]:
    """Returns the configuration of the transformer of `base`; raises ValueError if there is none."""
    return find_model(base)[1].config("transformer") if base else FLUX_1_DEV["transformer"]


def _diffusers_shapes(part: str, config: Mapping[str, Any]) -> Shapes:
    import diffusers

    name = {"transformer": "FluxTransformer2DModel", "vae": "AutoencoderKL"}[part]
    if config.get("_class_name", name) != name:
        raise ValueError(f"config.json is that of a {config['_class_name']}, not of a {name}")
    with torch.device("meta"):
        return _shapes(getattr(diffusers, name).from_config(dict(config)).state_dict())


def _original_shapes(shapes: Shapes, config: Mapping[str, Any]) -> Shapes:
    tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    return _shapes(to_original(tensors, config))


def _text_encoder(kind: Any, config: Mapping[str, Any]) -> tuple[Shapes, dict[str, str]]:
    """Shapes, without the prefix that only some CLIP files have, and alias -> key of tied weights."""
    with torch.device("meta"):
        shapes = _shapes(kind(kind.config_class(**config)).state_dict())
    ties = dict(kind._tied_weights_keys or {})
    return {key.removeprefix("text_model."): s for key, s in shapes.items() if key not in ties}, ties


def _shapes(state: Mapping[str, torch.Tensor]) -> Shapes:
    return {key: tuple(value.shape) for key, value in state.items()}


def _span(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else "".join(map(str, numbers))
