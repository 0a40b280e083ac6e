"""Progress of long work: phases within phases, plain lines, and what a run computes for its display."""

import math
import threading
import time

import pytest

from g2rpo.runtime import progress
from g2rpo.runtime.progress import (
    Lines,
    RunProgress,
    RunStatus,
    current_display,
    format_seconds,
    phase,
    showing,
)


class Recorded:
    """A display that keeps what it is told."""

    def __init__(self):
        self.notes, self.begun, self.ended, self.states = [], [], [], []

    def note(self, text):
        self.notes.append(text)

    def begin(self, phase):
        self.begun.append(phase.title)

    def end(self, phase):
        self.ended.append((phase.title, phase.completed))

    def run(self, status, *, iteration=False):
        self.states.append((status, iteration))


@pytest.fixture
def recorded():
    display = Recorded()
    with showing(display):
        yield display


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    # The test calls `tick` itself, at times of its choice.
    monkeypatch.setattr(progress.TICKER, "watch", lambda display: None)
    return now


def printed(capsys, clock, steps, *, seconds=1.0, total=30, **options):
    lines = Lines(clock=lambda: clock[0])
    with showing(lines), phase("scoring", total, "images", **options) as scoring:
        for done in steps:
            clock[0] += seconds
            scoring.to(done)
            lines.tick()
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_a_line_every_ten_seconds_and_at_the_end(capsys, clock):
    assert printed(capsys, clock, range(1, 31)) == [
        "scoring: 10/30 images, 1.0 images/s, 20 s left",
        "scoring: 20/30 images, 1.0 images/s, 10 s left",
        "scoring: 30/30 images, 1.0 images/s, 0 s left",
        "scoring: 30 images in 30 s",
    ]


def test_the_rate_is_over_the_whole_time(capsys, clock):
    lines = printed(capsys, clock, [5, 10], seconds=10.0, total=100)
    assert lines[1] == "scoring: 10/100 images, 0.5 images/s, 3 min 00 s left"


def test_a_short_phase_prints_nothing(capsys, clock):
    assert printed(capsys, clock, range(1, 10), total=9) == []


def test_a_phase_of_every_iteration_prints_every_minute(capsys, clock):
    lines = printed(capsys, clock, range(1, 151), total=150, repeated=True)
    assert [line.split(",")[0] for line in lines] == [
        "scoring: 60/150 images",
        "scoring: 120/150 images",
        "scoring: 150 images in 2 min 30 s",
    ]


def test_what_cannot_be_counted_tells_the_time(capsys, clock):
    lines = printed(capsys, clock, [0, 0], seconds=10.0, total=0)
    assert lines == ["scoring: 10 s so far", "scoring: 20 s so far", "scoring: 20 s"]


def test_other_processes_than_the_first_print_nothing(capsys, clock, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert printed(capsys, clock, range(1, 31)) == []
    lines = Lines()
    lines.note("text")
    lines.run(progress.RunStatus(1, 2), iteration=True)
    assert capsys.readouterr() == ("", "")


def test_a_phase_that_fails_says_nothing_of_completion(capsys, clock):
    lines = Lines(clock=lambda: clock[0])
    with pytest.raises(KeyboardInterrupt), showing(lines), phase("sampling", 4, "images"):
        clock[0] += 11
        lines.tick()
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "sampling: 0/4 images, 11 s so far\n"
    with phase("next") as after:
        assert after.outer is None


def test_phases_within_phases(recorded):
    with phase("evaluation"), phase("sampling", 4, "images") as sampling:
        sampling.add()
        assert sampling.title == "evaluation, sampling"
        # A batch counts for the images of which it is a part, also by halves.
        with phase("batch", 2, "images") as batch:
            batch.to(1.5)
            assert sampling.done == 2.5
            batch.to(2)
        assert sampling.done == 3
        with phase("scoring", 2, "rewards"):
            pass
    assert recorded.begun == ["evaluation", "evaluation, sampling", "evaluation, sampling, scoring"]
    assert recorded.ended == [(title, True) for title in reversed(recorded.begun)]


def test_a_thread_has_phases_and_a_display_of_its_own(recorded):
    seen = []

    def work():
        with phase("other work") as other:
            seen.append((other.title, isinstance(current_display(), Lines)))

    with phase("sampling"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [("other work", True)] and recorded.begun == ["sampling"]


def test_displays_are_drawn_while_the_work_goes_on():
    ticks = []

    class Drawn(Recorded):
        def begin(self, phase):
            progress.TICKER.watch(self)

        def end(self, phase):
            progress.TICKER.forget(self)

        def tick(self):
            ticks.append(time.monotonic())

    with showing(Drawn()), phase("sampling"):
        deadline = time.monotonic() + 30
        while len(ticks) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    drawn = len(ticks)
    time.sleep(1.5)
    assert len(ticks) <= drawn + 1  # one may have been on its way


def line(step, **more):
    return {"step": step, "nfe": 100, "reward/verifier": 0.1 * step, **more}


def test_a_run_in_a_log_is_one_line_per_iteration(capsys):
    with showing(Lines()), RunProgress(4, done=1, metrics=[line(1)]) as run:
        run.note("samples [written]")
        run.update(line(2))
        run.update(line(3, invalid_fraction=0.25, peak_memory_gb=1.26))
        run.evaluated({"step": 3, "eval/clip": 0.5, "eval_gain/clip": -0.01, "eval_gain_se/clip": 0.003})
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == "" and len(lines) == 4 and lines[0] == "samples [written]"
    assert lines[1].startswith("iteration 2/4  verifier 0.2000 (+0.1000)  NFE/s ")
    assert lines[2].startswith("iteration 3/4  verifier 0.3000 (+0.2000)  invalid 25.0%  NFE/s ")
    assert "  GPU 1.3 GB  left " in lines[2]
    assert lines[3] == "evaluation after iteration 3: clip 0.5000 (-0.0100 ± 0.0030)"


def test_forwards_and_time_count_since_the_resume(recorded):
    now = [100.0]
    run = RunProgress(13, done=10, clock=lambda: now[0])
    now[0] += 50  # one iteration of 50 s with 100 forwards; two are left
    run.update(line(11))
    status, iteration = recorded.states[-1]
    assert iteration and (status.nfe_per_second, status.seconds_left) == (2.0, 100.0)


def test_what_comes_once_before_the_first_iteration_does_not_count(recorded):
    now = [100.0]
    run = RunProgress(4, clock=lambda: now[0])
    now[0] += 1000 + 50  # images before training, then an iteration of 50 s
    run.update({**line(1), "seconds": 50.0})
    now[0] += 70  # the next took 50 s, an evaluation 20 s: that comes again
    run.update({**line(2), "seconds": 50.0})
    first, second = (status for status, iteration in recorded.states if iteration)
    assert (first.nfe_per_second, first.seconds_left) == (2.0, 150.0)
    assert second.seconds_left == 120.0


def test_changes_are_since_the_first_iteration_with_a_score(recorded):
    run = RunProgress(5)
    run.update(line(1) | {"reward/verifier": float("nan")})
    run.update(line(2))
    run.update(line(4))
    changes = [status.rewards["verifier"][1] for status, iteration in recorded.states if iteration]
    assert changes == [None, 0.0, pytest.approx(0.2)]
    resumed = RunProgress(9, done=2, metrics=[line(1) | {"reward/verifier": None}, line(2)])
    resumed.update(line(5))
    assert recorded.states[-1][0].rewards["verifier"][1] == pytest.approx(0.3)


@pytest.mark.parametrize(
    "gain, error, text",
    [
        (0.01, 0.003, "clip 0.5000 (+0.0100 ± 0.0030)"),
        (0.01, math.nan, "clip 0.5000 (+0.0100)"),  # one image
        (math.nan, math.nan, "clip 0.5000"),  # no image has a score before and after
        (None, None, "clip 0.5000"),
    ],
)
def test_an_evaluation_shows_only_numbers(gain, error, text):
    assert RunStatus(1, 2, evaluations={"clip": (0.5, gain, error)}).evaluation_cells() == [text]
    assert RunStatus(1, 2, evaluations={"clip": (math.nan, gain, error)}).evaluation_cells() == [
        "clip no score"
    ]


def test_counting_costs_nothing():
    began = time.perf_counter()
    with phase("rollout", 100_000, "forwards") as rollout:
        for _ in range(100_000):
            rollout.add()
    assert (time.perf_counter() - began) / 100_000 < 20e-6  # a forward of the embedded model takes 10 ms


def test_times_and_rates():
    assert [format_seconds(s) for s in (0, 59.4, 61, 3599.6, 7620)] == [
        "0 s",
        "59 s",
        "1 min 01 s",
        "1 h 00 min",
        "2 h 07 min",
    ]
    assert [progress.format_rate(rate) for rate in (0.0312, 0.5, 3.14, 812.3)] == [
        "0.031",
        "0.5",
        "3.1",
        "812",
    ]
