"""The metrics of a run: metrics.jsonl and TensorBoard event files.

metrics.jsonl has one JSON object per line with at least `step`. When a run is resumed, the lines after its
checkpoint are removed; all other bytes stay as they are. A line is written completely or not at all, also
when the disk is full; the lines before a checkpoint are on the disk when the checkpoint is.
"""

import json
import logging
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from g2rpo.runtime.files import append_line, disk_errors, disk_full, write_atomic
from g2rpo.runtime.processes import rank

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LOG = logging.getLogger(__name__)


class MetricsWriter:
    """Appends to OUT/metrics.jsonl and, on request, to TensorBoard events; on the first process only."""

    def __init__(self, out: str | Path, *, resumed_step: int | None = None, tensorboard: bool = True) -> None:
        """Opens the files.

        Args:
            out: run folder; created if it does not exist.
            resumed_step: iteration of the checkpoint that is resumed; later lines are removed. None starts a
                new run, whose file must not contain lines yet.
            tensorboard: write event files too.

        Raises:
            ValueError: a new run where the file has lines of an earlier one, or an invalid line in the file.
        """
        self._out = Path(out)
        self._writes = False
        self._events: SummaryWriter | None = None
        self.path = self._out / "metrics.jsonl"
        if rank():
            return
        self._out.mkdir(parents=True, exist_ok=True)
        if resumed_step is not None:
            truncate_metrics(self.path, resumed_step)
        elif self.path.exists() and self.path.stat().st_size:
            raise ValueError(f"{self.path} contains an earlier run; resume it, or give another out=FOLDER")
        with disk_errors(self.path):
            self.path.touch()
        self._writes = True
        if tensorboard:
            from torch.utils import tensorboard as events

            purge = None if resumed_step is None else resumed_step + 1
            _keep_full_disk_quiet()
            with disk_errors(self._out / EVENTS):
                self._events = events.SummaryWriter(str(self._out), purge_step=purge)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Writes one line, and its numbers to TensorBoard. NaN and infinity, which JSON lacks, become null.

        Raises:
            DiskFull: there is no space; the line is not in the file, or only the events are incomplete.
            ValueError: `step` is missing.
        """
        if "step" not in metrics:
            raise ValueError(f"a line of metrics needs `step`, got only {', '.join(metrics)}")
        line = {name: _finite(value) for name, value in metrics.items()}
        if self._writes:
            append_line(self.path, json.dumps(line, ensure_ascii=False, allow_nan=False))
        if self._events is not None:
            with disk_errors(self._out / EVENTS):
                for name, value in metrics.items():
                    if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                        self._events.add_scalar(name, value, global_step=metrics["step"])

    def images(self, name: str, step: int, image: Any) -> None:
        """Adds an image to TensorBoard only: tensor [3, H, W] in [0, 1]."""
        if self._events is not None:
            with disk_errors(self._out / EVENTS):
                self._events.add_image(name, image, global_step=step)

    def close(self) -> None:
        """Flushes and closes the files.

        Raises:
            DiskFull: there is no space for the events.
        """
        self._writes = False
        events, self._events = self._events, None
        if events is not None:
            with disk_errors(self._out / EVENTS):
                events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except ValueError:
            if kind is None:  # else the error that ends the run says more
                raise


EVENTS = "events.out.tfevents.*"


def _keep_full_disk_quiet() -> None:
    """Omits the traceback of TensorBoard's thread on a full disk: the next call raises the same error."""
    before = threading.excepthook

    def hook(error: threading.ExceptHookArgs) -> None:
        is_full = error.exc_value is not None and disk_full(Path(EVENTS), error.exc_value) is not None
        if not (is_full and "_AsyncWriter" in type(error.thread).__name__):
            before(error)

    threading.excepthook = hook


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, without an incomplete last line of a killed run.

    Raises:
        ValueError: an invalid line elsewhere; the message gives file and line number.
    """
    return [line for line, _ in _read_lines(Path(path))]


def _read_lines(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    raw = path.read_bytes().split(b"\n")
    lines = []
    # After the last line break comes nothing, or a line that was incomplete when the run was killed.
    for number, text in enumerate(raw[:-1], start=1):
        if not text.strip():
            continue  # an editor may add an empty line
        try:
            line = json.loads(text)
            if not isinstance(line["step"], int):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number}: not a line of metrics: {text[:80]!r}; remove the line, or put the "
                "file back from a copy"
            ) from error
        lines.append((line, text + b"\n"))
    return lines


def truncate_metrics(path: str | Path, step: int) -> None:
    """Removes the lines after iteration `step` and an incomplete last line; does nothing without a file."""
    path = Path(path)
    if not path.exists():
        return
    kept = b"".join(raw for line, raw in _read_lines(path) if line["step"] <= step)
    if kept != path.read_bytes():
        write_atomic(path, kept)


def cut_records(path: Path, step: int) -> None:
    """Removes the lines after iteration `step` of a record on which no number of the run depends.

    Unlike those of metrics.jsonl, damaged lines do not keep a run from going on: they are removed as well,
    and a warning in the log counts them.
    """
    if not path.is_file():
        return
    content = path.read_bytes()
    kept, damaged = [], 0
    for line in content.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            continue  # incomplete, because the run was killed
        try:
            of_step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError, RecursionError):
            of_step = None
        if not isinstance(of_step, int):
            damaged += 1
        elif of_step <= step:
            kept.append(line)
    if damaged:
        LOG.warning("%s: %d damaged lines were removed", path, damaged)
    if (rest := b"".join(kept)) != content:
        write_atomic(path, rest)
