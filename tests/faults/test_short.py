"""The short form of the campaign, run as its command, and what its checks themselves are worth."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults.campaign import COUNTS
from faults.jobs import Result
from faults.outcomes import MESSAGE, NOT_REACHED, OK, SILENT, TRACEBACK, Expected, refusal
from faults.properties import PROPERTIES
from faults.runs import difference, fingerprint

ROOT = Path(__file__).parents[2]
SECONDS = 120
"""The short form takes less than this on two idle cores."""


@pytest.mark.long  # .ci/run has a stage for it
@pytest.mark.timeout(8 * SECONDS)
def test_everything_survives(tmp_path):
    """One test, so that the processes of pytest-xdist do not each run the campaign."""
    out = tmp_path / "report"
    command = [sys.executable, "-m", "tests.faults", "--short", "--seed", "7", "--jobs", "2"]
    command += ["--out", str(out)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (out / "report.json").is_file(), done.stdout + done.stderr
    assert "# Fault campaign" in (out / "report.md").read_text(encoding="utf-8")
    outcomes = json.loads((out / "report.json").read_text(encoding="utf-8"))["outcomes"]
    failed = [one for one in outcomes if one["verdict"] not in (OK, NOT_REACHED)]
    assert not failed, "\n".join("{case} ({kind}): {verdict}: {detail}".format(**one) for one in failed)
    for section, (_, count) in COUNTS.items():
        own = [one["verdict"] for one in outcomes if one["case"].startswith(f"{section}:")]
        assert len(own) >= (count if section != "properties" else len(PROPERTIES)), f"{section} was not done"
        assert own.count(OK) >= 0.7 * len(own), f"{section}: a moment of a case is not reached any more"
    assert done.returncode == 0


def result(code: int = 2, errors: str = "", output: str = "", **trace: object) -> Result:
    return Result(["sample"], code, output, errors, 1.0, False, trace)


SAYS = Expected(file="a.jsonl", place="line 3", found="NUL", allowed="remove")


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (result(errors="error: a.jsonl, line 3: a NUL; remove it"), OK),
        (result(errors="error: a.jsonl, line 2: a NUL; remove it"), MESSAGE),
        (result(errors="error: b.jsonl, line 3: a NUL; remove it"), MESSAGE),
        (result(errors="error: a.jsonl, line 3: a NUL"), MESSAGE),
        (result(errors="error: a.jsonl, line 3: a NUL; remove it", counted={"loads a model": 1}), MESSAGE),
        (result(0, output="4 prompts"), SILENT),
        (result(1, "Traceback (most recent call last):\n  …\nKeyError: 'a'"), TRACEBACK),
        (result(-11), TRACEBACK),
        (result(3, "error: a.jsonl, line 3: a NUL; remove it"), MESSAGE),
    ],
)
def test_messages_are_judged(seen, verdict):
    assert refusal(seen, SAYS)[0] == verdict


def test_what_a_refused_command_wrote_is_seen():
    seen = result(errors="error: a.jsonl, line 3: a NUL; remove it")
    assert refusal(seen, SAYS, written=["run/config.toml"])[0] == MESSAGE


def test_runs_are_compared_by_their_numbers(tmp_path):
    """Times may differ; a number, a missing line or another pixel may not."""
    runs = []
    for name, lines, pixel in (
        ("a", [{"step": 1, "loss": 0.5, "seconds": 1.0}, {"step": 2, "loss": 0.25}], b"x"),
        ("b", [{"step": 1, "loss": 0.5, "seconds": 2.0}, {"step": 2, "loss": 0.25}], b"x"),
        ("c", [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.2500001}], b"x"),
        ("d", [{"step": 1, "loss": 0.5}], b"x"),
        ("e", [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}], b"y"),
    ):
        run = tmp_path / name
        run.mkdir()
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / "0001.png").write_bytes(pixel)
        runs.append(fingerprint(run))
    assert [bool(difference(runs[0], other)) for other in runs] == [False, False, True, True, True]
