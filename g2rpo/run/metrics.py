"""What a run says while it runs: metrics.jsonl, TensorBoard, and a line or a live table on the terminal.

metrics.jsonl has one JSON object a line with at least `step`. It is the record: a resume cuts off the
lines past the checkpoint that it goes on from, and touches no other byte.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from g2rpo.runtime.processes import rank

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class MetricsWriter:
    """Appends to OUT/metrics.jsonl and, if wanted, to TensorBoard events in OUT.

    Of several processes, one writes.
    """

    def __init__(self, out: str | Path, *, resumed_step: int | None = None, tensorboard: bool = True) -> None:
        """Opens the files.

        Args:
            out: run folder, made if need be.
            resumed_step: the checkpoint's step: later lines are cut off. None starts a run: the file must not
                hold lines yet.
            tensorboard: write event files too.

        Raises:
            ValueError: lines of an earlier run where a new one starts, or a broken line among them.
        """
        self._out = Path(out)
        self._file: TextIO | None = None
        self._events: SummaryWriter | None = None
        self.path = self._out / "metrics.jsonl"
        if rank():
            return
        self._out.mkdir(parents=True, exist_ok=True)
        if resumed_step is not None:
            truncate_metrics(self.path, resumed_step)
        elif self.path.exists() and self.path.stat().st_size:
            raise ValueError(f"{self.path} holds an earlier run; resume it, or give another out=FOLDER")
        # Line-buffered: what a killed run had measured is in the file.
        self._file = open(self.path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        if tensorboard:
            from torch.utils import tensorboard as events

            purge = None if resumed_step is None else resumed_step + 1
            self._events = events.SummaryWriter(str(self._out), purge_step=purge)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """One line; its numbers go to TensorBoard too. NaN and infinity, which JSON lacks, become null.

        Raises:
            ValueError: no `step`.
        """
        if "step" not in metrics:
            raise ValueError(f"a line of metrics needs its step, got only {', '.join(metrics)}")
        line = {name: _finite(value) for name, value in metrics.items()}
        if self._file is not None:
            self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        if self._events is not None:
            for name, value in metrics.items():
                if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                    self._events.add_scalar(name, value, global_step=metrics["step"])

    def images(self, name: str, step: int, image: Any) -> None:
        """A picture for TensorBoard: tensor [3, H, W] in [0, 1]. The files of a run are written elsewhere."""
        if self._events is not None:
            self._events.add_image(name, image, global_step=step)

    def close(self) -> None:
        """Writes what is buffered and closes the files."""
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that a kill tore is left out.

    Raises:
        ValueError: a broken line elsewhere; the message names file and line.
    """
    return [line for line, _ in _read_lines(Path(path))]


def _read_lines(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    raw = path.read_bytes().split(b"\n")
    lines = []
    # What follows the last line break is empty, or a line that was being written when the run was killed.
    for number, text in enumerate(raw[:-1], start=1):
        try:
            line = json.loads(text)
            if not isinstance(line["step"], int):
                raise TypeError
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a line of metrics: {text[:80]!r}") from error
        lines.append((line, text + b"\n"))
    return lines


def truncate_metrics(path: str | Path, step: int) -> None:
    """Cuts off the lines past `step`, and a torn last line; all other bytes stay. A missing file is fine."""
    path = Path(path)
    if not path.exists():
        return
    kept = b"".join(raw for line, raw in _read_lines(path) if line["step"] <= step)
    if kept == path.read_bytes():
        return
    whole = path.with_name(path.name + ".tmp")
    with open(whole, "wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(whole, path)
