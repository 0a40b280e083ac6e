"""Loading of a pipeline's other parts (text encoders, VAE, tokenizers) by the classes of other libraries.

Those libraries would also read pickles, follow an index to any file, give weights that are missing random
values, and run code that a folder brings along. Everything here is checked first, and only safetensors are
read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from g2rpo.models.loading.files import read_json
from g2rpo.models.loading.reading import PICKLED_ENDINGS, all_finite, index_files, read_header
from g2rpo.runtime.progress import phase

STEMS = ("model.safetensors", "diffusion_pytorch_model.safetensors")
"""Names of the weight file of a part; with `.index.json`, names of the index of several files."""


def check_parts(folder: Path, parts: Iterable[str]) -> None:
    """Checks the weight files of a model's parts by their headers, before anything is loaded.

    A part without any weights passes: text encoders are not needed if all embeddings are cached.

    Raises:
        ValueError: a file is damaged or a pickle, or an index leaves its folder.
    """
    for part in parts:
        check_part(folder / part)


def check_part(folder: Path) -> None:
    """Checks the weight files of one part, as `check_parts`."""
    files: set[Path] = set()
    for index in sorted(folder.glob("*.index.json")):
        if index.name.endswith(".safetensors.index.json"):
            files |= set(index_files(index).values())
    files |= {folder / stem for stem in STEMS if (folder / stem).is_file()}
    for file in sorted(files):
        try:
            read_header(file)
        except ValueError as error:
            raise ValueError(f"{error}; fetch it again") from error
    pickles = sorted(
        file.name for file in folder.glob("*") if file.suffix in PICKLED_ENDINGS and file.is_file()
    )
    if pickles and not files:
        raise ValueError(
            f"{folder} contains no weights in safetensors, only {', '.join(pickles[:3])}, a pickle, which "
            "can contain code and is not read; save the model as safetensors (save_pretrained of its "
            "library)"
        )


def load_module(kind: Any, folder: Path, **options: Any) -> Any:
    """Returns a network that `kind.from_pretrained` reads from a folder of safetensors.

    Args:
        kind: a class of diffusers or transformers.
        folder: folder of the part.
        options: further arguments of `from_pretrained`.

    Raises:
        ValueError: files are missing, damaged or pickles, or weights are missing or have other shapes.
    """
    check_part(folder)
    try:
        with phase(folder.name):
            module, report = kind.from_pretrained(
                folder, use_safetensors=True, local_files_only=True, output_loading_info=True, **options
            )
    except OSError as error:
        text = " ".join(str(error).split())
        raise ValueError(f"{folder} cannot be loaded as a {kind.__name__}: {text}") from error
    except RuntimeError as error:  # shapes that differ
        text = " ".join(str(error).split())[:400]
        raise ValueError(f"{folder} does not fit its config.json: {text}") from error
    problems = [f"{key} missing" for key in sorted(report.get("missing_keys") or ())]
    problems += [f"{key} has another shape" for key in sorted(map(str, report.get("mismatched_keys") or ()))]
    if problems:
        raise ValueError(
            f"{folder} lacks weights that its config.json requires ({len(problems)} differences: "
            f"{'; '.join(problems[:3])}{', …' if len(problems) > 3 else ''}); fetch the model again"
        )
    return module


def check_finite(module: nn.Module, folder: Path) -> None:
    """Checks that the weights of a part are finite, on the device where they are.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and not all_finite(parameter):
            raise ValueError(
                f"{folder}: {name} has NaN or infinite values; weights must be finite: fetch the files again"
            )


def load_tokenizer(kind: Any, folder: Path) -> Any:
    """Returns the tokenizer of a folder; code that comes with it is not run.

    Raises:
        ValueError: files are missing or damaged.
    """
    read_json(folder / "tokenizer_config.json")
    try:
        return kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except OSError as error:
        text = " ".join(str(error).split())
        raise ValueError(f"{folder} cannot be loaded as a {kind.__name__}: {text}") from error
