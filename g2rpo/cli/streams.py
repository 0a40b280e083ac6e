"""Standard output and error of a command: any encoding, and a reader that may go away.

A character that the terminal's encoding lacks is replaced by its nearest equivalent or by "?". When the
reader of the output has gone (`g2rpo train | head -1`, a closed terminal), the command is asked to stop, and
what it still prints is dropped.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any, TextIO

from g2rpo.runtime.stop_signals import NO_READER, request_stop

ERRORS = "g2rpo-nearest"
"""Name of the error handler for characters that an encoding lacks."""

_NO_READER = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ESHUTDOWN)
_NEAREST = str.maketrans({"±": "+-", "×": "x", "−": "-", "–": "-", "—": "-", "→": "->", "“": '"', "”": '"'})


def nearest(text: str, encoding: str) -> str:
    """Replaces the characters that `encoding` lacks: accents are dropped, "…" becomes "...", others "?"."""
    plain = []
    for character in text:
        for candidate in (character, character.translate(_NEAREST), unicodedata.normalize("NFKD", character)):
            known = candidate.encode(encoding, "ignore").decode(encoding)
            if known:
                break
        plain.append(known or "?")
    return "".join(plain)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return nearest(error.object[error.start : error.end], error.encoding), error.end


class _Output(io.FileIO):
    """A file descriptor whose reader may go away."""

    gone = False

    def write(self, data: bytes) -> int:  # type: ignore[override]  # a buffer, in typeshed's words
        written = 0
        try:
            while not self.gone and written < len(
                data
            ):  # without a buffer (python -u) nobody else repeats it
                written += super().write(data[written:]) or 0
        except OSError as error:
            if error.errno not in (*_NO_READER, errno.ENOSPC, errno.EDQUOT):
                raise
            self.gone = True  # what is left in the buffer cannot be written at exit either
            if error.errno not in _NO_READER:
                raise
            request_stop(NO_READER)
        return len(data)


class _Standard(io.TextIOWrapper):
    """A standard stream of the command. Code of a reward may close it, which only flushes it."""

    def close(self) -> None:
        self.flush()


def open_standard_descriptors() -> None:
    """Opens /dev/null for each of stdin, stdout and stderr that is closed.

    Otherwise the next file that is opened, such as a checkpoint, would receive what is printed.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open takes the lowest free number


def guarded(stream: TextIO | None, number: int, encoding: str | None = None) -> TextIO:
    """A stream to the file descriptor `number` that replaces `stream` and never fails for its encoding.

    Args:
        stream: the stream of Python, whose buffering is kept; None: it was closed.
        encoding: of the terminal; None: that of `stream`.
    """
    codecs.register_error(ERRORS, _replace)
    if stream is not None:
        stream.flush()
    name = encoding or getattr(stream, "encoding", None) or "utf-8"
    unbuffered = bool(getattr(stream, "write_through", False))
    output: Any = _Output(number, "w", closefd=False)
    return _Standard(
        output if unbuffered else io.BufferedWriter(output),
        encoding=name,
        errors=ERRORS,
        line_buffering=bool(getattr(stream, "line_buffering", False)),
        write_through=unbuffered,
    )


def guard_standard_streams(encoding: str | None = None) -> None:
    """Replaces `sys.stdout` and `sys.stderr` for the rest of the process.

    Args:
        encoding: of the terminal, where it is not the one that Python uses.
    """
    open_standard_descriptors()
    sys.stdout = guarded(sys.stdout, 1, encoding)
    sys.stderr = guarded(sys.stderr, 2, encoding)


def invalid_bytes(words: Sequence[str]) -> str | None:
    """The first word with a byte that is not UTF-8, which Python passes on as a lone surrogate."""
    return next((word for word in words if any("\ud800" <= letter <= "\udfff" for letter in word)), None)
