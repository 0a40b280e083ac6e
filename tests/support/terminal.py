"""A command in a terminal of its own, and what the terminal shows while it runs."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyte

ROOT = Path(__file__).parents[2]


class Terminal:
    """Runs a command in a pseudo-terminal.

    Attributes:
        screen: what the terminal shows.
        shown: a copy of the screen's text after each piece of output.
        raw: all that was written.
    """

    def __init__(
        self, words: Sequence[str], *, columns: int = 100, lines: int = 60, **environment: str
    ) -> None:
        self.screen: Any = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.shown: list[str] = []
        self.raw = b""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        plain = {key: value for key, value in os.environ.items() if key not in ("CI", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={
                **plain,
                "TERM": "xterm-256color",
                "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                **environment,
            },
        )
        os.close(slave)

    def read(self, seconds: float = 240.0, until: Callable[[str], object] | None = None) -> str:
        """Reads until the command ends, or the screen satisfies `until`; returns the screen's text."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ready, _, _ = select.select([self._master], [], [], 0.2)
            if ready:
                try:
                    data = os.read(self._master, 65536)
                except OSError:  # the command has closed its side
                    break
                if not data:
                    break
                self.raw += data
                self._stream.feed(data)
                self.shown.append(self.text)
                if until is not None and until(self.text):
                    return self.text
            elif self.process.poll() is not None:
                break
        else:
            self.process.kill()
            raise AssertionError(f"not within {seconds} s; the screen shows:\n{self.text}")
        self.process.wait(60)
        return self.text

    @property
    def text(self) -> str:
        """The lines of the screen without blanks at their ends."""
        return "\n".join(line.rstrip() for line in self.screen.display).strip("\n")

    def close(self) -> None:
        """Closes the terminal, as when its window is closed."""
        os.close(self._master)
