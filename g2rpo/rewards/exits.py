"""A reward whose code ends the program: reported as an error with module and function, never an exit code 0.

`sys.exit()`, `exit()`, and a parser of the command line that does not know g2rpo's arguments, are decisions
of the reward's code. They would be the same at the next call, so the command stops (RewardExited) instead of
counting samples without a score. `os._exit()` cannot be seen from within the process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, TracebackType
from typing import Any

from g2rpo.runtime.processes import StopTogether

PARSERS = ("argparse", "optparse", "getopt", "click", "typer", "docopt", "fire", "absl")
"""Packages that read `sys.argv` and end the program where it is not what they expect."""

OURS = (__name__, "g2rpo.rewards.registry", "g2rpo.rewards.checked")
"""Modules whose frames stand before those of a reward."""

LONGEST_CODE = 200
"""Characters of `sys.exit("text")` that a message repeats."""


class RewardExited(StopTogether):
    """A reward's code ended the program; the message names the reward, module, function and line."""


@contextmanager
def exits_reported(reward: str, phase: str) -> Iterator[None]:
    """Within it, code of a reward runs.

    Args:
        reward: its name. phase: what it was doing, for the message, such as "while scoring".

    Raises:
        RewardExited: in place of SystemExit, or of click's Exit, also where an exception group holds it.
        KeyboardInterrupt: in place of an exception group that holds one.
    """
    try:
        yield
    except BaseException as error:
        if (interrupt := _first(error, _is_interrupt)) is not None and interrupt is not error:
            raise KeyboardInterrupt from error
        if (ending := _first(error, _is_exit)) is not None:
            raise RewardExited(_message(reward, phase, error, ending)) from error
        raise


def _is_interrupt(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt)


def _is_exit(error: BaseException) -> bool:
    # click's Exit is a RuntimeError, which our own command line would obey.
    return isinstance(error, SystemExit) or (isinstance(error, RuntimeError) and hasattr(error, "exit_code"))


def _first(error: BaseException, wanted: Any) -> BaseException | None:
    """The error itself, or the first one in an exception group, that is wanted."""
    if wanted(error):
        return error
    if isinstance(error, BaseExceptionGroup):
        matches = (_first(inner, wanted) for inner in error.exceptions)
        return next((match for match in matches if match is not None), None)
    return None


def _message(reward: str, phase: str, error: BaseException, ending: BaseException) -> str:
    """What to tell of `ending`, which is `error` or, if that is an exception group, in it."""
    traces = [error.__traceback__] + ([] if ending is error else [ending.__traceback__])
    frames = [frame for trace in traces for frame in _frames(trace) if frame[0] not in OURS]
    # The reward's own code stands between the import system and a parser, a pool or `exit()` itself.
    own = [frame for frame in frames if not _is_plumbing(frame[0])] or frames
    place = f" ({_place(*own[-1])})" if own else ""
    code = repr(getattr(ending, "code", getattr(ending, "exit_code", None)))
    code = code if len(code) <= LONGEST_CODE else f"{code[: LONGEST_CODE - 3]}..."
    parsers = [root for module, _, _ in frames if (root := module.partition(".")[0]) in PARSERS]
    if parsers:
        advice = (
            f"it parses the command line ({parsers[0]}), whose arguments here are g2rpo's: do that under "
            'if __name__ == "__main__", and take options from reward_options'
        )
    else:
        advice = "it must not end the program: raise an exception, or return NaN for images without a score"
    return f"reward {reward!r}{place} called sys.exit({code}) {phase}; {advice}"


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, CodeType, int]]:
    """Module, code and line of each frame, the outermost first."""
    while trace is not None:
        yield str(trace.tb_frame.f_globals.get("__name__", "?")), trace.tb_frame.f_code, trace.tb_lineno
        trace = trace.tb_next


def _is_plumbing(module: str) -> bool:
    root = module.partition(".")[0]
    return root in sys.stdlib_module_names or root in PARSERS


def _place(module: str, code: CodeType, line: int) -> str:
    function = "" if code.co_qualname == "<module>" else f".{code.co_qualname}"
    return f"{module}{function}, line {line}"
