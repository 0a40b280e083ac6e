"""Tracking services through accelerate's tracker classes, and TensorBoard through its own writer.

    wandb, trackio, swanlab, mlflow    project `g2rpo`, or the service's own environment variable
    tensorboard                        event files in the run folder

Each class here has the methods of `Logger`. They raise what the services raise: `run/loggers.py` decides what
follows. Resuming a run continues the service's run, whose identifier is kept in RUN/loggers.json.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from g2rpo.runtime.files import disk_errors

if TYPE_CHECKING:
    from torch import Tensor

PROJECT = "g2rpo"
PROJECT_VARIABLES = {
    "wandb": "WANDB_PROJECT",
    "trackio": "TRACKIO_PROJECT",
    "swanlab": "SWANLAB_PROJ_NAME",
    "mlflow": "MLFLOW_EXPERIMENT_NAME",
}
"""Logger -> environment variable with which a user names another project (experiment)."""

EVENTS = "events.out.tfevents.*"


class Logger(Protocol):
    """A service that gets the metrics and images of a run."""

    identity: dict[str, str]
    """What a later start needs to continue the service's run."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Logs numbers of an iteration."""

    def images(self, name: str, step: int, images: Tensor) -> None:
        """Logs images, [N, 3, H, W] in [0, 1], on the CPU."""

    def finish(self) -> None:
        """Ends the service's run for this start."""


class TensorBoard:
    """Event files in the run folder, written as they come: a killed run loses at most two minutes."""

    def __init__(self, out: Path, resumed_step: int | None) -> None:
        """Opens the files.

        Args:
            out: run folder.
            resumed_step: iteration that is resumed; viewers then hide later events. None: a new run.
        """
        from torch.utils import tensorboard as events

        self.identity: dict[str, str] = {}
        self._out = out
        purge = None if resumed_step is None else resumed_step + 1
        with disk_errors(out / EVENTS):
            self._writer = events.SummaryWriter(str(out), purge_step=purge)

    def log(self, values: Mapping[str, float], step: int) -> None:
        with disk_errors(self._out / EVENTS):
            for name, value in values.items():
                self._writer.add_scalar(name, value, global_step=step)

    def images(self, name: str, step: int, images: Tensor) -> None:
        import torch

        with disk_errors(self._out / EVENTS):
            self._writer.add_image(name, torch.cat(list(images), dim=2), global_step=step)

    def finish(self) -> None:
        with disk_errors(self._out / EVENTS):
            self._writer.close()


class Tracker:
    """One of accelerate's trackers."""

    def __init__(
        self, name: str, out: Path, settings: Mapping[str, Any], identity: Mapping[str, str], on_cpu: bool
    ) -> None:
        """Starts the service's run.

        Args:
            name: "wandb", "trackio", "swanlab" or "mlflow".
            out: run folder, whose name is that of the service's run.
            settings: flat settings that the service shows.
            identity: of the service's run that is continued; empty: a new one.
            on_cpu: the run computes on a CPU, and accelerate must not touch a GPU.
        """
        _prepare_accelerate(on_cpu)
        project = os.environ.get(PROJECT_VARIABLES[name], "").strip() or PROJECT
        self._name = name
        self._tracker, self.identity = _OPEN[name](project, out, dict(settings), dict(identity))
        if name == "mlflow" and identity:
            return  # mlflow refuses another value of a parameter, such as of more iterations
        if name != "trackio":  # it takes them at the start
            self._tracker.store_init_configuration(dict(settings))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._tracker.log(dict(values), step=step)

    def images(self, name: str, step: int, images: Tensor) -> None:
        from PIL import Image

        pixels = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
        pictures = [Image.fromarray(picture) for picture in pixels]
        if hasattr(self._tracker, "log_images"):
            self._tracker.log_images({name: pictures}, step=step)
        elif self._name == "trackio":
            import trackio

            # A list of images is no value for trackio.
            named = {f"{name}/{i}": trackio.Image(picture) for i, picture in enumerate(pictures)}
            self._tracker.tracker.log(named, step=step)
        else:
            import mlflow

            for i, picture in enumerate(pictures):
                mlflow.log_image(picture, key=f"{name}_{i}", step=step)

    def finish(self) -> None:
        self._tracker.finish()


def _prepare_accelerate(on_cpu: bool) -> None:
    """Creates accelerate's state, without which its trackers raise; the process group exists already."""
    from accelerate.state import PartialState

    # For cards whose peer-to-peer copies NCCL must not use; the state is complete before.
    with suppress(NotImplementedError):
        PartialState(cpu=on_cpu)


Opened = tuple[Any, dict[str, str]]


def _open_wandb(project: str, out: Path, settings: dict[str, Any], identity: dict[str, str]) -> Opened:
    from accelerate.tracking import WandBTracker

    tracker = WandBTracker(project, name=out.name, dir=str(out), resume="allow", **identity)
    tracker.start()
    return tracker, {"id": str(tracker.run.id)}


def _open_trackio(project: str, out: Path, settings: dict[str, Any], identity: dict[str, str]) -> Opened:
    from accelerate.tracking import TrackioTracker

    # Trackio finds a run by its name, which folders of several runs may share.
    name = identity.get("name") or f"{out.name}-{secrets.token_hex(3)}"
    resume = "allow" if identity else "never"
    tracker = TrackioTracker(project, name=name, resume=resume, config=settings, embed=False)
    tracker.start()
    return tracker, {"name": name}


def _open_swanlab(project: str, out: Path, settings: dict[str, Any], identity: dict[str, str]) -> Opened:
    from accelerate.tracking import SwanLabTracker

    more: dict[str, Any] = {"resume": "allow", **identity} if identity else {}
    tracker = SwanLabTracker(project, name=out.name, log_dir=str(out / "swanlog"), **more)
    tracker.start()
    return tracker, {"id": str(tracker.run.id)}


def _open_mlflow(project: str, out: Path, settings: dict[str, Any], identity: dict[str, str]) -> Opened:
    from accelerate.tracking import MLflowTracker

    tracker = MLflowTracker(project, run_name=out.name, **identity)
    tracker.start()
    return tracker, {"run_id": str(tracker.tracker.info.run_id)}


_OPEN: dict[str, Callable[[str, Path, dict[str, Any], dict[str, str]], Opened]] = {
    "wandb": _open_wandb,
    "trackio": _open_trackio,
    "swanlab": _open_swanlab,
    "mlflow": _open_mlflow,
}


def open_logger(
    name: str,
    out: Path,
    settings: Mapping[str, Any],
    identity: Mapping[str, str],
    resumed_step: int | None,
    on_cpu: bool,
) -> Logger:
    """Starts the logger of this name; arguments are those of the two classes."""
    if name == "tensorboard":
        return TensorBoard(out, resumed_step)
    return Tracker(name, out, settings, identity, on_cpu)
