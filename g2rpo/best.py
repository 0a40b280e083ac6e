"""The best model of a run, by a judge: RUN/best names the checkpoint after the highest evaluation so far.

A run may pass its best: a reward that is trained for long is gamed while other judges fall. `keep_best` names
the judge; a checkpoint is written with each evaluation that beats all before, and stays until one beats it.
Where none is above the untrained model's there is none. RUN/best is a model's name like RUN itself.
"""

from __future__ import annotations

from pathlib import Path

from g2rpo.checkpoint import BEST, damage, point
from g2rpo.distributed import rank
from g2rpo.metrics import read_metrics


def is_best(out: str | Path, reward: str, iteration: int) -> bool:
    """Whether the evaluation after `iteration` iterations is above all before it, the untrained model's too.

    Args:
        out: run folder. reward: its name, as in eval/<reward>; an evaluation without a number is none.
    """
    found = {
        line["step"]: value
        for line in read_metrics(Path(out) / "metrics.jsonl")
        if (value := line.get(f"eval/{reward}")) is not None
    }
    before = [value for step, value in found.items() if step < iteration]
    return iteration > 0 and iteration in found and all(found[iteration] > value for value in before)


def mark_best(out: str | Path, iteration: int) -> None:
    """Lets RUN/best name the checkpoint of `iteration`, which is there already."""
    if rank() == 0:
        point(Path(out) / BEST, f"step_{iteration:06d}")


def best_checkpoint(out: str | Path) -> Path:
    """The checkpoint that RUN/best names.

    Raises:
        ValueError: there is none, or its files are damaged.
    """
    pointer = Path(out) / BEST
    if not pointer.is_file():
        raise ValueError(
            f"{pointer} is not there: the run was not told to keep its best (keep_best=REWARD eval_every=N), "
            f"or no evaluation was above the untrained model's yet. {out} itself opens its newest checkpoint"
        )
    path = Path(out) / "checkpoints" / pointer.read_text(encoding="utf-8").strip()
    if problem := damage(path):
        raise ValueError(f"{pointer} names {path.name}: {problem}; {out} itself opens its newest checkpoint")
    return path
