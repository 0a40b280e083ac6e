"""Progress display: lines where the output is not a terminal, a bar where it is."""

import io

import pytest
from rich.console import Console

from g2rpo.runtime import progress


def shown(total, steps, monkeypatch, *, seconds=1.0, **console):
    """Text written when the counts `steps` are reported at intervals of `seconds`."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    file = io.StringIO()
    output = Console(file=file, width=120, **console)
    with progress.show_progress(total, "images", "scoring", output) as show:
        for done in steps:
            now[0] += seconds
            show(done)
    return file.getvalue()


def test_a_line_every_ten_seconds_and_at_the_end(monkeypatch):
    lines = shown(30, range(1, 31), monkeypatch).splitlines()
    assert lines == [
        "10/30 images, 1.0 images/s, 20 s left",
        "20/30 images, 1.0 images/s, 10 s left",
        "30/30 images, 1.0 images/s",
    ]


def test_the_rate_is_over_the_whole_time(monkeypatch):
    assert shown(100, [5, 10], monkeypatch, seconds=10.0).splitlines()[1].startswith("10/100 images, 0.5 im")


def test_no_time_at_all_is_no_division_by_zero(monkeypatch):
    assert shown(2, [2], monkeypatch, seconds=0.0).startswith("2/2 images, ")


@pytest.mark.parametrize(("total", "console"), [(0, {}), (9, {"quiet": True})])
def test_nothing_to_count_or_to_show(monkeypatch, total, console):
    assert shown(total, range(total + 1), monkeypatch, seconds=60.0, **console) == ""


def test_a_bar_on_a_terminal(monkeypatch):
    text = shown(4, [1, 4], monkeypatch, force_terminal=True)
    assert "scoring" in text and "4/4" in text
