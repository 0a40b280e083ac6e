"""Detects a reward whose code ends the program, and reports it as an error with module and function.

`sys.exit()`, `exit()`, and a command line parser that does not know g2rpo's arguments would end the program
again at the next call. The command therefore stops (RewardExited) instead of counting samples without a
score, and never returns exit code 0. `os._exit()` cannot be detected within the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, TracebackType
from typing import Any, TextIO, cast

from g2rpo.runtime.processes import StopTogether
from g2rpo.runtime.secrets import masked

PARSERS = ("argparse", "optparse", "getopt", "click", "typer", "docopt", "fire", "absl")
"""Packages that parse `sys.argv` and end the program if they do not recognise it."""

OWN_MODULES = (
    __name__,
    "g2rpo.rewards.registry",
    "g2rpo.rewards.checked",
    "g2rpo.rewards.dry_call",
    "g2rpo.runtime.imports",
)
"""Modules of this package whose frames precede those of a reward in a traceback."""

MAX_CODE_LENGTH = 200
"""Maximum number of characters of `sys.exit("text")` in an error message."""


class RewardUnusable(StopTogether):
    """A reward would fail so at every call: the command stops on all processes, and keeps its work."""


class RewardExited(RewardUnusable):
    """A reward's code ended the program; the message names the reward, module, function and line."""


class WrongResult(RewardUnusable):
    """A reward returned something other than one score per image."""


@contextmanager
def exits_reported(reward: str, phase: str) -> Iterator[None]:
    """Context manager for code of a reward: attempts to end the program become errors.

    Args:
        reward: name of the reward.
        phase: what the reward is doing, for the message, such as "while scoring".

    Raises:
        RewardExited: instead of SystemExit or click's Exit, also inside an exception group.
        KeyboardInterrupt: instead of an exception group that contains one.
    """
    held = _HeldUsage(sys.stderr)
    try:
        with held:
            yield
    except BaseException as error:
        if (interrupt := _first(error, _is_interrupt)) is not None and interrupt is not error:
            raise KeyboardInterrupt from error
        if (exit_error := _first(error, _is_exit)) is not None:
            said = f" after printing {held.last_line!r}" if held.last_line else ""
            raise RewardExited(_message(reward, f"{phase}{said}", error, exit_error)) from error
        held.release()
        raise
    held.release()


class _HeldUsage:
    """Stands in for `sys.stderr` in a block, and holds back what a parser prints before it ends the program.

    A parser of a reward prints how to use its program, and that would be g2rpo. Text passes through until a
    line begins with "usage:"; the rest is held until `release`, which passes it on.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._held, self._holds = stream, "", True

    def __enter__(self) -> None:
        sys.stderr = cast("TextIO", self)

    def __exit__(self, *error: object) -> None:
        if sys.stderr is self:
            sys.stderr = self._stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes the text, or holds it back."""
        if self._held or (self._holds and text.lstrip().lower().startswith("usage:")):
            self._held += text
            return len(text)
        written: int = self._stream.write(text)
        return written

    def release(self) -> None:
        """Passes on what was held back, and holds nothing from now on: other code may keep this stream."""
        held, self._held, self._holds = self._held, "", False
        if held:
            self._stream.write(held)

    @property
    def last_line(self) -> str:
        """The last line that was held back, at most MAX_CODE_LENGTH characters."""
        lines = [line for line in self._held.splitlines() if line.strip()]
        return masked(lines[-1].strip())[:MAX_CODE_LENGTH] if lines else ""


@contextmanager
def errors_located(reward: str, phase: str) -> Iterator[None]:
    """Context manager for import and construction of a user's reward: its exceptions get one message.

    Raises:
        ValueError: for any other exception; the message names reward, module, function and line. A
            ValueError of the reward is its own message to the user and is not changed.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        if _first(error, lambda inner: _is_exit(inner) or _is_interrupt(inner)) is not None:
            raise  # `exits_reported` is around this
        reason = masked(" ".join(f"{type(error).__name__}: {error}".split()))
        raise ValueError(
            f"reward {reward!r}{location_of(error)} raised {reason} {phase}; correct it "
            "(`g2rpo --traceback COMMAND` shows where)"
        ) from error


def _is_interrupt(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt)


def _is_exit(error: BaseException) -> bool:
    # click's Exit is a RuntimeError; g2rpo's own command line would act on it.
    return isinstance(error, SystemExit) or (isinstance(error, RuntimeError) and hasattr(error, "exit_code"))


def _first(error: BaseException, matches: Callable[[BaseException], bool]) -> BaseException | None:
    """Returns the error, or the first one in an exception group, for which `matches` is true."""
    if matches(error):
        return error
    if isinstance(error, BaseExceptionGroup):
        inner_matches = (_first(inner, matches) for inner in error.exceptions)
        return next((match for match in inner_matches if match is not None), None)
    return None


def _message(reward: str, phase: str, error: BaseException, exit_error: BaseException) -> str:
    """Composes the error message; `exit_error` is `error`, or inside it if that is an exception group."""
    traces = [error.__traceback__] + ([] if exit_error is error else [exit_error.__traceback__])
    frames = [frame for trace in traces for frame in _frames(trace) if frame[0] not in OWN_MODULES]
    # The reward's own frames lie between those of the import system and those of a parser or `exit()`.
    reward_frames = [frame for frame in frames if not _is_library(frame[0])] or frames
    location = f" ({_location(*reward_frames[-1])})" if reward_frames else ""
    code = repr(getattr(exit_error, "code", getattr(exit_error, "exit_code", None)))
    code = code if len(code) <= MAX_CODE_LENGTH else f"{code[: MAX_CODE_LENGTH - 3]}..."
    parsers = [root for module, _, _ in frames if (root := module.partition(".")[0]) in PARSERS]
    if parsers:
        advice = (
            f"it parses the command line ({parsers[0]}), which contains the arguments of g2rpo: "
            'parse it only under if __name__ == "__main__", and take options from reward_options'
        )
    else:
        advice = "it must not end the program: raise an exception, or return NaN for images without a score"
    return f"reward {reward!r}{location} called sys.exit({code}) {phase}; {advice}"


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, CodeType, int]]:
    """Yields module, code object and line of each frame, outermost first."""
    while trace is not None:
        yield str(trace.tb_frame.f_globals.get("__name__", "?")), trace.tb_frame.f_code, trace.tb_lineno
        trace = trace.tb_next


def _is_library(module: str) -> bool:
    root = module.partition(".")[0]
    return root in sys.stdlib_module_names or root in PARSERS


def location_of(error: BaseException) -> str:
    """Returns ` (module.function, line n)` of the innermost frame of a reward's own code, or ""."""
    frames = [frame for frame in _frames(error.__traceback__) if frame[0] not in OWN_MODULES]
    own = [frame for frame in frames if not _is_library(frame[0]) and frame[0].partition(".")[0] != "torch"]
    return f" ({_location(*own[-1])})" if own else ""


def _location(module: str, code: CodeType, line: int) -> str:
    function = "" if code.co_qualname == "<module>" else f".{code.co_qualname}"
    return f"{module}{function}, line {line}"
