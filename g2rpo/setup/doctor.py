"""What this machine has, what is missing for which feature, and the command that installs it."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from g2rpo.data.published_prompts import PUBLISHED
from g2rpo.models.tiny import FOLDER, assets


@dataclass(frozen=True)
class Row:
    """Result of one check."""

    name: str
    status: Literal["ok", "missing", "optional"]
    """`missing`: a run needs it. `optional`: only the named feature needs it."""
    detail: str
    """What is installed, or what is wrong."""
    advice: str = ""
    """The command to type, or a remark."""


REQUIRED = (
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "safetensors",
    "pydantic",
    "typer",
    "rich",
    "matplotlib",
)
OPTIONAL = {
    "tensorboard": ("curves in TensorBoard", "pip install tensorboard"),
    **{
        name: (f"the logger {name}", f"pip install {name}")
        for name in ("wandb", "trackio", "swanlab", "mlflow")
    },
    "torchao": ("AdamW's moments and tails in 8 bits", "pip install torchao"),
    "rapidocr": ("the reward ocr", "pip install rapidocr onnxruntime rapidfuzz"),
    "pyarrow": ("prompts in parquet files", "pip install pyarrow"),
    "sentencepiece": ("tokenizers without tokenizer.json", "pip install sentencepiece protobuf"),
}
LARGE_MODEL_GB = 24  # 12 billion parameters of 2 bytes each
LARGE_MODEL = f"the weights of a 12-billion-parameter model alone take {LARGE_MODEL_GB} GB in bfloat16"


def report(out: str | Path = "runs") -> list[Row]:
    """Returns the rows of `g2rpo doctor`, without loading a model or changing anything.

    Args:
        out: folder of runs, whose disk is checked.
    """
    rows = [_python(), *(_package(name) for name in REQUIRED)]
    if importlib.util.find_spec("torch") is not None:
        rows += [*_devices(), _processes()]
    rows += [_memory(), _disk(Path(out)), _embedded_model(), *_prompt_files()]
    rows += [_package(name, *OPTIONAL[name]) for name in OPTIONAL]
    return rows


def _prompt_files() -> list[Row]:
    """Prompt files that shipped recipes name, in the current folder."""
    return [
        Row(name, "ok", published.content)
        if Path(name).is_file()
        else Row(name, "optional", f"not in this folder ({published.content})", published.command)
        for name, published in PUBLISHED.items()
    ]


def _python() -> Row:
    version = platform.python_version()
    is_supported = (3, 11) <= sys.version_info[:2] < (3, 14)
    return Row(
        "python",
        "ok" if is_supported else "missing",
        version,
        "" if is_supported else "g2rpo needs Python 3.11 to 3.13",
    )


def _package(name: str, feature: str = "", install: str = "pip install . (in g2rpo's folder)") -> Row:
    if importlib.util.find_spec(name) is not None:
        return Row(name, "ok", importlib.metadata.version(name))
    return Row(
        name,
        "optional" if feature else "missing",
        f"not installed (needed for {feature})" if feature else "not installed",
        install,
    )


def _devices() -> list[Row]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        reason = (
            f"torch is built for {built}, but finds no GPU" if built else "this torch is built for CPUs only"
        )
        return [
            Row("gpu", "optional", "none", f"{reason}; the embedded model needs no GPU, larger models do")
        ]
    rows = []
    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        memory = device.total_memory / 1e9
        advice = "" if memory >= LARGE_MODEL_GB else LARGE_MODEL
        rows.append(Row(f"gpu {i}", "ok", f"{device.name}, {memory:.0f} GB", advice))
    return rows


def _processes() -> Row:
    import torch

    return Row("cpu", "ok", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads")


def _memory() -> Row:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return Row(
        "memory", "ok", f"{total:.0f} GB", "" if total >= 4 else "the embedded model's demo needs 4 GB"
    )


def _disk(out: Path) -> Row:
    folder = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(folder).free / 1e9
    is_writable = os.access(folder, os.W_OK)
    return Row(
        f"disk for {out}",
        "ok" if is_writable else "missing",
        f"{free:.0f} GB free",
        "" if is_writable else "not writable",
    )


def _embedded_model() -> Row:
    if (assets() / FOLDER / "model_index.json").is_file():
        return Row("embedded model", "ok", "tiny")
    return Row(
        "embedded model",
        "missing",
        "not in this installation",
        "pip install --force-reinstall .",
    )
