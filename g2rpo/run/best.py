"""The best model of a run by one reward: RUN/best names the checkpoint after the highest evaluation.

Training for long can exploit the trained reward while other rewards fall, so the last model need not be the
best. `keep_best` names the reward that selects. A checkpoint is written after each evaluation that is higher
than the best so far and than the untrained model's (if that was evaluated), and stays until a better one is
found. Only evaluations of the same kind are compared: same images, denoising steps and reward. Every command
accepts RUN/best as the name of a model, like RUN itself.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from g2rpo.run.folder import BEST, STEP, damage, read_best, step_name, warn_once, write_pointer
from g2rpo.run.metrics import read_metrics
from g2rpo.runtime.processes import rank
from g2rpo.runtime.records import DamagedFile, read_record


def _evaluations(out: str | Path, reward: str, until: int) -> dict[int, float]:
    """Iteration -> mean of its evaluation by `reward`, of whatever kind, as far as iteration `until`.

    Means are those of metrics.jsonl. Where that file lost lines, they are computed from the records of the
    evaluations: otherwise a model that is worse than the untrained one would become the best.
    """
    lines = read_metrics(Path(out) / "metrics.jsonl")
    means = {line["step"]: value for line in lines if (value := line.get(f"eval/{reward}")) is not None}
    for file in sorted((Path(out) / "evaluations").glob("step_*.json")):
        step = STEP.fullmatch(file.stem)
        if step is None or int(step[1]) > until or int(step[1]) in means:
            continue
        try:
            scores = read_record(file).get("scores", {}).get(reward, [])
        except DamagedFile as error:
            warn_once(
                f"{error}; metrics.jsonl lacks its mean as well, so this evaluation is ignored when the best "
                "checkpoint is chosen"
            )
            continue
        if finite := [score for score in scores if score is not None and math.isfinite(score)]:
            means[int(step[1])] = math.fsum(finite) / len(finite)
    return means


def _kind(out: Path, step: int, reward: str) -> list[Any] | None:
    """How an evaluation was made, from its record: prompts, seeds, steps, and the reward's own options.

    None: the record is damaged. Its mean is in metrics.jsonl, too, and counts as one of the same kind, so
    that a better checkpoint is not given up.
    """
    file = out / "evaluations" / f"{step_name(step)}.json"
    try:
        record = read_record(file) if file.is_file() else {}
    except DamagedFile as error:
        warn_once(f"{error}; its mean is taken from metrics.jsonl, assuming the same prompts and seeds")
        return None
    images = [record.get(name) for name in ("prompts", "seeds", "num_steps")]
    return [*images, *(record.get(name, {}).get(reward) for name in ("judges", "options"))]


def is_best(out: str | Path, reward: str, iteration: int) -> bool:
    """Whether the newest evaluation is higher than the untrained model's and than that of RUN/best.

    Args:
        out: run folder.
        reward: name of the reward, as in eval/<reward>.
        iteration: the iteration after which the evaluation was made.
    """
    values = _evaluations(out, reward, iteration)
    if iteration == 0 or iteration not in values:
        return False
    kept = STEP.fullmatch(read_best(out)[0])
    rivals = {0, int(kept[1]) if kept else 0} & values.keys() - {iteration}
    kind = _kind(Path(out), iteration, reward)
    return all(values[iteration] > values[r] for r in rivals if _kind(Path(out), r, reward) in (kind, None))


def mark_best(out: str | Path, iteration: int, reward: str) -> None:
    """Makes RUN/best name the existing checkpoint of `iteration`."""
    if rank() == 0:
        write_pointer(Path(out) / BEST, step_name(iteration), reward)


def refresh_best(out: str | Path, reward: str | None, iteration: int) -> str:
    """Updates RUN/best before a run starts or is resumed after `iteration`.

    The selecting reward, its options or the stored checkpoints may have changed since RUN/best was written.
    It is set to the best checkpoint that exists, or removed. Without a reward RUN/best stays as it is, unless
    the run starts at iteration 0.

    Returns:
        A note for the user if the checkpoint of a better evaluation no longer exists, else "".
    """
    if rank() != 0 or (reward is None and iteration > 0):
        return ""
    pointer = Path(out) / BEST
    values = _evaluations(out, reward, iteration) if reward is not None and iteration > 0 else {}
    kinds = {step: _kind(Path(out), step, str(reward)) for step in values}
    newest = next((kind for _, kind in sorted(kinds.items(), reverse=True) if kind is not None), None)
    values = {step: value for step, value in values.items() if kinds[step] in (newest, None)}
    untrained = values.pop(0, -math.inf)
    better = sorted((step for step, value in values.items() if value > untrained), key=lambda s: -values[s])
    intact = [step for step in better if not damage(Path(out) / "checkpoints" / step_name(step))]
    if not intact:
        pointer.unlink(missing_ok=True)
    elif reward is not None:
        write_pointer(pointer, step_name(intact[0]), reward)
    if better and better[:1] != intact[:1] and better[0] != iteration:
        return f"the best by {reward} was after iteration {better[0]}; that checkpoint no longer exists"
    return ""


def best_checkpoint(out: str | Path) -> Path:
    """The checkpoint that RUN/best names.

    Raises:
        ValueError: RUN/best is missing or names none, or the checkpoint is damaged.
    """
    pointer = Path(out) / BEST
    if not pointer.is_file():
        raise ValueError(
            f"{pointer} does not exist: either the run keeps no best checkpoint (set keep_best=REWARD "
            "eval_every=N), or no evaluation with a checkpoint was above the untrained model's. "
            f"Use {out} for the newest checkpoint"
        )
    name, _ = read_best(out)
    path = Path(out) / "checkpoints" / name
    if problem := f"{name}: {damage(path)}" if name and damage(path) else "" if name else "it names none":
        raise ValueError(
            f"{pointer} does not lead to a checkpoint: {problem}. Use {out} for the newest checkpoint"
        )
    return path


def kept_best(out: str | Path) -> tuple[str, str]:
    """Names of the checkpoint that RUN/best opens and of its reward; ("", "") if it opens none."""
    name, reward = read_best(out)
    return (name, reward) if name and not damage(Path(out) / "checkpoints" / name) else ("", "")
