"""What a run is to whoever started it: its folder, how far it got, and why it stopped."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from g2rpo.before_after import Change
from g2rpo.metrics import read_metrics


class RunStopped(ValueError):
    """The run cannot go on; the message says which checkpoint remains and what to do."""


@dataclass(frozen=True)
class Run:
    """What a run left behind.

    Attributes:
        out: run folder. step: iterations done. finished: all of them. interrupted: stopped by a signal.
        changes: the comparison of before and after, once finished (compare_images > 0).
    """

    out: Path
    step: int
    finished: bool
    interrupted: bool
    changes: list[Change] = field(default_factory=list)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return read_metrics(self.out / "metrics.jsonl")
