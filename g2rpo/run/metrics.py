"""The metrics of a run: metrics.jsonl.

metrics.jsonl has one JSON object per line with at least `step`. When a run is resumed, the lines after its
checkpoint are removed; all other bytes stay as they are. A line is written completely or not at all, also
when the disk is full; the lines before a checkpoint are on the disk when the checkpoint is.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from g2rpo.runtime.files import append_line, disk_errors, write_atomic
from g2rpo.runtime.processes import rank

LOG = logging.getLogger(__name__)


class MetricsWriter:
    """Appends to OUT/metrics.jsonl and passes metrics and images to `sinks`; on the first process only."""

    def __init__(
        self, out: str | Path, *, resumed_step: int | None = None, sinks: Sequence[MetricsSink] = ()
    ) -> None:
        """Opens the file.

        Args:
            out: run folder; created if it does not exist.
            resumed_step: iteration of the checkpoint that is resumed; later lines are removed. None starts a
                new run, whose file must not contain lines yet.
            sinks: get every line and all images as well.

        Raises:
            ValueError: a new run where the file has lines of an earlier one, or an invalid line in the file.
        """
        self._out, self._sinks, self._writes = Path(out), list(sinks), False
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

    def add_sink(self, sink: MetricsSink) -> None:
        """Passes lines and images to one more sink from now on."""
        self._sinks.append(sink)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Writes one line. NaN and infinity, which JSON lacks, become null.

        Raises:
            DiskFull: there is no space; the line is not in the file, or only a sink lacks it.
            ValueError: `step` is missing.
        """
        if "step" not in metrics:
            raise ValueError(f"a line of metrics needs `step`, got only {', '.join(metrics)}")
        line = {name: _finite(value) for name, value in metrics.items()}
        if self._writes:
            append_line(self.path, json.dumps(line, ensure_ascii=False, allow_nan=False))
        for sink in self._sinks:
            sink.log(metrics)

    def images(self, name: str, step: int, images: Any) -> None:
        """Passes images to the sinks: tensor [N, 3, H, W] in [0, 1]."""
        for sink in self._sinks:
            sink.images(name, step, images)

    def close(self) -> None:
        """Ends the sinks.

        Raises:
            DiskFull: there is no space for what a sink still has to write.
        """
        self._writes = False
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.finish()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except ValueError:
            if kind is None:  # else the error that ends the run says more
                raise


class MetricsSink(Protocol):
    """What gets the metrics besides the file: the loggers of a run (run/loggers.py)."""

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Takes one line of metrics."""

    def images(self, title: str, step: int, images: Any) -> None:
        """Takes images, [N, 3, H, W] in [0, 1]."""

    def finish(self) -> None:
        """Nothing more will come."""


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
                f"{path}, line {number}: not a line of metrics: {text[:80]!r}; remove the line, or restore "
                "the file from a copy"
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
