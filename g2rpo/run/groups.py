"""RUN/groups.jsonl: one line per iteration and group; its fields are those of `objectives.group_records`.

Lines are appended before the iteration's line of metrics, so a killed run has at most lines too many, which
are removed when it is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from g2rpo.run.metrics import cut_records, read_metrics
from g2rpo.runtime.files import append_bytes

GROUPS_FILE = "groups.jsonl"


def append_groups(out: Path, records: Sequence[dict[str, Any]]) -> None:
    """Appends the records of one iteration; called by the first process only."""
    lines = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    append_bytes(out / GROUPS_FILE, lines.encode("utf-8"))


def truncate_groups(out: Path, step: int) -> None:
    """Removes the records after iteration `step`, and damaged lines, because no number depends on them."""
    cut_records(out / GROUPS_FILE, step)


def read_groups(out: Path) -> list[dict[str, Any]]:
    """The records of a run folder; empty if the run was made before they were recorded.

    Raises:
        ValueError: an invalid line; the message gives file and line number.
    """
    path = out / GROUPS_FILE
    return read_metrics(path) if path.is_file() else []
