"""What a run says while it runs: metrics.jsonl, TensorBoard, and a line or a live table on the terminal.

metrics.jsonl has one JSON object a line with at least `step`. It is the record: a resume cuts off the
lines past the checkpoint that it goes on from, and touches no other byte.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

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


class Progress:
    """The run's line on the terminal: step, rewards, forwards per second, time left.

    On a terminal one table is kept up to date in place; elsewhere (a log file, a pipe) each step is a line.
    """

    def __init__(self, iterations: int, done: int = 0, *, console: Console | None = None) -> None:
        """`iterations` of the whole run, of which `done` are behind."""
        self._iterations = iterations
        self._console = console or Console(quiet=rank() > 0)
        self._started = time.monotonic()
        self._done_before = done
        self._nfe = 0
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=False)
            self._live.start()

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of one iteration: `step` (counted from 1), `nfe`, `reward/...`."""
        if not self._nfe and "seconds" in metrics:  # what comes before the first iteration comes once
            self._started = time.monotonic() - metrics["seconds"]
        self._nfe += metrics.get("nfe", 0)
        cells = self._cells(metrics)
        if self._live is None:
            self._console.print("  ".join(f"{name} {value}" for name, value in cells.items()), soft_wrap=True)
            return
        table = Table(*cells, box=None, pad_edge=False)
        table.add_row(*cells.values())
        self._live.update(table)

    def note(self, text: str) -> None:
        """A line that stays, above the live table."""
        self._console.print(text, soft_wrap=True, markup=False, emoji=False, highlight=False)

    def close(self) -> None:
        """Leaves the last state standing."""
        if self._live is not None:
            self._live.stop()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cells(self, metrics: Mapping[str, Any]) -> dict[str, str]:
        seconds = max(time.monotonic() - self._started, 1e-9)
        done = metrics["step"] - self._done_before
        left = seconds / max(done, 1) * (self._iterations - metrics["step"])
        cells = {"step": f"{metrics['step']}/{self._iterations}"}
        for name, value in metrics.items():
            if name.startswith(("reward/", "eval/")):
                cells[name.removeprefix("reward/")] = f"{value:.4f}"
        return cells | {"NFE/s": f"{self._nfe / seconds:.0f}", "left": format_seconds(left)}


def format_seconds(seconds: float) -> str:
    """`45 s`, `3 min 05 s`, `2 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
