"""What a case does to a command: kills it, signals it or fills its disk, at one counted moment of its work.

A moment is the n-th call of a Python function of the product within a phase of a run, or the n-th change of
the file system (an audit event of Python). Both are counted in the process itself and do not depend on how
fast the machine is. A kill may be delayed by a number of seconds after its moment, so that it also falls into
the middle of compiled code. The commands are not changed for this: phases are known by the function that
does them, and a phase that is never reached makes its cases fail.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "g2rpo"

# Phase -> file and function that does it. The innermost one counts.
PHASES = {
    "embedding": ("training/embed.py", "embed_missing"),
    "first images": ("evaluation/before_after.py", "draw_before"),
    "rollout": ("rollouts/explore.py", "explore"),
    "scoring": ("rollouts/score.py", "score"),
    "update": ("training/update.py", "update"),
    "checkpoint": ("run/checkpoint.py", "save_checkpoint"),
    "evaluation": ("evaluation/monitor.py", "evaluate_if_due"),
    "last images": ("evaluation/before_after.py", "draw_after"),
    "export": ("exporters/export.py", "export_policy"),
}
# Marks of a trace: functions whose calls and returns are counted and are no phases.
MARKS = {
    "loads a model": ("models/transformer/network.py", "fill"),
    "loads a reward": ("rewards/registry.py", "load_rewards"),
    "restores": ("run/checkpoint.py", "load_checkpoint"),
}
_NAMED = {place: name for name, place in (PHASES | MARKS).items()}
_FILES = (
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.truncate",
    "os.link",
    "shutil.copyfile",
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True)
class Trigger:
    """When something happens to a command, and what.

    Attributes:
        action: "kill", "signal:NAME", "signal twice:NAME" or "disk:BYTES LEFT".
        phase: only moments within this phase count; None: all.
        calls: the n-th call of a function of the product, counted from 1.
        files: the n-th change of a file, counted from 1.
        path: only changes of files whose path matches this expression count.
        function: only calls of this (file, function) count.
        delay: seconds between the moment and a kill.
    """

    action: str
    phase: str | None = None
    calls: int = 0
    files: int = 0
    path: str = ""
    function: tuple[str, str] | None = None
    delay: float = 0.0


@dataclass
class Tracer:
    """Counts the moments of a command in its process, and acts at that of `trigger`.

    `start` installs it for the rest of the process's life; `write` leaves what was seen in a JSON file, which
    also happens just before a kill.
    """

    trigger: Trigger | None
    folder: Path
    file: Path
    disk: Any = None
    calls: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    changes: list[list[str]] = field(default_factory=list)
    saved: int = -1
    updated: int = 0
    fired: str = ""
    _phases: list[tuple[str, float]] = field(default_factory=list)
    _codes: dict[Any, Any] = field(default_factory=dict)
    _moments: int = 0

    def start(self) -> None:
        self._pattern = re.compile(self.trigger.path) if self.trigger and self.trigger.path else None
        self._inside = str(self.folder) + os.sep
        sys.addaudithook(self._audit)
        sys.setprofile(self._profile)

    def write(self) -> None:
        """Stops counting and leaves what was seen."""
        sys.setprofile(None)
        self._leave()

    def _leave(self) -> None:
        state = {
            "calls": self.calls,
            "seconds": self.seconds,
            "counted": self.counted,
            "changes": self.changes,
            "saved": self.saved,
            "updated": self.updated,
            "fired": self.fired,
        }
        self.file.write_text(json.dumps(state))

    @property
    def phase(self) -> str:
        return self._phases[-1][0] if self._phases else "other"

    def _profile(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        known = self._codes.get(code, self)
        if known is self:
            known = self._codes[code] = self._place(code)
        if known is None:
            return
        if event == "call":
            self._called(known)
        elif event == "return" and known in _NAMED:
            name = _NAMED[known]
            if name in PHASES and self._phases and self._phases[-1][0] == name:
                _, began = self._phases.pop()
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
            if name == "checkpoint" and arg is not None:
                self.saved = max(self.saved, int(arg.name.rpartition("_")[2]))
            if name == "update" and arg is not None:
                self.updated += 1

    def _place(self, code: Any) -> tuple[str, str] | None:
        if not code.co_filename.startswith(str(PACKAGE)):
            return None
        return str(Path(code.co_filename).relative_to(PACKAGE)), code.co_name

    def _called(self, place: tuple[str, str]) -> None:
        name = _NAMED.get(place)
        if name is not None:
            self.counted[name] = self.counted.get(name, 0) + 1
            if name in PHASES:
                self._phases.append((name, time.perf_counter()))
        phase, trigger = self.phase, self.trigger
        self.calls[phase] = self.calls.get(phase, 0) + 1
        if trigger is None or self.fired or not trigger.calls:
            return
        if trigger.phase in (None, phase) and trigger.function in (None, place):
            self._moments += 1
            if self._moments == trigger.calls:
                self._act(f"call {self._moments} of {'.'.join(place)} in {phase}")

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _FILES or not arguments or isinstance(arguments[0], int):
            return
        if event == "open" and not (arguments[2] or 0) & _WRITING:
            return
        try:
            path = os.fspath(arguments[0])
        except TypeError:
            return
        path = os.fsdecode(path)
        if not path.startswith(self._inside) or path == str(self.file):
            return
        phase, trigger = self.phase, self.trigger
        relative = path.removeprefix(self._inside)
        if len(self.changes) < 3000:
            self.changes.append([phase, event, relative])
        if trigger is None or self.fired or not trigger.files or trigger.phase not in (None, phase):
            return
        if self._pattern is None or self._pattern.search(relative):
            self._moments += 1
            if self._moments == trigger.files:
                self._act(f"{event} of {relative} in {phase}")

    def _act(self, moment: str) -> None:
        assert self.trigger is not None
        self.fired = moment
        action, _, detail = self.trigger.action.partition(":")
        if action == "kill":
            self.write()
            if self.trigger.delay <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            # The default action of SIGALRM ends the process at once, wherever it is, as SIGKILL does.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self.trigger.delay)
        elif action == "disk":
            self.disk(int(detail))
        else:
            self._leave()  # it may be the end
            for _ in range(2 if action == "signal twice" else 1):
                os.kill(os.getpid(), getattr(signal, detail))


def fill_tmpfs(folder: str) -> Any:
    """Returns a function that leaves a mounted tmpfs with a number of free bytes, in whole pages."""
    libc = ctypes.CDLL(None, use_errno=True)

    def fill(left: int) -> None:
        disk = os.statvfs(folder)
        used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        size = max(4096, used + left // 4096 * 4096)
        remount = 32  # MS_REMOUNT
        if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", remount, f"size={size}".encode()):
            raise OSError(ctypes.get_errno(), "cannot shrink the tmpfs", folder)

    return fill


def fill_by_shim(folder: str) -> Any:
    """Returns a function that lets writes below a folder fail after a number of bytes (disk_full.c)."""
    library = ctypes.CDLL(None)

    def fill(left: int) -> None:
        library.faults_disk_full(folder.encode(), ctypes.c_long(left))

    return fill
