"""The result of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from g2rpo.evaluation.before_after import Change
from g2rpo.run.folder import latest_checkpoint, read_state
from g2rpo.run.metrics import read_metrics


@dataclass(frozen=True)
class Run:
    """The result of a training run.

    Attributes:
        out: run folder.
        step: iterations completed.
        finished: whether all iterations are completed.
        interrupted: whether a signal stopped the run.
        changes: comparison of images before and after training, if finished and compare_images > 0.
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
    """The result of a run that a signal stopped; its step is that of the newest checkpoint."""
    checkpoint = latest_checkpoint(out)
    return Run(out, read_state(checkpoint)["iteration"] if checkpoint else 0, False, True)
