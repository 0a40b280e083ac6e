"""Finds the family of a model and loads its policy: the only way to a family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from g2rpo.models.family import Configs, ModelFamily, ModelFiles, ModelShape, TextEncoders
from g2rpo.models.loading.files import config_folder, local_folder, read_json
from g2rpo.models.loading.precision import set_precision
from g2rpo.models.loading.pretrained import check_parts
from g2rpo.models.options import PolicyOptions
from g2rpo.models.tiny import is_tiny, tiny_folder
from g2rpo.runtime.imports import check_not_injected, import_attribute
from g2rpo.runtime.processes import resolve_device
from g2rpo.runtime.progress import phase
from g2rpo.runtime.quiet import quiet_packages

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from g2rpo.models.policy import Policy

FAMILIES = {
    "flux": "g2rpo.models.flux.family:FAMILY",
    "qwen_image": "g2rpo.models.qwen_image.family:FAMILY",
}
"""Name of each family -> "module:attribute" of its `ModelFamily`, imported when a model is looked up."""

RANDOM_PREFIX = "random:"


def is_random(name: str) -> bool:
    """Returns whether `name` is the name of a model with random weights."""
    return name.startswith(RANDOM_PREFIX)


def import_family(path: str) -> ModelFamily:
    """Imports a family from "module:attribute".

    Raises:
        ValueError: there is no such module or attribute, or it is not a `ModelFamily`.
    """
    family = import_attribute(path, "model family", "my_family:FAMILY")
    if not isinstance(family, ModelFamily):
        raise ValueError(
            f"family={path!r} is a {type(family).__name__}, not a g2rpo.models.family.ModelFamily"
        )
    return family


def families(custom: str | None = None) -> Iterator[ModelFamily]:
    """Yields the families in the order in which they are asked for a model.

    Args:
        custom: "module:attribute" of a family that comes before the shipped ones.
    """
    if custom is not None:
        yield import_family(custom)
    for path in FAMILIES.values():
        yield import_family(path)


def known_models(custom: str | None = None) -> dict[str, ModelFamily]:
    """Returns the models of the hub whose sizes are built in, with their families."""
    return {name: family for family in families(custom) for name in family.known}


def find_model(name: str | Path, family: str | None = None) -> tuple[ModelFamily, ModelFiles]:
    """Finds a model and its family; of a model on the hub only configuration files are downloaded.

    Args:
        name: `tiny`, `tiny@NAME`, `random:NAME`, a folder in diffusers layout, or a hub name.
        family: a custom family as "module:attribute", which is asked before the shipped ones.

    Raises:
        ValueError: there is no such model, or no family for it.
    """
    text = str(name)
    check_not_injected(text, "the policy", "policy")
    if (found := _built_in(text, family, with_known=True)) is not None:
        return found[0], ModelFiles(text, configs=found[1])
    if is_tiny(text):
        folder, weights = tiny_folder(text)
        return _family_of(folder, family), ModelFiles(text, folder, weights=(weights,) if weights else ())
    folder = config_folder(name)
    return _family_of(folder, family), ModelFiles(text, folder)


def fetch_model(name: str | Path, family: str | None = None) -> tuple[ModelFamily, ModelFiles]:
    """Finds a model and its family with all files; a model on the hub is downloaded.

    Raises:
        ValueError: as `find_model`.
    """
    text = str(name)
    if is_tiny(text) or _built_in(text, family, with_known=False) is not None:
        return find_model(name, family)
    found, files = find_model(name, family)
    folder = local_folder(name, found.parts)
    check_parts(folder, found.parts)
    return found, replace(files, folder=folder, configs={})


def _built_in(name: str, custom: str | None, *, with_known: bool) -> tuple[ModelFamily, Configs] | None:
    """Returns the family and the configurations of a model that needs no files; None: it needs them."""
    names: list[str] = []
    for family in families(custom):
        configs = {**(family.known if with_known else {}), **family.random}
        names += family.random
        if name in configs:
            return family, configs[name]
    if is_random(name):
        raise ValueError(f"no model {name!r}; the models with random weights are {', '.join(names)}")
    return None


def _family_of(folder: Path, custom: str | None) -> ModelFamily:
    """Returns the family that `model_index.json` in a folder names."""
    pipeline = read_json(folder / "model_index.json").get("_class_name")
    known = []
    for family in families(custom):
        if family.pipeline == pipeline:
            return family
        known.append(family.pipeline)
    raise ValueError(
        f"{folder} is a {pipeline}; g2rpo has families for {', '.join(known)}, and takes one of your own as "
        "--family module:attribute (setting family)"
    )


@quiet_packages()
def check_policy(
    name: str | Path,
    options: PolicyOptions | None = None,
    *,
    mesh: DeviceMesh | None = None,
    family: str | None = None,
) -> None:
    """Checks, before any weight is read, that `load_policy` can load a model with these options.

    Arguments are those of `load_policy`.

    Raises:
        ValueError: there is no such model, or it does not support an option, or weights do not fit.
    """
    found, files = find_model(name, family)
    if files.folder is not None and (is_tiny(str(name)) or Path(name).expanduser().is_dir()):
        check_parts(files.folder, found.parts)  # of a model on the hub only configurations are here
    found.check(files, _resolved(found, files, options or PolicyOptions()), mesh)


@quiet_packages()
def load_policy(
    name: str | Path,
    options: PolicyOptions | None = None,
    *,
    device: str | torch.device = "auto",
    mesh: DeviceMesh | None = None,
    family: str | None = None,
) -> Policy:
    """Loads a policy.

    Args:
        name: `tiny`, `tiny@NAME`, `random:NAME`, a folder in diffusers layout, or a hub name.
        options: everything else that determines the policy; None: the defaults of `PolicyOptions`. Weights
            are applied after those that belong to the name (`tiny@NAME`).
        device: "auto" selects a GPU if there is one, else the CPU.
        mesh: device mesh over which trained parameters are sharded (runtime/sharding.py); None: one process.
        family: a custom family as "module:attribute"; it is asked before the shipped ones.

    Raises:
        ValueError: there is no such model, or it does not support an option.
    """
    options = options or PolicyOptions()
    found, files = find_model(name, family)
    found.check(files, _resolved(found, files, options), mesh)
    _, files = fetch_model(name, family)
    resolved = resolve_device(device)
    set_precision(options.precision, resolved)
    with phase(f"loading {name}"):
        return found.load(files, _resolved(found, files, options), resolved, mesh)


@quiet_packages()
def load_text_encoders(
    name: str | Path, options: PolicyOptions, device: torch.device, *, family: str | None = None
) -> TextEncoders:
    """Creates a model's text encoders without its network; their weights are read at the first prompt.

    Embeddings are bit-equal to those of the policy.

    Raises:
        ValueError: there is no such model, or it does not support an option.
    """
    found, files = fetch_model(name, family)
    set_precision(options.precision, device)
    return found.text_encoders(files, options, device)


def model_shape(
    name: str | Path, options: PolicyOptions | None = None, *, family: str | None = None
) -> ModelShape:
    """Returns the sizes of a model; only the configuration files of a hub model are downloaded.

    Raises:
        ValueError: there is no such model, or it does not support an option.
    """
    found, files = find_model(name, family)
    return found.shape(files, _resolved(found, files, options or PolicyOptions()))


def negative_prompt_of(name: str | Path, options: PolicyOptions, *, family: str | None = None) -> str | None:
    """Returns the negative prompt that a policy will need; None: it needs none.

    Raises:
        ValueError: there is no such model.
    """
    if options.true_cfg == 1 or options.negative_prompt is not None:
        return options.negative_prompt
    return find_model(name, family)[0].negative_prompt


def _resolved(family: ModelFamily, files: ModelFiles, options: PolicyOptions) -> PolicyOptions:
    """Returns the options with the weights that belong to the name and the family's negative prompt.

    Custom families get trainable=True: they may refuse an option that they do not know.
    """
    negative = options.negative_prompt
    if options.true_cfg != 1 and negative is None:
        negative = family.negative_prompt
    trainable = options.trainable or all(family is not shipped for shipped in families())
    weights = (*files.weights, *options.weights)
    return replace(options, negative_prompt=negative, weights=weights, trainable=trainable)
