"""`g2rpo` as a process: stop signals, a closed output, encodings, no home, closed descriptors."""

import io
import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from support.processes import FORKS, TIMEOUT_SECONDS, run_processes
from support.small_runs import SMALL, quiet, timeless

from g2rpo.cli.process import find_a_home, find_writable_caches
from g2rpo.cli.streams import ERRORS, guarded, nearest
from g2rpo.run.folder import latest_checkpoint
from g2rpo.run.metrics import read_metrics
from g2rpo.runtime.stop_signals import SPARE_COPIES, STOP_SIGNALS

ROOT = Path(__file__).parents[2]
TEXTS = ["a red circle … ±3 × “two” é", "ein blauer Stern, größer als rot", "一个红色的圆圈"]


def train_words(tmp_path, out="run", **changes):
    values = {**SMALL, "iterations": 3, "checkpoint_every": 9, "rewards": "{colourfulness=1.0}"} | changes
    values |= {"granularities": "[1]"}
    words = [f"{key}={value}" for key, value in values.items()]
    return ["train", "tiny", *words, f"cache={tmp_path / 'cache'}", f"out={tmp_path / out}"]


def stopped_run(number: int, moment: str, *words: str) -> None:
    """`g2rpo WORDS`, which receives the signal several times: in iteration 2, and while it leaves."""
    from g2rpo.__main__ import app
    from g2rpo.training import trainer

    learn, load = trainer.Trainer.learn, trainer.load_policy

    def signalled(self, *given):
        metrics = learn(self, *given)
        if self.step == 2 and moment == "iteration 2":
            for _ in range(SPARE_COPIES):
                os.kill(os.getpid(), number)
        return metrics

    def signalled_at_start(*given, **options):
        if moment == "start":
            os.kill(os.getpid(), number)
        return load(*given, **options)

    trainer.Trainer.learn, trainer.load_policy = signalled, signalled_at_start
    exclusive = trainer.exclusive

    class Leaving:
        def __init__(self, out):
            self.lock = exclusive(out)

        def __enter__(self):
            return self.lock.__enter__()

        def __exit__(self, *error):
            self.lock.__exit__(*error)
            os.kill(os.getpid(), number)

    if moment == "iteration 2":
        trainer.exclusive = Leaving
    try:
        app(list(words), prog_name="g2rpo")
    finally:
        if moment != "never":
            os.kill(os.getpid(), number)  # as the interpreter exits


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The metrics of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    [(code, output)] = run_processes(1, stopped_run, 0, "never", *train_words(folder), log=folder / "log")
    assert code == 0, output
    return timeless(read_metrics(folder / "run" / "metrics.jsonl"))


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGUSR1,
        *(
            pytest.param(number, marks=pytest.mark.long)
            for number in STOP_SIGNALS
            if number != signal.SIGUSR1
        ),
    ],
    ids=lambda number: number.name,
)
def test_a_signal_with_its_copies_leaves_a_checkpoint(tmp_path, undisturbed, number):
    words = train_words(tmp_path)
    [(code, output)] = run_processes(1, stopped_run, number, "iteration 2", *words, log=tmp_path / "log")
    assert code == 130 and "Traceback" not in output, output
    assert output.count(f"{number.name}: stopping; finished work is kept.") == 1
    assert "interrupted; 2 iterations are saved" in output
    assert latest_checkpoint(tmp_path / "run").name == "step_000002"
    [(code, output)] = run_processes(1, stopped_run, number, "never", *words, log=tmp_path / "log")
    assert code == 0, output
    assert timeless(read_metrics(tmp_path / "run" / "metrics.jsonl")) == undisturbed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_signal_before_the_first_iteration_is_one_line(tmp_path, number):
    words = train_words(tmp_path)
    [(code, output)] = run_processes(1, stopped_run, number, "start", *words, log=tmp_path / "log")
    assert code == 130 and f"stopped by {number.name}; run the same command again" in output
    assert "Traceback" not in output and not (tmp_path / "run").exists()


def piped(number, *words: str) -> None:
    """`g2rpo WORDS`, with a reader that leaves after the first line of its stdout or stderr."""
    from g2rpo.__main__ import app

    read, write = os.pipe()
    os.dup2(write, number)
    os.close(write)
    from g2rpo.runtime.progress import RunProgress

    update = RunProgress.update

    def read_first(self, metrics):
        if metrics["step"] == 2:
            os.close(read)
        update(self, metrics)

    RunProgress.update = read_first
    app(list(words), prog_name="g2rpo")


def test_a_closed_pipe_leaves_a_checkpoint(tmp_path, undisturbed):
    words = train_words(tmp_path)
    [(code, output)] = run_processes(1, piped, 1, *words, log=tmp_path / "log")
    assert code == 130 and len(output.splitlines()) == 1
    assert output.startswith("closed output: stopping; finished work is kept."), output
    assert latest_checkpoint(tmp_path / "run").name == "step_000002"
    assert timeless(read_metrics(tmp_path / "run" / "metrics.jsonl")) == undisturbed[:2]


def test_a_short_command_into_a_closed_pipe_ends_silently():
    command = [sys.executable, "-m", "g2rpo", "train", "--help"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=quiet(), cwd=ROOT)
    os.close(write)
    assert done.returncode in (0, 130) and done.stderr == ""


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii", ['a red circle ... +-3 x "two" e', "ein blauer Stern, gro?er als rot", "????????"]),
        ("latin-1", ['a red circle ... ±3 × "two" é', TEXTS[1], "????????"]),
        ("cp1252", [TEXTS[0], TEXTS[1], "????????"]),
        ("gb18030", TEXTS),
        ("utf-8", TEXTS),
    ],
)
def test_what_an_encoding_lacks_is_replaced(encoding, expected, tmp_path):
    assert [nearest(text, encoding) for text in TEXTS] == [
        *expected[:2],
        TEXTS[2] if expected[2] == TEXTS[2] else "?" * len(TEXTS[2]),
    ]
    file = tmp_path / "output"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    stream = guarded(io.StringIO(), descriptor, encoding)
    print(TEXTS[0], "\udcff", file=stream, flush=True)
    os.close(descriptor)
    assert file.read_text(encoding) == f"{expected[0]} ?\n" and stream.errors == ERRORS


@pytest.mark.parametrize("locale", ["C", pytest.param("POSIX", marks=pytest.mark.long)])
@pytest.mark.long
def test_an_ascii_terminal_changes_no_file(tmp_path, locale):
    """Prompts from the command line and from a file, into a folder with a name that is not ASCII."""
    (tmp_path / "p.txt").write_text("\n".join(TEXTS[1:]), "utf-8")
    words = ["sample", "tiny", "--prompt", TEXTS[0], "--prompts", "p.txt", "--steps", "2", "--out", "größe"]
    done = subprocess.run(
        [sys.executable, "-m", "g2rpo", *words],
        cwd=tmp_path,
        env={**quiet(), "PYTHONPATH": str(ROOT), "LC_ALL": locale, "PYTHONUTF8": "0"},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and b"groe?" not in done.stdout and b"gro?e" in done.stdout
    files = sorted((tmp_path / "größe").glob("0*.png"))
    assert [Image.open(file).text["prompt"] for file in files] == TEXTS


def test_bytes_that_are_no_text_are_one_message(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "g2rpo", "plan", "tiny", b"out=gr\xf6sse"],
        env={**quiet(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "error: argument 3, out=gr\\xf6sse, is not text in utf-8" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_docstrings_are_one_message():
    """transformers reads its own, and fails where `python -OO` has removed them."""
    done = subprocess.run(
        [sys.executable, "-m", "g2rpo", "plan", "tiny"],
        env={**quiet(), "PYTHONPATH": str(ROOT), "PYTHONOPTIMIZE": "2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.startswith("error: Python runs with -OO (PYTHONOPTIMIZE=2)")
    assert done.stderr.count("\n") == 1


def test_a_standard_stream_that_a_reward_closes_stays_open(tmp_path):
    with open(tmp_path / "out", "w") as file:
        stream = guarded(file, file.fileno())
        stream.write("before ")
        stream.close()
        stream.write("after")
        stream.flush()
    assert (tmp_path / "out").read_text() == "before after"


def closed_and_homeless(words, cwd, files) -> None:
    """`g2rpo WORDS` of a user without name and home, with stdin closed, and stdout if it has no file."""
    os.close(0)
    for number, path in enumerate(files, start=1):
        os.close(number)
        if path is not None:
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ["TMPDIR"] = str(cwd)
    pwd.getpwuid = lambda uid: {}[uid]  # as for a uid that the password file lacks
    from g2rpo.__main__ import app

    if files[0] is None:
        sys.stdout = None
    app(words, prog_name="g2rpo")


def test_a_user_without_home_and_closed_descriptors(tmp_path):
    words = train_words(tmp_path, iterations=1, loggers="tensorboard")
    process = FORKS.Process(target=closed_and_homeless, args=(words, tmp_path, [None, tmp_path / "stderr"]))
    process.start()
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode == 0, (tmp_path / "stderr").read_text()
    assert latest_checkpoint(tmp_path / "run").name == "step_000001"
    assert (tmp_path / "run" / "curve.png").is_file() and not (tmp_path / "~").exists()
    assert (tmp_path / "stderr").read_text() == ""


def test_a_home_is_taken_from_the_password_file_or_made(tmp_path, monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("HOME", "")
    find_a_home()
    assert os.environ["HOME"] == pwd.getpwuid(os.getuid()).pw_dir
    monkeypatch.setenv("HOME", "")
    monkeypatch.delenv("USER", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    (tmp_path / f"g2rpo-home-{os.getuid()}").symlink_to("/")  # planted by another user
    find_a_home()
    home = Path(os.environ["HOME"])
    assert home.parent == tmp_path and not home.is_symlink() and home.stat().st_mode & 0o777 == 0o700
    assert os.environ["USER"] == str(os.getuid())
    monkeypatch.delenv("USER")


def test_a_read_only_cache_of_compiled_code_is_moved(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    writable = tmp_path / "writable"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(writable))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/1/nowhere")
    find_writable_caches()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(writable)
    assert Path(os.environ["TRITON_CACHE_DIR"]).is_relative_to(tmp_path)
    assert "note: TRITON_CACHE_DIR=/proc/1/nowhere is not writable; using" in capsys.readouterr().err
