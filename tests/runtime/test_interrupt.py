"""Stop requests that are repeated, and second requests: nothing incomplete is ever saved."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import types
from contextlib import contextmanager

import pytest
import torch
from support.small_runs import SMALL, quiet, timeless, wait_for

import g2rpo
from g2rpo.models.flux.policy import FluxPolicy
from g2rpo.run.checkpoint import save_checkpoint
from g2rpo.run.checkpoint_index import TensorWriter
from g2rpo.run.folder import latest_checkpoint
from g2rpo.runtime.interrupt import interruptible, undisturbed
from g2rpo.runtime.stop_signals import (
    SPARE_COPIES,
    SPARE_COPIES_IN_JOBS,
    STOP_SIGNALS,
    command_signals,
    request_stop,
)
from g2rpo.training import trainer
from g2rpo.training.ema import swapped_weights

SECOND_REQUEST = [signal.SIGINT] * (SPARE_COPIES + 1)
EVERY_SIGNAL = pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)


@pytest.fixture
def default_handlers():
    """Those of a fresh process, whatever started the tests."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOP_SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@EVERY_SIGNAL
def test_every_stop_signal_is_a_request(number, default_handlers, capfd):
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(number)
    with interruptible() as interrupt, interrupt.deferred():
        signal.raise_signal(number)
        assert interrupt.requested
    assert capfd.readouterr().err.count(f"{number.name}: stopping; finished work is kept.") == 2


@pytest.mark.parametrize("number", STOP_SIGNALS[1:], ids=lambda number: number.name)
def test_programs_may_repeat_their_signal_at_any_time(number, default_handlers):
    with interruptible() as interrupt:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:  # noticed: the checkpoint is being written
            for _ in range(50):
                signal.raise_signal(number)
        else:
            raise AssertionError("not interrupted")
    assert interrupt.requested and not interrupt.requested_again


@EVERY_SIGNAL
def test_the_spare_copies_of_ctrl_c_are_answered_and_the_next_one_is_a_second_request(
    number, default_handlers, capfd
):
    with interruptible() as interrupt, interrupt.deferred():
        signal.raise_signal(number)
        for left in range(SPARE_COPIES, 0, -1):
            said = capfd.readouterr().err
            assert f"press Ctrl-C {left + 1} more times" in said
            signal.raise_signal(signal.SIGINT)
            assert not interrupt.requested_again
        assert "press Ctrl-C once more" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert interrupt.requested_again


def test_in_a_job_more_of_them_may_be_copies(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with interruptible() as interrupt, interrupt.deferred():
        for _ in range(1 + SPARE_COPIES_IN_JOBS):
            signal.raise_signal(signal.SIGINT)
        assert interrupt.requested and not interrupt.requested_again
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_clock_plays_no_part(monkeypatch):
    """Copies of a request that arrive a day apart, as on a process that was suspended in between."""
    days = itertools.count(0.0, 86400.0)
    for name in ("monotonic", "time", "perf_counter", "process_time"):
        monkeypatch.setattr(f"time.{name}", lambda: next(days))
    with interruptible() as interrupt, interrupt.deferred():
        for _ in range(1 + SPARE_COPIES):
            signal.raise_signal(signal.SIGINT)
        assert not interrupt.requested_again


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2], ids=lambda n: n.name)
def test_what_the_caller_ignores_or_handles_stays_so(number, default_handlers):
    """`nohup` ignores SIGHUP; submitit and others requeue a job at SIGUSR2."""
    signal.signal(number, signal.SIG_IGN)
    with interruptible() as interrupt:
        signal.raise_signal(number)
    arrived = []
    signal.signal(number, lambda *given: arrived.append(given))
    with command_signals(), interruptible():
        signal.raise_signal(number)
    assert arrived and not interrupt.requested


def test_after_the_work_signals_are_the_callers_again(default_handlers):
    with interruptible() as interrupt, interrupt.deferred():
        signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == [
        signal.default_int_handler,
        *[signal.SIG_DFL] * (len(STOP_SIGNALS) - 1),
    ]


@EVERY_SIGNAL
def test_a_command_is_stopped_outside_of_its_work_as_well_but_once(number, default_handlers):
    with pytest.raises(KeyboardInterrupt), command_signals() as stop, command_signals():
        signal.raise_signal(number)
    assert stop.cause == number.name
    with command_signals() as stop:
        with interruptible() as interrupt, interrupt.deferred():
            signal.raise_signal(number)
        for copy in STOP_SIGNALS:  # while the command prints where the run is
            signal.raise_signal(copy)
    assert interrupt.requested and stop.cause == number.name
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with command_signals(process_ends=True), interruptible() as interrupt, interrupt.deferred():
        signal.raise_signal(number)
    assert {signal.getsignal(copy) for copy in STOP_SIGNALS} == {signal.SIG_IGN}


def test_a_request_of_another_thread_has_its_own_cause(default_handlers, capfd):
    with interruptible() as interrupt, interrupt.deferred():
        thread = threading.Thread(target=request_stop, args=("full moon",))
        thread.start()
        thread.join()
        wait_for(lambda: interrupt.requested, 10)
    assert capfd.readouterr().err.startswith("full moon: stopping")


def test_only_the_first_process_of_a_run_prints(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    with interruptible() as interrupt, interrupt.deferred():
        signal.raise_signal(signal.SIGINT)
    assert interrupt.requested and not capfd.readouterr().err


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
    assert manager.past == ["entered", "left"] and interrupt.requested
    assert reached == ([] if when == "entered" else ["within"]) and ended == (when != "left")


def test_undisturbed_is_around_what_is_going_on():
    outside, within = Signalled("never"), Signalled("left")
    with undisturbed(outside):
        pass
    with interruptible() as interrupt:
        with undisturbed(within):
            pass
        assert interrupt.requested
    assert outside.past == within.past == ["entered", "left"]


def test_weights_that_were_lent_half_come_back():
    """A signal between two of the weights, while the averaged ones replace the trained ones."""

    class Values(dict):
        def items(self):
            yield from list(super().items())[:1]
            raise KeyboardInterrupt

    parameters = {name: torch.nn.Parameter(torch.zeros(2)) for name in "ab"}
    means = Values({name: torch.ones(2) for name in "ab"})
    with pytest.raises(KeyboardInterrupt), swapped_weights(parameters, means):
        raise AssertionError("not reached")
    assert not any(p.any() for p in parameters.values())


@pytest.fixture
def run(tmp_path):
    def train(out="run", **changes):
        values = SMALL | {"cache": str(tmp_path / "cache"), "out": str(tmp_path / out)} | changes
        return g2rpo.train("tiny", **values)

    return train


@pytest.mark.parametrize(
    ("moment", "way"),
    [
        pytest.param("update", "two requests", marks=pytest.mark.long),
        pytest.param("update", "one request by two ways", marks=pytest.mark.long),
        pytest.param("checkpoint", "two requests", marks=pytest.mark.long),
        ("checkpoint", "one request by two ways"),
    ],
)
def test_a_run_that_was_signalled_twice_goes_on_with_the_same_numbers(run, monkeypatch, way, moment):
    """In iteration 2, between its two optimizer steps, or while its checkpoint is written."""
    settings = {"iterations": 3, "update": "per_step", "checkpoint_every": 1 if moment == "checkpoint" else 9}
    uninterrupted = run("uninterrupted", **settings)
    copies = SECOND_REQUEST if way == "two requests" else [signal.SIGTERM, signal.SIGINT]
    owner, name, nth = {
        "update": (torch.nn.utils, "clip_grad_norm_", 4),
        "checkpoint": (trainer, "save_checkpoint", 2),
    }[moment]
    original, calls = getattr(owner, name), []

    def signalled(*given, **options):
        calls.append(1)
        if len(calls) == nth:
            for number in (signal.SIGTERM, *copies):
                signal.raise_signal(number)
        return original(*given, **options)

    monkeypatch.setattr(owner, name, signalled)
    stopped = run(**settings)
    monkeypatch.setattr(owner, name, original)
    saved = latest_checkpoint(stopped.out)
    assert stopped.interrupted and not stopped.finished
    assert stopped.step == (int(saved.name[-6:]) if saved else 0)
    # Half an update is none, nor is a checkpoint begun anew: what was there before counts.
    before = {"update": 0, "checkpoint": 1}
    assert stopped.step == (2 if way == "one request by two ways" else before[moment])
    done = run(**settings)
    assert done.finished and timeless(done.metrics) == timeless(uninterrupted.metrics)


def test_a_second_request_gets_through_torchs_writer(tmp_path, monkeypatch):
    def cut_off(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(TensorWriter, "write_data", cut_off)
    module = torch.nn.Linear(2, 2)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 1, {"module": module, "optimizer": torch.optim.AdamW(module.parameters())})
    assert latest_checkpoint(tmp_path) is None


def test_float32_weights_come_back_after_an_evaluation_that_was_cut_off(run, monkeypatch):
    resident, gone, back = FluxPolicy.resident, [], []

    @contextmanager
    def signalled(self):
        with resident(self):
            gone.append(1)
            try:
                yield
            finally:
                if len(gone) == 2:  # the evaluation of step 0; the first draws the grid
                    signal.raise_signal(signal.SIGINT)
                back.append(1)

    monkeypatch.setattr(FluxPolicy, "resident", signalled)
    stopped = run(iterations=1, eval_every=1, eval_prompts="world:heldout", num_eval_prompts=1)
    assert stopped.interrupted and len(gone) == len(back) >= 2


@pytest.mark.long
def test_a_reward_that_draws_numbers_draws_the_same_after_an_abandoned_rollout(run, monkeypatch):
    module = types.ModuleType("drawing")

    def random_scores(images, prompts, metadata):
        scores = torch.rand(len(images))
        if module.calls.append(1) or len(module.calls) == module.signalled:
            signal.raise_signal(signal.SIGINT)
        return scores

    module.random_scores, module.calls, module.signalled = random_scores, [], 0
    monkeypatch.setitem(sys.modules, "drawing", module)
    settings = {"rewards": {"drawing:random_scores": 1.0}, "iterations": 2}
    uninterrupted = run("uninterrupted", **settings)
    module.signalled = len(module.calls) + len(module.calls)  # the last of as many again: in iteration 2
    stopped, done = run(**settings), run(**settings)
    assert stopped.interrupted and stopped.step == 1
    assert timeless(done.metrics) == timeless(uninterrupted.metrics)


@pytest.mark.long
def test_compare_under_timeout_waits_for_its_runs_checkpoints(tmp_path):
    """`timeout` signals the command and its group: the server of its runs, too, which is in that group."""
    small = [f"{key}={value}" for key, value in SMALL.items() if key not in ("rewards", "granularities")]
    small += ["granularities=[1]", "iterations=500", f"cache={tmp_path / 'cache'}", "checkpoint_every=500"]
    small += ["--seeds", "0,1", "--jobs", "2", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "g2rpo", "compare", "tiny", *small]
    # Slow disks: who does not wait for its runs is gone before they have written.
    slow = "import os, time\nsync = os.fsync\nos.fsync = lambda file: (time.sleep(0.4), sync(file))[1]\n"
    (tmp_path / "sitecustomize.py").write_text(slow)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**quiet(), "PYTHONPATH": path}, start_new_session=True
        )
    runs = [tmp_path / "out" / "runs" / "tiny" / seed for seed in "01"]
    metrics = [run / "metrics.jsonl" for run in runs]
    wait_for(
        lambda: (
            process.poll() is not None or all(file.exists() and "nfe" in file.read_text() for file in metrics)
        )
    )
    process.terminate()
    os.killpg(process.pid, signal.SIGTERM)
    code = process.wait(120)
    written = [latest_checkpoint(run) for run in runs]
    assert code == 130 and all(written), (tmp_path / "output").read_text()
    assert "run the same command to continue" in (tmp_path / "output").read_text()
