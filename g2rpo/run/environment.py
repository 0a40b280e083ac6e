"""RUN/environment.jsonl: one line per start of a run, with the machine and the versions that it had.

The command line is not recorded, because it can contain secrets; config.toml has the settings.
"""

from __future__ import annotations

import json
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from g2rpo.runtime.files import append_line
from g2rpo.runtime.processes import world_size

ENVIRONMENT_FILE = "environment.jsonl"
PACKAGES = ("g2rpo", "torch", "diffusers", "transformers", "peft", "accelerate", "numpy")


def environment(device: torch.device) -> dict[str, Any]:
    """Returns the machine and the versions of packages: plain JSON values.

    Args:
        device: the device of this process.
    """
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "device_type": device.type,
        "device_memory_gb": torch.cuda.get_device_properties(device).total_memory / 1e9 if cuda else None,
        "num_processes": world_size(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda if cuda else None,
        "packages": {name: _version(name) for name in PACKAGES},
    }


def record_start(out: Path, step: int, device: torch.device) -> None:
    """Appends a line about a start of the run; called by the first process only.

    Args:
        step: iterations already completed.
    """
    line = {"step": step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **environment(device)}
    append_line(out / ENVIRONMENT_FILE, json.dumps(line, ensure_ascii=False))


def read_starts(out: Path) -> list[dict[str, Any]]:
    """The recorded starts, oldest first; lines that are damaged are left out, as nothing depends on them."""
    path = out / ENVIRONMENT_FILE
    starts = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            starts.append(line)
    return starts


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
