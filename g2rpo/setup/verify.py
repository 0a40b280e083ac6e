"""Checks model files: keys, shapes and dtypes from their headers, then whether all values are finite.

    a model in diffusers layout    every part is compared with the network that its config.json describes
    a transformer in one file      diffusers' or the original's keys are compared with the base model
    a LoRA file                    its layers, ranks and shapes are compared with the same
    a reward model                 folder or file, see g2rpo.setup.verify_rewards

A bare file belongs to `base`, or without one to the model family whose keys it has. The networks to compare
with follow from each family's `architecture` and `parts`.

To add a kind of file, write a function that returns rows and add it to `KINDS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from g2rpo.inference.open import export_record
from g2rpo.models.family import ModelFamily
from g2rpo.models.loading.damage import file_note
from g2rpo.models.loading.files import component_class, read_json
from g2rpo.models.loading.reading import Header, index_names, other_files, read_header
from g2rpo.models.registry import families, find_model
from g2rpo.models.transformer.architecture import Architecture
from g2rpo.models.transformer.lora_checks import inspect_lora
from g2rpo.models.transformer.lora_config import PEFT_CONFIG, PEFT_FILE
from g2rpo.models.transformer.lora_keys import Names, is_lora
from g2rpo.models.transformer.weight_keys import own_keys, quantised
from g2rpo.models.transformer.weights import weight_file
from g2rpo.runtime.quiet import quiet_packages
from g2rpo.setup.doctor import Row
from g2rpo.setup.headers import AGAIN, Shapes, compared, dtypes, not_finite_rows, problems
from g2rpo.setup.verify_rewards import REWARD_KINDS

OTHER = "another architecture or layout; give the model that it belongs to with --base"
NETWORK_STEM = "diffusion_pytorch_model.safetensors"
WRAPPERS = ("model", "text_model", "language_model")
"""Parts of the keys of text encoders that differ between the files of versions of transformers."""


@quiet_packages()
def verify(
    path: str | Path, base: str | None = None, family: str | None = None, *, values: bool = True
) -> list[Row]:
    """Returns the rows of `g2rpo doctor --verify PATH`: one per valid file or part, one per problem.

    Args:
        path: a folder or a weight file.
        base: model that a bare file belongs to, as in `load_policy`; None: the first model of the family
            whose keys the file has.
        family: a custom family as "module:attribute", which is asked before the shipped ones.
        values: whether to read all tensors and check that they are finite, if the headers are valid.

    Raises:
        ValueError: `base` or `family` does not exist.
    """
    path = Path(path).expanduser()
    rows = _header_rows(path, base, family)
    if values and not any(row.status == "missing" for row in rows):
        rows += not_finite_rows(path)
    return rows


def _header_rows(path: Path, base: str | None, family: str | None) -> list[Row]:
    for is_reward, check_reward in REWARD_KINDS:
        if is_reward(path):
            return check_reward(path, base)
    for recognise, check in KINDS:
        if recognise(path):
            return check(path, base, family)
    problem = "neither a model's folder nor a weight file" if path.exists() else "not there"
    problem += file_note(path)
    for index in sorted(path.glob("*.safetensors.index.json")) if path.is_dir() else ():
        try:
            index_names(index)
        except ValueError as error:
            problem = str(error)
    return [Row(str(path), "missing", problem, "give a folder in diffusers layout, or a weight file")]


# ---- kinds


def _pipeline(folder: Path, base: str | None, custom: str | None) -> list[Row]:
    """Checks a complete pipeline by its own configuration; `base` is not used."""
    try:
        kind = read_json(folder / "model_index.json").get("_class_name")
    except ValueError as error:
        return [Row("model_index.json", "missing", str(error), AGAIN)]
    by_pipeline = {family.pipeline: family for family in families(custom)}
    if kind not in by_pipeline:
        supported = f"g2rpo supports {', '.join(by_pipeline)}"
        return [Row("model_index.json", "missing", f"a {kind}", supported)]
    family = by_pipeline[kind]
    rows = []
    for part in family.parts:
        try:
            rows += _part(folder, part, family)
        except ValueError as error:  # a configuration that is missing or not JSON
            rows.append(Row(part, "missing", str(error), AGAIN))
    return rows


def _part(folder: Path, part: str, family: ModelFamily) -> list[Row]:
    """Checks one folder of a pipeline; raises ValueError if its configuration cannot be read."""
    if part == "scheduler":
        kind = read_json(folder / part / "scheduler_config.json").get("_class_name")
        return [Row(part, "ok", str(kind))]
    if part in family.tokenizers:
        return [_tokenizer(folder / part, family.tokenizers[part])]
    config = read_json(folder / part / "config.json")
    if part in ("transformer", "vae"):
        if family.architecture is None:
            return [Row(part, "optional", "not compared", "the family names no architecture to compare with")]
        network = family.architecture.network if part == "transformer" else family.architecture.vae
        return _network(folder / part, NETWORK_STEM, _diffusers_shapes(network, config))
    shapes, ties = _text_encoder(component_class(folder, part), config)
    return _network(folder / part, "model.safetensors", shapes, ties, _plain)


def _tokenizer(folder: Path, sets: tuple[tuple[str, ...], ...]) -> Row:
    read_json(folder / "tokenizer_config.json")
    for names in sets:
        if all((folder / name).is_file() and (folder / name).stat().st_size for name in names):
            return Row(folder.name, "ok", ", ".join(names))
    required = " or ".join(" with ".join(names) for names in sets)
    return Row(folder.name, "missing", f"{folder} lacks {required}", AGAIN)


def _transformer_folder(folder: Path, base: str | None, custom: str | None) -> list[Row]:
    """Checks a transformer's folder by its own configuration."""
    try:
        config = read_json(folder / "config.json")
        networks = [architecture.network for architecture, _ in _architectures(custom)]
        kind = config.get("_class_name", networks[0])
        if kind not in networks:
            raise ValueError(f"config.json is that of a {kind}, not of a {' or '.join(networks)}")
        return _network(folder, NETWORK_STEM, _diffusers_shapes(kind, config))
    except ValueError as error:
        return [Row(folder.name, "missing", str(error), AGAIN)]


def _export_folder(folder: Path, base: str | None, custom: str | None) -> list[Row]:
    """Checks a folder with a single weight file; an export of g2rpo records its base."""
    file = weight_file(folder)
    assert file is not None
    return _file(file, base or export_record(folder).get("base_model"), custom)


def _pickled_adapters(folder: Path, base: str | None, custom: str | None) -> list[Row]:
    """Reports a folder of PEFT without a safetensors file."""
    problem = f"{folder} has {PEFT_CONFIG} without {PEFT_FILE}"
    advice = "save the adapters as safetensors; adapter_model.bin is a pickle, which can contain code"
    return [Row(folder.name, "missing", problem, advice)]


def _file(path: Path, base: str | None, custom: str | None) -> list[Row]:
    """Checks a file that holds a transformer or a LoRA."""
    try:
        header = read_header(path)
    except ValueError as error:
        return [Row(path.name, "missing", str(error), AGAIN)]
    if base is None:
        architecture, config = _owner(header, custom)
    else:
        family, files = find_model(base, custom)
        if family.architecture is None:
            return [Row(path.name, "optional", "not compared", f"{base} names no architecture")]
        architecture, config = family.architecture, files.config("transformer")
    if not header or is_lora(header):
        return _lora(path, architecture, config)
    return _transformer(path.name, header, architecture, config)


def _transformer(
    name: str, header: Header, architecture: Architecture, config: Mapping[str, Any]
) -> list[Row]:
    shapes, layout = _diffusers_shapes(architecture.network, config), architecture.layout
    if (kind := quantised(header)) is not None:
        return [Row(name, "missing", kind, OTHER)]
    try:
        own = own_keys(header, shapes, config, layout)
    except ValueError as error:
        return [Row(name, "missing", str(error), AGAIN)]
    header = {weight: header[key] for weight, key in own.items()}
    if layout is not None and layout.recognises(header):
        tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
        shapes = _shapes(layout.to_original(tensors, config))
    return compared(name, header, shapes, OTHER)


def _lora(path: Path, architecture: Architecture, config: Mapping[str, Any]) -> list[Row]:
    """Checks a LoRA as loading does; adapters are small, so their values are read too."""
    shapes = _diffusers_shapes(architecture.network, config)
    layers = {key.removesuffix(".weight"): shape for key, shape in shapes.items() if len(shape) == 2}
    file = inspect_lora(path, layers, config, architecture.layout)
    rows = [Row(path.name, "missing", problem.description, problem.advice) for problem in file.problems]
    summary = f"a LoRA on {len(file.layers)} layers, rank {_span(file.ranks)}, {dtypes(file.header)}"
    return rows or [Row(path.name, "ok", summary, file.note)]


Kind = tuple[Callable[[Path], bool], Callable[[Path, str | None, str | None], list[Row]]]

KINDS: tuple[Kind, ...] = (
    (lambda path: (path / "model_index.json").is_file(), _pipeline),
    (lambda path: (path / "config.json").is_file() and weight_file(path) is None, _transformer_folder),
    (lambda path: path.is_dir() and weight_file(path) is not None, _export_folder),
    (lambda path: (path / PEFT_CONFIG).is_file(), _pickled_adapters),
    (lambda path: path.suffix == ".safetensors" and path.is_file(), _file),
)
"""(recognises a path, checks it) for each kind of file; the first that recognises a path is used."""


# ---- the family of a bare file


def _architectures(custom: str | None) -> list[tuple[Architecture, Mapping[str, Any]]]:
    """The transformer of each family that can be compared, with the configuration of its first model."""
    listed = []
    for family in families(custom):
        configs = next(iter({**family.known, **family.random}.values()), None)
        if family.architecture is not None and configs is not None:
            listed.append((family.architecture, configs["transformer"]))
    return listed


def _owner(header: Header, custom: str | None) -> tuple[Architecture, Mapping[str, Any]]:
    """The transformer, with its configuration, that shares the most layers with a file."""
    layers = {_layer(key) for key in header}

    def matches(candidate: tuple[Architecture, Mapping[str, Any]]) -> int:
        architecture, config = candidate
        names = list(_diffusers_shapes(architecture.network, config))
        if architecture.layout is not None:
            names += [source.key for source in architecture.layout.sources(config).values()]
        finder = Names(_layer(name) for name in names)
        return sum(finder.find(layer) is not None for layer in layers)

    return max(_architectures(custom), key=matches)


def _layer(key: str) -> str:
    """The layer that a key of weights or adapters belongs to."""
    return re.sub(r"\.(lora_\w+(\.\w+)?\.weight|alpha|weight|bias|scale)$", "", key)


# ---- headers


def _network(
    folder: Path,
    stem: str,
    shapes: Shapes,
    ties: Mapping[str, str] | None = None,
    name_of: Callable[[str], str] = str,
) -> list[Row]:
    """Checks the files of one network, in one file or in shards; raises ValueError if its index is damaged.

    Args:
        stem: name of the file; with `.index.json`, name of the shards' index.
        ties: alias -> key, for tied weights that a file may store under either name.
        name_of: key in the files -> key in `shapes` and `ties`.
    """
    index = folder / f"{stem}.index.json"
    shard_of = index_names(index) if index.is_file() else {}
    files = [folder / name for name in sorted(set(shard_of.values()))] or [folder / stem]
    if absent := [file.name for file in files if not file.is_file()]:
        return problems(folder.name, {"missing files": (absent, AGAIN + other_files(folder))})
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
        return problems(
            folder.name, {f"keys that are not in the files where {index.name} lists them": (absent, AGAIN)}
        )
    # Old files of text encoders store the numbers from 0 too.
    merged = {name_of(key): value for key, value in merged.items() if not key.endswith(".position_ids")}
    for alias, key in (ties or {}).items():
        if alias in merged:
            merged.setdefault(key, merged.pop(alias))
    return compared(
        folder.name,
        merged,
        shapes,
        "config.json and the weights belong to different models: fetch both again",
    )


# ---- expected shapes


def _diffusers_shapes(network: str, config: Mapping[str, Any]) -> Shapes:
    """Key -> shape of a class of diffusers; raises ValueError if the configuration is of another class."""
    import diffusers

    kind = config.get("_class_name", network)
    if kind != network:
        raise ValueError(f"config.json is that of a {kind}, not of a {network}")
    with torch.device("meta"):
        return _shapes(getattr(diffusers, network).from_config(dict(config)).state_dict())


def _text_encoder(kind: Any, config: Mapping[str, Any]) -> tuple[Shapes, dict[str, str]]:
    """Shapes by plain key, and alias -> key of tied weights."""
    with torch.device("meta"):
        shapes = _shapes(kind(kind.config_class(**config)).state_dict())
    ties = dict(kind._tied_weights_keys or {})
    shapes = {_plain(key): shape for key, shape in shapes.items() if key not in ties}
    return shapes, {_plain(alias): _plain(key) for alias, key in ties.items()}


def _plain(key: str) -> str:
    """A text encoder's key without the names of wrappers, which differ between versions of files."""
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)


def _shapes(state: Mapping[str, torch.Tensor]) -> Shapes:
    return {key: tuple(value.shape) for key, value in state.items()}


def _span(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else "".join(map(str, numbers))
