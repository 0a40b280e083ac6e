"""Reports of parts of a campaign become one."""

import json

import pytest

from faults.campaign import SECTIONS
from faults.outcomes import LOST, NOT_REACHED, OK, Outcome, merge_reports, write_report

FACTS = {
    "commit": "abc",
    "form": "long",
    "seed": 1,
    "cases": 2,
    "failures": 1,
    "seconds": 10,
    "machine": "one",
}


def outcome(case, verdict=OK):
    return Outcome(case, "a kind", verdict, "" if verdict == OK else "what happened")


def report(folder, outcomes, **facts):
    write_report(folder, outcomes, FACTS | facts, SECTIONS)
    return folder / "report.json"


def test_the_last_report_of_a_case_counts(tmp_path):
    first = report(tmp_path / "a", [outcome("kills:0"), outcome("disk:0", LOST), outcome("disk:1")])
    second = report(
        tmp_path / "b", [outcome("disk:0"), outcome("ranks:0", NOT_REACHED)], commit="def", seconds=5
    )
    outcomes, facts = merge_reports([first, second])
    assert {one.case: one.verdict for one in outcomes} == {
        "kills:0": OK,
        "disk:0": OK,
        "disk:1": OK,
        "ranks:0": NOT_REACHED,
    }
    assert facts["commit"] == "abc (1 kills, 1 disk); def (1 disk, 1 ranks)"
    assert (facts["cases"], facts["failures"], facts["seconds"], facts["machine"]) == (4, 0, 15, "one")
    text = write_report(tmp_path / "both", outcomes, facts, SECTIONS).read_text()
    assert "| disk | 2 | 2 | 0 |" in text and "--only ranks:0`: a kind: **not reached**" in text
    assert len(json.loads((tmp_path / "both" / "report.json").read_text())["outcomes"]) == 4


def test_reports_of_other_campaigns_are_not_joined(tmp_path):
    files = [report(tmp_path / f"{seed}", [outcome("kills:0")], seed=seed) for seed in (1, 2)]
    with pytest.raises(ValueError, match=r"different values of seed: \['1', '2'\]"):
        merge_reports(files)
