"""Progress of a count: lines where there is no terminal, a bar where there is one."""

import io

import pytest
from rich.console import Console

from g2rpo.runtime import progress


def shown(total, steps, monkeypatch, *, seconds=1.0, **console):
    """What is written when each of `steps` comes `seconds` after the one before."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    file = io.StringIO()
    with progress.counted(total, "pictures", "scoring", Console(file=file, width=120, **console)) as told:
        for done in steps:
            now[0] += seconds
            told(done)
    return file.getvalue()


def test_a_line_every_ten_seconds_and_at_the_end(monkeypatch):
    lines = shown(30, range(1, 31), monkeypatch).splitlines()
    assert lines == [
        "10/30 pictures, 1.0 pictures/s, 20 s left",
        "20/30 pictures, 1.0 pictures/s, 10 s left",
        "30/30 pictures, 1.0 pictures/s",
    ]


def test_the_rate_is_over_the_whole_time(monkeypatch):
    assert shown(100, [5, 10], monkeypatch, seconds=10.0).splitlines()[1].startswith("10/100 pictures, 0.5 p")


def test_no_time_at_all_is_no_division_by_zero(monkeypatch):
    assert shown(2, [2], monkeypatch, seconds=0.0).startswith("2/2 pictures, ")


@pytest.mark.parametrize(("total", "console"), [(0, {}), (9, {"quiet": True})])
def test_nothing_to_count_or_to_show(monkeypatch, total, console):
    assert shown(total, range(total + 1), monkeypatch, seconds=60.0, **console) == ""


def test_a_bar_on_a_terminal(monkeypatch):
    text = shown(4, [1, 4], monkeypatch, force_terminal=True)
    assert "scoring" in text and "4/4" in text
