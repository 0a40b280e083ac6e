"""Processes of one run as torchrun starts them, forked from one that has imported everything.

Imports take 8 s a process, a tiny run takes less.
"""

import multiprocessing
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "g2rpo.training.trainer",
        "g2rpo.__main__",
        "diffusers.models.transformers.transformer_flux",
        "diffusers.models.autoencoders.autoencoder_kl",
        "peft",
    ]
)
SECONDS = 120


def run_processes(count: int, function: Callable[..., None], *arguments, log: Path) -> list[tuple[int, str]]:
    """Exit code and output of each of `count` processes; -9 of one that hung and was killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log.mkdir(parents=True, exist_ok=True)
    logs = [log / f"process_{rank}.txt" for rank in range(count)]
    processes = [
        FORKS.Process(target=_start, args=(rank, count, port, logs[rank], function, arguments))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + SECONDS
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [(process.exitcode, file.read_text()) for process, file in zip(processes, logs, strict=True)]


def _start(rank, count, port, log, function, arguments) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    function(*arguments)


def train_as(recipe: str, *changes: str) -> None:
    """`train` with the overrides of a command line."""
    import torch

    from g2rpo.config.load import load_settings
    from g2rpo.training.trainer import train

    torch.compile = lambda function, **options: function  # torchao's step; compiling needs a C++ compiler
    train(load_settings(recipe, list(changes)))


def run_command(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """`g2rpo WORDS` in a process of its own: exit code, stdout and stderr."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        process = FORKS.Process(target=_command, args=(words, cwd or Path.cwd(), environment, files))
        process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
        texts = [file.read_text(encoding="utf-8") if file.exists() else "" for file in files]
    return subprocess.CompletedProcess(words, process.exitcode, *texts)


def _command(words, cwd, environment, files) -> None:
    import sys

    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(cwd)
    os.environ |= environment
    # As an installed script has it: neither the current folder nor that of the tests is searched for modules.
    sys.path[:] = [place for place in sys.path if place and Path(place) != Path(__file__).parents[1]]
    sys.argv = ["g2rpo", *words]
    from g2rpo.__main__ import app

    app(prog_name="g2rpo")
