"""The best model of a run, by a judge: RUN/best names the checkpoint after the highest evaluation.

A run may pass its best: a reward that is trained for long is gamed while other judges fall. `keep_best` names
the judge. A checkpoint is written with each evaluation that is above that of the best so far, and above the
untrained model's if that was judged; it stays until another is better. Only evaluations of one kind are
compared: the same pictures, denoising steps and judge. RUN/best is a model's name like RUN itself.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from g2rpo.run.folder import BEST, STEP, damage, read_best, step_name, write_pointer
from g2rpo.run.metrics import read_metrics
from g2rpo.runtime.processes import rank


def _evaluated(out: str | Path, judge: str) -> dict[int, float]:
    """Iteration -> its evaluation by a reward, of whatever kind."""
    lines = read_metrics(Path(out) / "metrics.jsonl")
    return {line["step"]: value for line in lines if (value := line.get(f"eval/{judge}")) is not None}


def _kind(out: Path, step: int, judge: str) -> list[Any]:
    """What the record of an evaluation says of how it was made."""
    file = out / "evaluations" / f"{step_name(step)}.json"
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    drawn = [record.get(name) for name in ("prompts", "seeds", "num_steps")]
    return [*drawn, *(record.get(name, {}).get(judge) for name in ("judges", "options"))]


def is_best(out: str | Path, judge: str, iteration: int) -> bool:
    """Whether the newest evaluation is above the untrained model's and above that of RUN/best.

    Args:
        out: run folder. judge: its name, as in eval/<judge>. iteration: after which it was made.
    """
    values = _evaluated(out, judge)
    if iteration == 0 or iteration not in values:
        return False
    kept = STEP.fullmatch(read_best(out)[0])
    rivals = {0, int(kept[1]) if kept else 0} & values.keys() - {iteration}
    here = _kind(Path(out), iteration, judge)
    return all(values[iteration] > values[r] for r in rivals if _kind(Path(out), r, judge) == here)


def mark_best(out: str | Path, iteration: int, judge: str) -> None:
    """Lets RUN/best name the checkpoint of `iteration`, which is there already."""
    if rank() == 0:
        write_pointer(Path(out) / BEST, step_name(iteration), judge)


def settle_best(out: str | Path, judge: str | None, iteration: int) -> str:
    """Before a run starts or goes on after `iteration`: RUN/best names the best of what is there, or nothing.

    The judge, or how it is asked, may have changed; so may what checkpoints there are. Without a judge
    RUN/best stays as it is, unless the run starts anew.

    Returns:
        What the user should know: a better one was not kept.
    """
    if rank() != 0 or (judge is None and iteration > 0):
        return ""
    pointer = Path(out) / BEST
    values = _evaluated(out, judge) if judge is not None and iteration > 0 else {}
    kinds = {step: _kind(Path(out), step, str(judge)) for step in values}
    values = {step: value for step, value in values.items() if kinds[step] == kinds[max(kinds)]}
    base = values.pop(0, -math.inf)
    better = sorted((step for step, value in values.items() if value > base), key=lambda s: -values[s])
    whole = [step for step in better if not damage(Path(out) / "checkpoints" / step_name(step))]
    if not whole:
        pointer.unlink(missing_ok=True)
    elif judge is not None:
        write_pointer(pointer, step_name(whole[0]), judge)
    if better and better[:1] != whole[:1] and better[0] != iteration:
        return f"the best by {judge} was after iteration {better[0]}; that checkpoint is not there any more"
    return ""


def best_checkpoint(out: str | Path) -> Path:
    """The checkpoint that RUN/best names.

    Raises:
        ValueError: there is none, or its files are damaged.
    """
    pointer = Path(out) / BEST
    if not pointer.is_file():
        raise ValueError(
            f"{pointer} is not there: the run keeps no best (keep_best=REWARD eval_every=N does), or no "
            f"evaluation with a checkpoint was above the untrained model's. {out} opens the newest checkpoint"
        )
    name, _ = read_best(out)
    path = Path(out) / "checkpoints" / name
    if problem := f"{name}: {damage(path)}" if name and damage(path) else "" if name else "it names none":
        raise ValueError(f"{pointer} opens no checkpoint: {problem}. {out} opens the newest one")
    return path


def kept_best(out: str | Path) -> tuple[str, str]:
    """Name of the checkpoint that RUN/best opens, and the judge; two empty ones where it opens none."""
    name, judge = read_best(out)
    return (name, judge) if name and not damage(Path(out) / "checkpoints" / name) else ("", "")
