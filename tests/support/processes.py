"""Starts the processes of a run as torchrun does, and `g2rpo` commands, by forking a server with all imports.

Imports take 8 s per process, which is longer than a tiny run.
"""

import gc
import multiprocessing
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "g2rpo.training.trainer",
        "g2rpo.__main__",
        "diffusers.models.transformers.transformer_flux",
        "diffusers.models.autoencoders.autoencoder_kl",
        "peft",
        "transformers.models.clip.modeling_clip",
        "transformers.models.t5.modeling_t5",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "g2rpo.models.flux.policy",
        "g2rpo.rewards.tiny_clip",
        "g2rpo.costs.estimate",
        "g2rpo.evaluation.evaluate",
        "g2rpo.exporters.export",
        "g2rpo.report.page",
    ]
)
TIMEOUT_SECONDS = 120


def run_processes(count: int, function: Callable[..., None], *arguments, log: Path) -> list[tuple[int, str]]:
    """Runs `function` in the processes of a run.

    Args:
        count: number of processes.
        function: function that every process calls with `arguments`; it must be importable.
        log: folder for the output of the processes.

    Returns:
        Exit code and output of each process; the exit code is -9 for one that was killed after the timeout.
    """
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    log.mkdir(parents=True, exist_ok=True)
    logs = [log / f"process_{rank}.txt" for rank in range(count)]
    processes = [
        FORKS.Process(target=_start, args=(rank, count, port, logs[rank], function, arguments))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [(process.exitcode, file.read_text()) for process, file in zip(processes, logs, strict=True)]


def _start(rank, count, port, log, function, arguments) -> None:
    gc.freeze()  # the garbage collector need not visit, and so copy, the objects that the server has imported
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    function(*arguments)


def train_as(recipe: str, *changes: str) -> None:
    """Calls `train` with a recipe and the overrides of a command line; for `run_processes`."""
    import torch

    from g2rpo.config.load import load_settings
    from g2rpo.training.trainer import train

    torch.compile = lambda function, **options: function  # torchao's step; compiling needs a C++ compiler
    train(load_settings(recipe, list(changes)))


def run_command(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Runs `g2rpo WORDS` in a separate process.

    Args:
        words: arguments of the command.
        cwd: working directory; None: the current one.
        environment: additional environment variables.

    Returns:
        Exit code, stdout and stderr; the exit code is -9 for a process that was killed after the timeout.
    """
    with started_command(*words, cwd=cwd, **environment) as started:
        return started.wait()


class StartedCommand:
    """A `g2rpo` command at work in a process of its own."""

    def __init__(self, words: tuple[str, ...], cwd: Path, environment: dict[str, str], folder: Path) -> None:
        """Starts it; stdout and stderr are collected in `folder`."""
        self._words, self._files = words, [folder / name for name in ("stdout", "stderr")]
        self._process = FORKS.Process(target=_command, args=(words, cwd, environment, self._files))
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it is at work; -N if signal N ended it."""
        return self._process.exitcode

    def kill(self) -> None:
        """Ends it by SIGKILL, if it is still at work."""
        self._process.kill()
        self._process.join()

    def wait(self) -> subprocess.CompletedProcess:
        """Waits until it has ended; returns exit code, stdout and stderr.

        The exit code is -9 for a process that was killed after the timeout.
        """
        self._process.join(TIMEOUT_SECONDS)
        if self._process.exitcode is None:
            self.kill()
        texts = [file.read_text(encoding="utf-8") if file.exists() else "" for file in self._files]
        return subprocess.CompletedProcess(self._words, self._process.exitcode, *texts)


@contextmanager
def started_command(*words: str, cwd: Path | None = None, **environment: str) -> Iterator[StartedCommand]:
    """Starts `g2rpo WORDS` in a separate process, for tests that act on it while it works.

    At the end of the context it is killed if it is still at work. Arguments as for `run_command`.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = StartedCommand(words, cwd or Path.cwd(), environment, Path(folder))
        try:
            yield started
        finally:
            started.kill()


def _command(words, cwd, environment, files) -> None:
    import sys

    gc.freeze()  # as in `_start`
    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(cwd)
    os.environ |= environment
    # As for an installed script, neither the current folder nor that of the tests is searched for modules.
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry) != Path(__file__).parents[1]]
    sys.argv = ["g2rpo", *words]
    from g2rpo.__main__ import app

    app(prog_name="g2rpo")


def command_as(*words: str) -> None:
    """`g2rpo WORDS` in this process, one of several."""
    from g2rpo.__main__ import app

    app(list(words), prog_name="g2rpo")
