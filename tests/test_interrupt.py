"""One request to stop that comes twice, and a second one: nothing half done is ever saved."""

import signal

import pytest
import torch
from test_trainer import SMALL, timeless

import g2rpo
from g2rpo import interrupt as interrupt_module
from g2rpo import trainer
from g2rpo.checkpoint import latest_checkpoint
from g2rpo.interrupt import interruptible
from g2rpo.update import holding


@pytest.fixture
def every_signal_counts(monkeypatch):
    monkeypatch.setattr(interrupt_module, "ONE_REQUEST", 0.0)


def test_one_request_may_come_by_two_ways():
    with interruptible() as interrupt:
        with interrupt.deferred():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
        assert interrupt.asked
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGTERM)


def test_nor_does_its_second_way_cut_off_what_the_first_began():
    done = []
    with interruptible():
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGTERM)
            done.append("saved")
    assert done == ["saved"]


def test_a_second_request_ends_what_waits(every_signal_counts):
    with interruptible() as interrupt, interrupt.deferred():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


class Signalled:
    """A context manager that is signalled while it is entered, or left."""

    def __init__(self, when):
        self.when, self.past = when, []

    def __enter__(self):
        if self.when == "entered":
            signal.raise_signal(signal.SIGINT)
        self.past.append("entered")

    def __exit__(self, *error):
        if self.when == "left":
            signal.raise_signal(signal.SIGINT)
        self.past.append("left")


@pytest.mark.parametrize("when", ["entered", "within", "left"])
def test_around_another_manager_a_signal_waits_but_not_within_it(when):
    manager, reached, ended = Signalled(when), [], False
    with interruptible() as interrupt:
        try:
            with interrupt.around(manager):
                reached.append("within")
                if when == "within":
                    signal.raise_signal(signal.SIGINT)
                    reached.append("after it")
        except KeyboardInterrupt:
            ended = True
    assert manager.past == ["entered", "left"] and interrupt.asked
    assert reached == ([] if when == "entered" else ["within"]) and ended == (when != "left")


def test_weights_that_were_lent_half_come_back():
    """A signal between two of the weights, while the averaged ones take the place of the trained ones."""

    class Values(dict):
        def items(self):
            yield from list(super().items())[:1]
            raise KeyboardInterrupt

    parameters = {name: torch.nn.Parameter(torch.zeros(2)) for name in "ab"}
    means = Values({name: torch.ones(2) for name in "ab"})
    with pytest.raises(KeyboardInterrupt), holding(parameters, means):
        raise AssertionError("not reached")
    assert not any(p.any() for p in parameters.values())


@pytest.fixture
def run(tmp_path):
    def train(out="run", **changes):
        values = SMALL | {"cache": str(tmp_path / "cache"), "out": str(tmp_path / out)} | changes
        return g2rpo.train("tiny", **values)

    return train


@pytest.mark.parametrize("way", ["one request by two ways", "two requests"])
@pytest.mark.parametrize("moment", ["update", "checkpoint"])
def test_a_run_that_was_signalled_twice_goes_on_with_the_same_numbers(run, monkeypatch, way, moment):
    """In iteration 2, between its two optimizer steps, or while its checkpoint is written."""
    settings = {"iterations": 3, "update": "per_step", "checkpoint_every": 1 if moment == "checkpoint" else 9}
    whole = run("whole", **settings)
    if way == "two requests":
        monkeypatch.setattr(interrupt_module, "ONE_REQUEST", 0.0)
    place, name, nth = {
        "update": (torch.nn.utils, "clip_grad_norm_", 4),
        "checkpoint": (trainer, "save_checkpoint", 2),
    }[moment]
    original, calls = getattr(place, name), []

    def signalled(*given, **options):
        calls.append(1)
        if len(calls) == nth:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        return original(*given, **options)

    monkeypatch.setattr(place, name, signalled)
    stopped = run(**settings)
    monkeypatch.setattr(place, name, original)
    saved = latest_checkpoint(stopped.out)
    assert stopped.interrupted and not stopped.finished
    assert stopped.step == (int(saved.name[-6:]) if saved else 0)
    if way == "one request by two ways":
        assert stopped.step == 2
    elif moment == "update":
        assert stopped.step == 0  # half an update is none, and there was no checkpoint before
    done = run(**settings)
    assert done.finished and timeless(done.metrics) == timeless(whole.metrics)
