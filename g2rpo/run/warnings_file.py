"""RUN/warnings.jsonl: what a run warned about, one JSON object per line.

    {"step": 40, "kind": "reward_hacking", "message": "...", ...}

Every line has the iteration, the kind (a short name that programs can compare) and the text that the console
showed; more keys depend on the kind. When a run is resumed, the lines after its checkpoint are removed, as in
metrics.jsonl, because the resumed run writes them again.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from g2rpo.run.metrics import cut_records, read_metrics
from g2rpo.runtime.files import append_line
from g2rpo.runtime.processes import rank

WARNINGS = "warnings.jsonl"


def append_warning(out: str | Path, step: int, kind: str, message: str, **details: Any) -> None:
    """Appends one line to RUN/warnings.jsonl; only the first process writes.

    Args:
        out: the run folder.
        step: number of finished iterations.
        kind: short name of what was found.
        message: the text that the console shows.
        details: further plain JSON values; NaN and infinity, which JSON lacks, become null.
    """
    if rank():
        return
    line = {"step": step, "kind": kind, "message": message, **{n: _plain(v) for n, v in details.items()}}
    append_line(Path(out) / WARNINGS, json.dumps(line, ensure_ascii=False, allow_nan=False))


def read_warnings(out: str | Path) -> list[dict[str, Any]]:
    """The lines of RUN/warnings.jsonl, without an incomplete last one; empty if the run warned of nothing.

    Raises:
        ValueError: an invalid line elsewhere; the message gives file and line number.
    """
    path = Path(out) / WARNINGS
    return read_metrics(path) if path.is_file() else []


def truncate_warnings(out: str | Path, step: int) -> None:
    """Removes the lines after iteration `step` of a run that is resumed; the first process writes."""
    if rank() == 0:
        cut_records(Path(out) / WARNINGS, step)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
