"""The records of a reproduction: what it is, and one file per stage that is done.

    OUT/begun.json            recipe, settings and criteria that all stages share
    OUT/stages/NAME.json      checks and measurements of a stage, written when it is done

Each has a checksum. A damaged record of a stage is named, and the stage is measured again from its files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from g2rpo.config.identity import identity, reward_identities
from g2rpo.config.settings import Settings
from g2rpo.reproduction.checks import Check, failed
from g2rpo.reproduction.criteria import Criteria
from g2rpo.runtime.processes import rank
from g2rpo.runtime.progress import note
from g2rpo.runtime.records import DamagedFile, read_record, write_record

BEGUN = "begun.json"


@dataclass(frozen=True)
class Stage:
    """What a stage found.

    Attributes:
        name: of the stage.
        checks: its acceptance checks.
        facts: further measurements, JSON values.
        time: when it was done, in ISO format.
        seconds: time that the stage took in the call that completed it.
    """

    name: str
    checks: tuple[Check, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    time: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> list[Check]:
        """Its checks that failed."""
        return failed(self.checks)


def finite(value: Any) -> Any:
    """JSON values in which NaN and infinities, which JSON lacks, are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): finite(entry) for name, entry in value.items()}
    return [finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def stage_file(out: Path, name: str) -> Path:
    """The record of a stage."""
    return out / "stages" / f"{name}.json"


def write_stage(out: Path, stage: Stage) -> None:
    """Writes the record of a stage, in the first process alone."""
    if rank() == 0:
        stage_file(out, stage.name).parent.mkdir(parents=True, exist_ok=True)
        write_record(stage_file(out, stage.name), finite(asdict(stage)), indent=1)


def read_stage(out: Path, name: str) -> Stage | None:
    """The stage as it was recorded; None if it is not done, or its record is damaged, which a note says."""
    path = stage_file(out, name)
    if not path.exists():
        return None
    try:
        record = read_record(path)
        checks = tuple(Check(**check) for check in record["checks"])
        return Stage(record["name"], checks, dict(record["facts"]), record["time"], record["seconds"])
    except DamagedFile as error:
        note(f"{error}; the stage is measured again")
    except (KeyError, TypeError) as error:
        note(f"{path} is not a record of a stage ({error!r}); the stage is measured again")
    return None


def identity_of(settings: Settings, criteria: Criteria, more: Mapping[str, Any]) -> dict[str, Any]:
    """What all stages of a reproduction share, as JSON values: settings, criteria and `more`."""
    values = {**identity(settings), "iterations": settings.iterations}
    values["reward_options"] = reward_identities(settings, {*settings.rewards, *settings.eval_rewards})
    stored = {**more, "settings": values, "criteria": criteria.model_dump(mode="json")}
    return dict(json.loads(json.dumps(stored, default=str)))


def check_same(out: Path, given: Mapping[str, Any]) -> bool:
    """Whether OUT holds a reproduction already; it must be the same one.

    Raises:
        ValueError: OUT holds one with other settings or criteria, or a damaged record of what it is.
    """
    path = out / BEGUN
    if not path.exists():
        if out.is_dir() and any(entry.name != ".lock" for entry in out.iterdir()):
            raise ValueError(f"{out} contains something else (no {BEGUN}); give another out=FOLDER")
        return False
    try:
        before = read_record(path)
    except DamagedFile as error:
        raise ValueError(
            f"{error}. This file records the settings and criteria of the stages in {out}: restore it from a "
            "copy, or give another out=FOLDER"
        ) from error
    differences = [
        f"  {name}: {was!r} stored, {now!r} given" for name, was, now in _differences("", before, given)
    ]
    if differences:
        raise ValueError(
            f"{out} contains a reproduction with other settings and cannot be resumed with these:\n"
            + "\n".join(differences)
            + "\nGive the same settings and criteria, or another out=FOLDER."
        )
    return True


def _differences(
    prefix: str, before: Mapping[str, Any], now: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """(name, before, now) of all values that differ, in nested tables by the names inside."""
    found = []
    for name in {**before, **now}:
        was, given = before.get(name), now.get(name)
        if isinstance(was, Mapping) and isinstance(given, Mapping):
            found += _differences(f"{prefix}{name}.", was, given)
        elif was != given:
            found.append((f"{prefix}{name}", was, given))
    return found


def write_begun(out: Path, given: Mapping[str, Any]) -> None:
    """Writes OUT/begun.json."""
    out.mkdir(parents=True, exist_ok=True)
    write_record(out / BEGUN, dict(given), indent=1)
