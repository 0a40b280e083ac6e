"""The loggers of a run (setting `loggers`): they get every line of metrics and all images.

Only the first process has loggers. A logger is foreign code that talks to a service. When it raises, at its
import, its start, a call or its end, one warning names it, RUN/warnings.jsonl records the warning, and the
logger is left out until the next start of the run. Its calls leave the random generators and the settings of
the process as they were, so the numbers of a run do not depend on its loggers. Settings that it shows hold no
secrets.

A full disk is not a failure of a logger: for event files in the run folder it ends the run, as for any other
of its files.
"""

from __future__ import annotations

import json
import logging
import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from g2rpo.config.settings import Settings
from g2rpo.rewards.isolation import restored_state
from g2rpo.run.trackers import EVENTS, Logger, open_logger
from g2rpo.run.warnings_file import append_warning
from g2rpo.runtime.files import DiskFull, disk_full, write_atomic
from g2rpo.runtime.processes import rank
from g2rpo.runtime.progress import note, phase
from g2rpo.runtime.secrets import masked, without_secrets

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
LOG = logging.getLogger(__name__)

IDENTITIES = "loggers.json"
"""File in a run folder: name of a logger -> what continues the run of its service."""

QUIET_ON_FULL_DISK = "quiet_on_full_disk"
"""Attribute by which the hook of `_keep_full_disk_quiet` is recognised."""


class Loggers:
    """The loggers of a run that work; none on other processes than the first.

    Attributes:
        active: name -> logger.
    """

    def __init__(
        self,
        names: Sequence[str] = (),
        out: str | Path = ".",
        settings: Mapping[str, Any] | None = None,
        *,
        resumed_step: int | None = None,
        on_cpu: bool = True,
        say: Callable[[str], None] = note,
    ) -> None:
        """Starts the loggers.

        Args:
            names: those of the setting `loggers`.
            out: run folder.
            settings: flat settings without secrets (`flat_settings`).
            resumed_step: iteration of the checkpoint that is resumed; None: a new run, for which services
                begin a new run, too.
            on_cpu: the run computes on a CPU.
            say: prints a warning.

        Raises:
            DiskFull: there is no space for event files.
        """
        self._out, self._say, self._step = Path(out), say, max(resumed_step or 0, 0)
        self.active: dict[str, Logger] = {}
        if rank():
            return
        _keep_full_disk_quiet()
        known = _identities(self._out) if self._step else {}
        for name in names:
            with phase(f"starting the logger {name}"):
                identity = known.get(name, {})
                start = partial(open_logger, name, self._out, settings or {}, identity, resumed_step, on_cpu)
                logger = self._guarded(name, "at its start", start)
            if logger is not None:
                self.active[name] = logger
        identities = {name: logger.identity for name, logger in self.active.items() if logger.identity}
        if identities:
            write_atomic(self._out / IDENTITIES, json.dumps({**known, **identities}, indent=1) + "\n")

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Logs the numbers of one line of metrics at its `step`.

        TensorBoard gets NaN and infinity as well; services, of which some refuse them, do not.
        """
        self._step = metrics["step"]
        numbers = {
            name: value
            for name, value in metrics.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        for name in list(self.active):
            values = numbers if name == "tensorboard" else finite
            if values:
                self._call(name, self.active[name].log, values, self._step)

    def images(self, title: str, step: int, images: Tensor) -> None:
        """Logs images, [N, 3, H, W] in [0, 1]."""
        for name in list(self.active):
            self._call(name, self.active[name].images, title, step, images.cpu())

    def finish(self) -> None:
        """Ends the services' runs.

        Raises:
            DiskFull: there is no space for the rest of the event files.
        """
        while self.active:
            name, logger = self.active.popitem()
            with phase(f"ending the logger {name}"):
                self._guarded(name, "at its end", logger.finish)

    def _call(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        self._guarded(name, f"after iteration {self._step}", partial(call, *arguments))

    def _guarded(self, name: str, when: str, call: Callable[[], T]) -> T | None:
        """Returns the result of a call; a logger that fails is left out with a warning, and gives None."""
        try:
            with restored_state():
                random.seed()  # services draw names and identifiers, which must differ from run to run
                np.random.seed()
                return call()
        except DiskFull:
            raise
        except (Exception, SystemExit) as error:
            self.active.pop(name, None)
            reason = " ".join(str(error).split())[:300]
            message = masked(
                f"the logger {name} failed {when} ({type(error).__name__}{': ' if reason else ''}{reason}); "
                "the run continues without it. The next start of the run tries it again"
            )
            LOG.debug("%s", message, exc_info=True)
            self._say(f"warning: {message}")
            append_warning(self._out, self._step, "logger", message, logger=name)
            return None


def flat_settings(settings: Settings) -> dict[str, Any]:
    """Returns the settings as one level of names and plain values, such as `rewards.hps`, without secrets."""
    values = settings.resolved().model_dump()
    values["reward_options"] = without_secrets(values["reward_options"])
    flat: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, entry in value.items():
                add(f"{name}.{key}", entry)
        elif isinstance(value, list | tuple):
            flat[name] = masked(json.dumps(value, ensure_ascii=False, default=str))
        elif value is None or isinstance(value, bool | int | float):
            flat[name] = value
        else:
            flat[name] = masked(str(value))

    for name, value in values.items():
        add(name, value)
    return flat


def _identities(out: Path) -> dict[str, dict[str, str]]:
    """What RUN/loggers.json holds; nothing if it is missing or damaged: services then begin new runs."""
    try:
        stored = json.loads((out / IDENTITIES).read_text(encoding="utf-8"))
        return {
            str(name): {str(key): str(value) for key, value in identity.items()}
            for name, identity in stored.items()
        }
    except (OSError, ValueError, AttributeError):
        return {}


def _keep_full_disk_quiet() -> None:
    """Omits the traceback of TensorBoard's thread on a full disk: the next call raises the same error.

    Later calls change nothing, so that the runs of one process do not wrap the hook again and again.
    """
    before = threading.excepthook
    if getattr(before, QUIET_ON_FULL_DISK, False):
        return

    def hook(error: threading.ExceptHookArgs) -> None:
        is_full = error.exc_value is not None and disk_full(Path(EVENTS), error.exc_value) is not None
        if not (is_full and "_AsyncWriter" in type(error.thread).__name__):
            before(error)

    setattr(hook, QUIET_ON_FULL_DISK, True)
    threading.excepthook = hook
