"""Jobs: progress, order, cancellation between steps, and errors as messages."""

import threading
import time

import pytest

from g2rpo.web.jobs import Cancelled, Done, Jobs, Progress, messages, status_html


@pytest.fixture
def jobs():
    made = Jobs()
    yield made
    made.close()


def wait_for(condition, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def steps(count: int, gate: threading.Semaphore, done: list[int]):
    """Work of `count` steps, each of which waits for the gate."""

    def work(job):
        for k in range(count):
            job.report(k, count, "denoising step")
            assert gate.acquire(timeout=20)
            done.append(k)
        return "finished"

    return work


def test_progress_and_result(jobs):
    gate, done = threading.Semaphore(100), []
    *progress, last = jobs.run(steps(3, gate, done))
    assert isinstance(last, Done) and last.value == "finished" and done == [0, 1, 2]
    assert all(isinstance(event, Progress) for event in progress)


def test_progress_is_counted(jobs):
    gate, done = threading.Semaphore(0), []
    running = jobs.run(steps(4, gate, done))
    assert next(event for event in running if event.total).done == 0
    gate.release(2)
    event = next(event for event in running if event.done == 2)
    assert event.text.startswith("denoising step 2 of 4, ")
    running.close()
    gate.release()


def test_closing_stops_between_steps(jobs):
    gate, done = threading.Semaphore(0), []
    running = jobs.run(steps(1000, gate, done))
    next(event for event in running if event.total)
    running.close()
    gate.release(1000)
    assert list(jobs.run(lambda job: "next"))[-1].value == "next"
    assert len(done) == 1  # the step that was being computed


def test_a_waiting_job_that_is_cancelled_never_starts(jobs):
    gate, done, other = threading.Semaphore(0), [], []
    first = jobs.run(steps(1, gate, done))
    next(event for event in first if event.total)
    second = jobs.run(lambda job: other.append(1))
    assert next(second).activity == "waiting"
    second.close()
    gate.release()
    assert list(first)[-1].value == "finished"
    assert list(jobs.run(lambda job: 3))[-1].value == 3 and not other


def test_jobs_run_one_at_a_time(jobs):
    active, most, lock = [0], [0], threading.Lock()

    def work(job):
        with lock:
            active[0] += 1
            most[0] = max(most[0], active[0])
        time.sleep(0.02)
        with lock:
            active[0] -= 1

    users = [threading.Thread(target=lambda: list(jobs.run(work))) for _ in range(6)]
    for user in users:
        user.start()
    for user in users:
        user.join(30)
    assert most[0] == 1 and active[0] == 0


def test_close_stops_the_running_job():
    jobs, gate, done = Jobs(), threading.Semaphore(0), []
    running = jobs.run(steps(1000, gate, done))
    next(event for event in running if event.total)
    gate.release(1)
    closing = threading.Thread(target=jobs.close)
    closing.start()
    gate.release(1)
    closing.join(20)
    assert not closing.is_alive() and len(done) < 5
    with pytest.raises(Cancelled):
        list(running)


def test_errors_of_the_work_are_raised(jobs):
    def work(job):
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        list(jobs.run(work))
    assert list(jobs.run(lambda job: 1))[-1].value == 1


def test_messages_are_escaped_and_carry_no_traceback():
    gradio = pytest.importorskip("gradio")
    with pytest.raises(gradio.Error) as caught, messages():
        raise ValueError("bad prompt <img src=x onerror=alert(1)>")
    assert caught.value.message == "bad prompt &lt;img src=x onerror=alert(1)&gt;"
    assert not caught.value.print_exception


def test_unexpected_errors_say_where_to_look(caplog):
    gradio = pytest.importorskip("gradio")
    with pytest.raises(gradio.Error) as caught, messages():
        raise RuntimeError("secret inner state")
    assert "secret" not in caught.value.message and "terminal" in caught.value.message
    assert "secret inner state" in caplog.text


def test_the_status_escapes_its_text():
    line = status_html("<b>x</b>", Progress(1, 2, '"quoted"', 0.0))
    assert "<b>" not in line and "&lt;b&gt;" in line and 'max="2" value="1"' in line
    assert 'aria-label="&quot;quoted&quot;"' in line
