"""What a training run left behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from g2rpo.evaluation.before_after import Change
from g2rpo.run.folder import latest_checkpoint, read_state
from g2rpo.run.metrics import read_metrics


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


def interrupted_run(out: Path) -> Run:
    """The run that a signal stopped: as far as its newest checkpoint."""
    kept = latest_checkpoint(out)
    return Run(out, read_state(kept)["iteration"] if kept else 0, False, True)
