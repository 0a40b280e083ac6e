"""Generated inputs: each generator makes a bad file and states what the message must say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.jobs import Case, Job, Result
from faults.outcomes import HANG, MESSAGE, OK, TRACEBACK, Expected, Outcome, refusal
from faults.runs import Cases, World


@dataclass(frozen=True)
class Bad:
    """A command with a bad input.

    Attributes:
        kind: kind of input and fault.
        words: arguments of the command.
        expected: what its message must say.
        accepted: the input may also be accepted; then this says whether the result is the right one.
        code: exit code of a command that goes on with the rest of its inputs; None: it refuses.
        environment: of the command.
    """

    kind: str
    words: list[str]
    expected: Expected
    accepted: Callable[[Result], str] | None = None
    code: int | None = None
    environment: dict[str, str | None] = field(default_factory=dict)


Generator = Callable[[Any, Path], Bad]


def input_cases(world: World, count: int) -> Cases:
    """Bad recipes, prompt files, images, adapters and weights in turn."""
    from faults import bad_adapters, bad_files, bad_images, bad_prompts, bad_recipes

    families: tuple[tuple[Generator, ...], ...] = (
        bad_prompts.GENERATORS,
        bad_recipes.GENERATORS,
        bad_adapters.GENERATORS,
        bad_prompts.GENERATORS,
        bad_files.GENERATORS,
        bad_recipes.GENERATORS,
        bad_images.GENERATORS,
        bad_adapters.GENERATORS,
    )
    for number in range(count):
        generators = families[number % len(families)]
        # Each of a family in turn, so that also a short campaign has as many different ones as it can.
        position = number // len(families) + (number % len(families)) * 7
        yield f"inputs:{number}", _of(world, f"inputs:{number}", generators[position % len(generators)])


def _of(world: World, name: str, generator: Generator) -> Callable[[Path], Case]:
    return lambda folder: _tried(folder, world, name, generator)


def _tried(folder: Path, world: World, name: str, generator: Generator) -> Case:
    work = folder / "work"
    work.mkdir()
    bad = generator(world.random(name), work)
    before = {path for path in work.rglob("*")}
    result: Result = yield Job(bad.words, work, environment=bad.environment)
    written = [str(path.relative_to(work)) for path in sorted(work.rglob("*")) if path not in before]
    written = [path for path in written if not path.startswith("cache")]
    verdict, detail = _judged(bad, result, written)
    command = f"g2rpo {' '.join(bad.words)}"
    return Outcome(name, bad.kind, verdict, f"`{command[:300]}`: {detail}" if detail else "", command)


def _judged(bad: Bad, result: Result, written: list[str]) -> tuple[str, str]:
    if bad.accepted is not None and result.code == 0 and not result.traceback:
        return ("silently wrong", wrong) if (wrong := bad.accepted(result)) else (OK, "")
    if bad.code is None:
        return refusal(result, bad.expected, written=written)
    if result.timed_out:
        return HANG, f"after {result.seconds:.0f} s"
    if result.traceback:
        return TRACEBACK, result.traceback
    if result.code != bad.code and not (bad.code and result.code in (1, 2)):
        return MESSAGE, f"exit code {result.code} instead of {bad.code}: {result.text[-300:]}"
    absent = bad.expected.missing(result.text)
    return (MESSAGE, f"does not say {', '.join(absent)}: {result.text[-400:]}") if absent else (OK, "")
