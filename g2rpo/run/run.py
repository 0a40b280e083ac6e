"""The state of a run as its user sees it: resumable, finished, or stopped, and its one-line description."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from g2rpo.algorithms.base import Algorithm, coarse_tails_warning
from g2rpo.config.identity import check_same_run
from g2rpo.config.load import read_settings
from g2rpo.config.settings import Settings
from g2rpo.models.policy import Policy
from g2rpo.run.folder import BEST, LATEST, latest_checkpoint, read_state, warn_once
from g2rpo.run.metrics import read_metrics
from g2rpo.runtime.files import write_atomic
from g2rpo.runtime.processes import world_size


def checkpoint_to_resume(settings: Settings) -> Path | None:
    """The newest checkpoint of the run folder if these settings resume it, or None for a new run.

    Called before any model is loaded.

    Raises:
        ValueError: the folder contains a run with other settings or with more iterations, the folder does
            not agree with `resume`, or `check_metrics` finds that checkpoints are lost.
    """
    out = Path(settings.out).expanduser()
    for name in (LATEST, *([BEST] if settings.keep_best is not None else [])):
        if (out / name).is_dir():
            raise ValueError(
                f"{out / name} is a folder, and the run needs that name for a file: move the folder"
            )
    begun = (out / "config.toml").is_file()
    if begun and not (out / "config.toml").read_bytes().strip():
        raise ValueError(
            f"{out / 'config.toml'} is damaged: it is empty, but must contain all settings. Restore it from "
            "a copy, or write the settings with which the run began into it"
        )
    checkpoint = latest_checkpoint(out)
    check_metrics(out, checkpoint)
    if settings.resume == "never" and (begun or checkpoint is not None):
        raise ValueError(f"{out} contains a run, but resume='never'; give another out=FOLDER")
    if settings.resume == "latest" and checkpoint is None:
        raise ValueError(f"resume='latest', but {out} contains no checkpoint; omit resume to start a new run")
    if begun or checkpoint is not None:
        check_same_run(read_settings(out), settings)
    if checkpoint is not None and (done := read_state(checkpoint)["iteration"]) > settings.iterations:
        raise ValueError(
            f"iterations={settings.iterations}, but the run in {out} has done {done}; give at least {done}"
        )
    return checkpoint


def check_metrics(out: Path, checkpoint: Path | None) -> None:
    """Compares a run's metrics.jsonl with its newest checkpoint, before a model is loaded.

    Lines that the file lacks cannot be restored; a warning says which.

    Raises:
        ValueError: an invalid line, or the file shows that the run had checkpoints and there is none.
    """
    file = out / "metrics.jsonl"
    lines = read_metrics(file) if file.is_file() else []
    if checkpoint is not None:
        done = read_state(checkpoint)["iteration"]
        steps = {line["step"] for line in lines if "loss" in line or "seconds" in line}
        if missing := [step for step in range(1, done + 1) if step not in steps]:
            first = f"{missing[0]} to {missing[-1]}" if len(missing) > 1 else f"{missing[0]}"
            warn_once(
                f"{file} is shorter than the checkpoint after iteration {done}: it lacks {len(missing)} of "
                f"its lines (iterations {first}). The run continues from the checkpoint with the same "
                "numbers; those lines will be missing in plots and reports, unless you restore them from a "
                "copy"
            )
        return
    evidence = next((f"line {n}" for n, line in enumerate(lines, 1) if "seconds_checkpoint" in line), None)
    if evidence is not None or (out / FINISHED).is_file():
        raise ValueError(
            f"{out} had checkpoints ({file if evidence else out / FINISHED} says "
            f"so{f', {evidence}' if evidence else ''}), but there is none in {out / 'checkpoints'}: the run "
            "would start again at iteration 0. Restore the folder checkpoints and the file latest from a "
            "copy, or start a new run in another out=FOLDER. Nothing was changed"
        )


def restart_note(out: Path) -> str:
    """A note for a run that starts at iteration 0 in a folder that already has metrics; "" otherwise."""
    file = out / "metrics.jsonl"
    done = max((line["step"] for line in read_metrics(file)), default=0) if file.is_file() else 0
    if done == 0:
        return ""
    return (
        f"{out} has metrics of {done} iterations but no checkpoint: the run starts again at iteration 0, and "
        "its new metrics replace the old ones"
    )


FINISHED = "finished"
"""File in a run folder with the number of iterations after which the run was complete."""


def mark_finished(out: Path, iterations: int) -> None:
    """Records that all iterations, and the images and scores that follow the last one, are complete."""
    write_atomic(out / FINISHED, f"{iterations}\n")


def finished_after(out: Path) -> str:
    """Returns the number of iterations after which a run was complete, as text; "" if it never was."""
    path = out / FINISHED
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""


def is_finished(settings: Settings) -> bool:
    """Whether the run of these settings is complete, including the images and scores after its end."""
    return finished_after(Path(settings.out).expanduser()) == str(settings.iterations)


def describe_run(
    settings: Settings,
    algorithm: Algorithm,
    policy: Policy,
    parameters: Mapping[str, Tensor],
    step: int,
) -> str:
    """One line about what is trained, forwards per iteration and device; a second line if there is a warning.

    Args:
        parameters: name -> trained parameter.
        step: iterations already completed.
    """
    count = sum(p.numel() for p in parameters.values())
    plan = algorithm.plan(settings.seed, step)
    nfe = plan.nfe(settings.group_size, policy.forwards_per_sample)["total"]
    what = f"adapters of rank {settings.lora_rank}" if settings.lora_rank else "all weights"
    processes = f" on {world_size()} processes" if world_size() > 1 else ""
    weights = f" with {settings.weights}" if settings.weights else ""
    resumed = f"from iteration {step} on, " if step else ""
    warning = f"\nwarning: {text}" if (text := coarse_tails_warning(plan)) else ""
    return (
        f"{settings.algorithm} on {settings.model}{weights}: {what} ({count / 1e6:.1f} M){processes}, "
        f"{settings.prompts_per_iteration} prompts x {nfe} forwards per iteration, {resumed}"
        f"{policy.device}, {settings.precision}; folder {Path(settings.out).expanduser()}{warning}"
    )


class RunStopped(ValueError):
    """The run cannot continue; the message says which checkpoint remains and what to do."""
