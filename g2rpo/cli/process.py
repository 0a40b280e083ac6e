"""What the process of a command needs before the command starts: encoding, streams, home and signals."""

from __future__ import annotations

import multiprocessing
import os
import pwd
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from g2rpo.cli.streams import guard_standard_streams, invalid_bytes, nearest
from g2rpo.runtime.stop_signals import command_signals

_TERMINAL = "G2RPO_TERMINAL_ENCODING"  # set for the process that `_use_utf8` starts


class Program(typer.Typer):
    """The `g2rpo` program. Its call prepares the process, which typer's test runner leaves alone."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a command and exits the process, as an installed script does."""
        if not args and "args" not in kwargs:
            _use_utf8()
        guard_standard_streams(os.environ.pop(_TERMINAL, None))
        refuse_missing_docstrings()
        find_a_home()
        find_writable_caches()
        refuse_invalid_bytes(sys.argv[1:])
        with command_signals(process_ends=True):
            try:
                return super().__call__(*args, **kwargs)
            finally:
                sys.stdout.flush()


def _use_utf8() -> None:
    """Starts the process anew in Python's UTF-8 mode if the locale is ASCII; keeps the terminal's encoding.

    With LC_ALL=C and PYTHONUTF8=0 Python can neither open nor name a file whose name is not ASCII, and texts
    on the command line arrive as undecoded bytes. Neither can be changed in a running process.
    """
    words = sys.argv[1:]
    is_own_process = (
        multiprocessing.parent_process() is None
        and len(sys.orig_argv) > len(words)
        and sys.orig_argv[len(sys.orig_argv) - len(words) :] == words
    )
    if sys.getfilesystemencoding() not in ("ascii", "us-ascii") or not is_own_process or not sys.executable:
        return
    os.environ[_TERMINAL] = getattr(sys.stdout, "encoding", None) or "ascii"
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def find_a_home() -> None:
    """Gives a process without a home a temporary one, for the caches of the packages that g2rpo uses.

    In a container a user may have no entry in the password file and no HOME, and the packages would then
    write to a folder with the name `~`.
    """
    home = os.environ.get("HOME")
    try:
        home = home or pwd.getpwuid(os.getuid()).pw_dir
        os.environ["HOME"] = home
    except KeyError:
        os.environ["HOME"] = str(_private_folder())
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("USER", str(os.getuid()))  # getpass.getuser, for the name of a cache folder


def find_writable_caches() -> None:
    """Moves the caches of compiled code to a temporary folder where they are set to one that is read-only.

    Otherwise the first compiled kernel would fail, after the model is loaded. Hugging Face's packages can
    read from a read-only cache, and matplotlib moves its own.
    """
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        if not (given := os.environ.get(name)):
            continue
        folder = Path(given).absolute()
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            os.environ[name] = str(_private_folder() / name.lower())
            if os.environ.get("RANK", "").strip() in ("", "0"):
                print(f"note: {name}={given} is not writable; using {os.environ[name]}", file=sys.stderr)


def _private_folder() -> Path:
    """A folder for temporary files that is the user's own, and the same for each process of a run."""
    folder = Path(tempfile.gettempdir()) / f"g2rpo-home-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
        folder = Path(tempfile.mkdtemp(prefix="g2rpo-home-"))
    return folder


def refuse_missing_docstrings() -> None:
    """Ends the process with a message under `python -OO`, where transformers fails at its own docstrings."""
    if sys.flags.optimize > 1:
        print(
            f"error: Python runs with -OO (PYTHONOPTIMIZE={os.environ.get('PYTHONOPTIMIZE', '')}), which "
            "removes the docstrings that transformers reads; unset PYTHONOPTIMIZE, or use -O",
            file=sys.stderr,
        )
        sys.exit(2)


def refuse_invalid_bytes(words: list[str]) -> None:
    """Ends the process with a message if an argument contains bytes that are not text in UTF-8."""
    word = invalid_bytes(words)
    if word is not None:
        shown = os.fsencode(word).decode("utf-8", "backslashreplace")
        print(
            f"error: argument {words.index(word) + 1}, {nearest(shown, 'utf-8')}, is not text in "
            f"{sys.getfilesystemencoding()}: rename the file or folder, or convert the text to UTF-8",
            file=sys.stderr,
        )
        sys.exit(2)
