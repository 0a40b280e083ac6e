"""Outcomes of cases, the check of an error message, and the report."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from faults.jobs import Result

OK = "survived"
LOST, MESSAGE, TRACEBACK, SILENT, HANG = (
    "lost work",
    "wrong message",
    "unhandled traceback",
    "silently wrong",
    "hangs",
)
FAILURES = (LOST, MESSAGE, TRACEBACK, SILENT, HANG)
NOT_REACHED = "not reached"

Words = str | Sequence[str]


@dataclass(frozen=True)
class Expected:
    """What a message has to say; each field is an expression, or several of which one must match.

    Attributes:
        file: the file, by its name.
        place: line, row, key or tensor.
        found: what was found there.
        allowed: what is allowed, or what to do.
    """

    file: Words = ""
    place: Words = ""
    found: Words = ""
    allowed: Words = ""

    def missing(self, text: str) -> list[str]:
        """Returns the fields of which `text` says nothing."""
        text = " ".join(text.split())
        absent = []
        for name, words in asdict(self).items():
            choices = [words] if isinstance(words, str) else list(words)
            if not any(re.search(choice, text, re.I) for choice in choices):
                absent.append(f"{name} ({' | '.join(choices)})")
        return absent


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case.

    Attributes:
        case: SECTION:NUMBER, which `--only` takes.
        kind: what was done: a phase, a signal, a kind of file and fault.
        verdict: one of OK, FAILURES and NOT_REACHED.
        detail: what was seen, for a failure.
        command: the command of the case.
    """

    case: str
    kind: str
    verdict: str
    detail: str = ""
    command: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict == OK


def refusal(result: Result, expected: Expected, *, written: Sequence[str] = ()) -> tuple[str, str]:
    """Verdict and detail of a command that must refuse its input.

    Args:
        result: of the command.
        expected: what its message has to say.
        written: files that the command wrote although it refused.
    """
    message = result.errors.strip()
    if result.timed_out:
        return HANG, f"after {result.seconds:.0f} s"
    if result.traceback:
        return TRACEBACK, result.traceback
    if result.code == 0:
        return SILENT, f"exit code 0; the message should say {expected}; output: {_short(result.text)}"
    if result.code < 0:
        return TRACEBACK, f"ended by signal {-result.code}"
    if result.code not in (1, 2):
        return MESSAGE, f"exit code {result.code}: {_short(result.text)}"
    if message.count("error: ") > 1:
        return MESSAGE, f"several messages: {_short(message)}"
    said = message if message else result.output
    if absent := expected.missing(said):
        return MESSAGE, f"does not say {', '.join(absent)}: {_short(said)}"
    counted = result.trace.get("counted", {})
    if "loads a model" in counted:
        return MESSAGE, f"only after the model is loaded: {_short(said)}"
    if written:
        return MESSAGE, f"wrote {', '.join(written[:4])} and then refused: {_short(said)}"
    return OK, ""


def _short(text: str, most: int = 400) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def write_report(
    folder: Path, outcomes: Sequence[Outcome], facts: Mapping[str, object], sections: Mapping[str, str]
) -> Path:
    """Writes report.json and report.md and returns the latter's path.

    Args:
        outcomes: of all cases.
        facts: name -> value, for the head of the report.
        sections: section -> what it does, in the order of the report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {"facts": dict(facts), "outcomes": [asdict(outcome) for outcome in outcomes]}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (folder / "report.json").write_text(f"{text}\n", encoding="utf-8")
    lines = ["# Fault campaign", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    verdicts = (OK, *FAILURES, NOT_REACHED)
    lines += [
        "| section | cases | " + " | ".join(verdicts) + " |",
        "| --- |" + " ---: |" * (len(verdicts) + 1),
    ]
    for section in sections:
        own = [one for one in outcomes if one.case.startswith(f"{section}:")]
        if own:
            lines.append(_row(section, own, verdicts))
    lines += [_row("**all**", outcomes, verdicts), ""]
    for section, what in sections.items():
        own = [one for one in outcomes if one.case.startswith(f"{section}:")]
        if not own:
            continue
        lines += [f"## {section}", "", what, "", "| kind | cases | survived |", "| --- | ---: | ---: |"]
        kinds = Counter(one.kind for one in own)
        good = Counter(one.kind for one in own if one.ok)
        lines += [f"| {kind} | {count} | {good[kind]} |" for kind, count in sorted(kinds.items())]
        lines.append("")
    command = f"python -m tests.faults{' --short' if facts['form'] == 'short' else ''}"
    failed = [one for one in outcomes if not one.ok]
    lines += ["## Failures, and cases whose fault did not occur (not reached)", ""]
    lines += [] if failed else ["None."]
    for one in failed:
        lines += [
            f"- `{command} --seed {facts['seed']} --only {one.case}`: {one.kind}: "
            f"**{one.verdict}**. " + one.detail.replace("|", "\\|").replace("\n", " ")[:600]
        ]
    path = folder / "report.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def merge_reports(reports: Sequence[Path]) -> tuple[list[Outcome], dict[str, object]]:
    """Joins reports of parts of one campaign, which may have been made at different times.

    Args:
        reports: files `report.json`; of a case that several of them have, the last one counts.

    Returns:
        The outcomes, and the facts for `write_report`, with the sections that each commit was tested by.

    Raises:
        ValueError: the reports are of campaigns with different seeds or forms, whose cases differ.
    """
    contents = [json.loads(report.read_text(encoding="utf-8")) for report in reports]
    for name in ("seed", "form"):
        if len(values := {content["facts"][name] for content in contents}) > 1:
            raise ValueError(f"the reports have different values of {name}: {sorted(map(str, values))}")
    source = {
        one["case"]: (number, one) for number, content in enumerate(contents) for one in content["outcomes"]
    }
    outcomes = [Outcome(**one) for _, one in source.values()]
    parts = []
    for number, content in enumerate(contents):
        cases = Counter(case.partition(":")[0] for case, (origin, _) in source.items() if origin == number)
        counted = ", ".join(f"{n} {name}" for name, n in cases.items())
        parts.append(f"{content['facts']['commit']} ({counted})")
    facts: dict[str, object] = {
        "commit": "; ".join(parts),
        "form": contents[0]["facts"]["form"],
        "seed": contents[0]["facts"]["seed"],
        "cases": len(outcomes),
        "failures": sum(not one.ok and one.verdict != NOT_REACHED for one in outcomes),
        "seconds": sum(content["facts"]["seconds"] for content in contents),
        "machine": "; ".join(dict.fromkeys(content["facts"]["machine"] for content in contents)),
    }
    return outcomes, facts


def _row(name: str, outcomes: Sequence[Outcome], verdicts: Sequence[str]) -> str:
    counts = Counter(one.verdict for one in outcomes)
    return f"| {name} | {len(outcomes)} | " + " | ".join(str(counts[v]) for v in verdicts) + " |"
