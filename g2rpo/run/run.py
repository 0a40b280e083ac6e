"""What a run is to whoever started it: its folder, how far it got, and why it stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from g2rpo.algorithms.base import coarse_tails_warning
from g2rpo.algorithms.registry import make_algorithm
from g2rpo.config.identity import check_same_run
from g2rpo.config.load import read_settings
from g2rpo.config.settings import Settings
from g2rpo.models.policy import Policy
from g2rpo.run.folder import BEST, LATEST, latest_checkpoint, read_state
from g2rpo.run.metrics import read_metrics
from g2rpo.runtime.processes import world_size


def checkpoint_to_resume(settings: Settings) -> Path | None:
    """The run folder's newest checkpoint, if these settings go on from it. Before any model is loaded.

    Raises:
        ValueError: a run of other settings, one that is further already, or none where one must be.
    """
    out = Path(settings.out).expanduser()
    for name in (LATEST, *([BEST] if settings.keep_best is not None else [])):
        if (out / name).is_dir():
            raise ValueError(
                f"{out / name} is a folder, and the run needs that name for a file: move it away"
            )
    begun = (out / "config.toml").is_file()
    checkpoint = latest_checkpoint(out)
    if settings.resume == "never" and (begun or checkpoint is not None):
        raise ValueError(f"{out} holds a run and resume='never'; give another out=FOLDER")
    if settings.resume == "latest" and checkpoint is None:
        raise ValueError(f"resume='latest', but {out} holds no checkpoint; drop it to start a run")
    if begun or checkpoint is not None:
        check_same_run(read_settings(out), settings)
    if checkpoint is not None and (done := read_state(checkpoint)["iteration"]) > settings.iterations:
        raise ValueError(
            f"iterations={settings.iterations}, but {out} has done {done}; give at least so many"
        )
    return checkpoint


def started_again(out: Path) -> str:
    """What to say where a run begins at iteration 0 in a folder that already has metrics of iterations."""
    file = out / "metrics.jsonl"
    done = max((line["step"] for line in read_metrics(file)), default=0) if file.is_file() else 0
    if done == 0:
        return ""
    return (
        f"{out} has metrics of {done} iterations but no checkpoint: the run starts again at iteration 0, and "
        "its metrics replace those"
    )


FINISHED = "finished"
"""File in a run folder: the number of iterations after which nothing was left to do."""


def mark_finished(out: Path, iterations: int) -> None:
    """Called once all that follows the last iteration is drawn, scored and written."""
    (out / FINISHED).write_text(f"{iterations}\n", encoding="utf-8")


def is_finished(settings: Settings) -> bool:
    """Whether a run of these settings went to its end, what it draws and scores there included."""
    path = Path(settings.out).expanduser() / FINISHED
    return path.is_file() and path.read_text(encoding="utf-8").strip() == str(settings.iterations)


def described(settings: Settings, policy: Policy, parameters: Mapping[str, Tensor], step: int) -> str:
    """A line on what is trained, how much an iteration takes, and where; another of what warns."""
    algorithm = make_algorithm(settings.algorithm, settings.algorithm_options())
    count = sum(p.numel() for p in parameters.values())
    plan = algorithm.plan.plan(algorithm.num_steps, settings.seed, step)
    nfe = plan.nfe(settings.group_size, policy.forwards_per_sample)["total"]
    what = f"adapters of rank {settings.lora_rank}" if settings.lora_rank else "all weights"
    many = f" on {world_size()} processes" if world_size() > 1 else ""
    own = f" with {settings.weights}" if settings.weights else ""
    where = f"from iteration {step} on, " if step else ""
    warned = f"\n{warning}" if (warning := coarse_tails_warning(plan)) else ""
    return (
        f"{settings.algorithm} on {settings.model}{own}: {what} ({count / 1e6:.1f} M){many}, "
        f"{settings.prompts_per_iteration} prompts x {nfe} forwards an iteration, {where}"
        f"{policy.device}, {settings.precision}; folder {Path(settings.out).expanduser()}{warned}"
    )


class RunStopped(ValueError):
    """The run cannot go on; the message says which checkpoint remains and what to do."""
