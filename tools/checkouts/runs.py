"""Runs the cases in a checkout, through its command line alone."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import torch

from checkouts.cases import RECIPE, REWARDS, Case, all_cases
from checkouts.difference import TRAINED

SECONDS = 900  # the longest that a command may take
READER = Path(__file__).with_name("read_checkpoints.py")
SERVER = Path(__file__).with_name("server.py")
DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Outcome:
    """How a case's command ended.

    Attributes:
        exit_code: of the command, of the second one where the first was killed.
        seconds: it took.
        problem: why the case cannot be compared, or empty.
    """

    exit_code: int
    seconds: float
    problem: str = ""


@dataclass(frozen=True)
class Side:
    """One checkout and where its results lie.

    Attributes:
        checkout: folder that holds the package g2rpo.
        results: folder of the results: a folder per case, with `files` (the case's own working folder),
            `tensors` (of its checkpoints), output.txt and outcome.json.
        work: folder that both sides share.
    """

    checkout: Path
    results: Path
    work: Path

    def folder(self, case: Case) -> Path:
        """Where a case's results lie; another definition of the case has another folder."""
        return self.results / f"{case.name}-{digest(case)}"

    def environment(self) -> dict[str, str]:
        """The same for both checkouts but for the module path: one thread, no GPU, no network."""
        kept = {name: value for name, value in os.environ.items() if name not in DISTRIBUTED}
        return kept | {
            "PYTHONPATH": str(self.checkout), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "COLUMNS": "200",
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "compiled"),
        }  # fmt: skip


def digest(case: Case) -> str:
    """Changes when the case, or one that it needs, changes."""
    by_name = {one.name: one for one in all_cases()}
    needed = [digest(by_name[name]) for name in dict.fromkeys(case.needs())]
    rewards = REWARDS if "comparison_rewards" in " ".join(case.words) else ""
    text = json.dumps([asdict(case), needed, RECIPE, rewards])
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def package_digest(checkout: Path) -> str:
    """Of all files of the package: what its results depend on, whether committed or not.

    Raises:
        ValueError: no package g2rpo in this folder.
    """
    package = checkout / "g2rpo"
    if not (package / "__init__.py").is_file():
        raise ValueError(f"{checkout} holds no package g2rpo; give the folder of a checkout")
    hashed = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            hashed.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return hashed.hexdigest()[:16]


def keep_results_of_this_environment(folder: Path) -> None:
    """Makes the folder of BASE's results; empties it if other packages or another machine made them."""
    packages = sorted(f"{one.name} {one.version}" for one in importlib.metadata.distributions())
    text = "\n".join([sys.version, platform.node(), torch.backends.cpu.get_cpu_capability(), *packages])
    record = folder / "environment.txt"
    if folder.exists() and (not record.is_file() or record.read_text(encoding="utf-8") != text):
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    record.write_text(text, encoding="utf-8")


def run_case(case: Case, side: Side, base: Side) -> Outcome:
    """Runs a case, or returns the outcome of an earlier run of it."""
    folder = side.folder(case)
    record = folder / "outcome.json"
    if record.is_file():
        return Outcome(**json.loads(record.read_text(encoding="utf-8")))
    shutil.rmtree(folder, ignore_errors=True)
    files = folder / "files"
    files.mkdir(parents=True)
    (files / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    if "comparison_rewards" in " ".join(case.words):
        (files / "comparison_rewards.py").write_text(REWARDS, encoding="utf-8")
    by_name = {one.name: one for one in all_cases()}
    for copied, name in case.copies:
        shutil.copytree(base.folder(by_name[copied]) / "files" / name, files / name)
    before = _times(files / case.keeps) if case.keeps else {}
    words = [
        re.sub(r"BASE:(\w+)", lambda match: str(base.folder(by_name[match[1]]) / "files"), word)
        for word in case.words
    ]
    began = time.monotonic()
    with open(folder / "output.txt", "w", encoding="utf-8") as output:
        if case.fresh or case.processes > 1 or case.kill_at is not None:
            exit_code, problem = _run_fresh(case, words, side, files, output)
        else:
            exit_code, problem = _servers.run(words, side, files, Path(output.name)), ""
    if case.keeps and _times(files / case.keeps) != before:
        problem = f"files were written in {case.keeps}, which should have been read only"
    outcome = Outcome(exit_code, time.monotonic() - began, problem)
    if not problem and bool(exit_code) == bool(case.refusal):  # anything else is tried again
        record.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    return outcome


class Servers:
    """A process of server.py for each thread and checkout."""

    def __init__(self) -> None:
        self._started: dict[tuple[int, Side], subprocess.Popen[str]] = {}

    def run(self, words: list[str], side: Side, files: Path, output: Path) -> int:
        """The exit code of `g2rpo WORDS`."""
        key = (threading.get_ident(), side)
        if key not in self._started:
            self._started[key] = subprocess.Popen(
                [sys.executable, "-c", SERVER.read_text(encoding="utf-8")], text=True, cwd=side.results,
                env=side.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
        server = self._started[key]
        assert server.stdin is not None and server.stdout is not None
        job = {"words": words, "folder": str(files), "output": str(output), "seconds": SECONDS}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    def close(self) -> None:
        """Ends them."""
        for server in self._started.values():
            server.communicate()
        self._started.clear()


_servers = Servers()
close_servers = _servers.close


def _run_fresh(case: Case, words: list[str], side: Side, files: Path, output: IO[str]) -> tuple[int, str]:
    """Exit code of the command in a process of its own, and what went wrong where it was to be killed."""
    command, problem = [sys.executable, "-m"], ""
    if case.processes > 1:
        command += ["torch.distributed.run", f"--nproc-per-node={case.processes}", "--standalone", "-m"]
    command += ["g2rpo", *words]
    if case.kill_at is not None:
        problem = _run_and_kill(command, side, files, output, case.kill_at)
    return _run(command, side, files, output), problem


def _times(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()}


def _start(command: list[str], side: Side, files: Path, output: IO[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, cwd=files, env=side.environment(), stdin=subprocess.DEVNULL, stdout=output,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def _run(command: list[str], side: Side, files: Path, output: IO[str]) -> int:
    process = _start(command, side, files, output)
    try:
        return process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    finally:
        _kill(process)


def _run_and_kill(command: list[str], side: Side, files: Path, output: IO[str], iteration: int) -> str:
    """Kills the command once the checkpoint of an iteration is whole; returns what went wrong, or nothing."""
    process = _start(command, side, files, output)
    latest, until = files / "run" / "latest", time.monotonic() + SECONDS
    try:
        while not (latest.is_file() and latest.read_text().strip() >= f"step_{iteration:06d}"):
            if process.poll() is not None or time.monotonic() > until:
                return f"it ended, or hung, before iteration {iteration} was saved, so it could not be killed"
            time.sleep(0.002)
    finally:
        _kill(process)
    return "it finished before it was killed" if (files / "run" / "finished").exists() else ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def output_of(case: Case, side: Side) -> str:
    """What the command printed."""
    return (side.folder(case) / "output.txt").read_text(encoding="utf-8", errors="replace")


def read_checkpoints(cases: list[Case], side: Side, source: Side, folder_name: str = TRAINED) -> str:
    """Writes the tensors of all checkpoints that `source` made, as `side` reads them.

    Returns:
        What went wrong, or nothing.
    """
    pairs = []
    for case in cases:
        files = source.folder(case) / "files"
        for checkpoint in sorted(files.rglob("checkpoints/step_*")):
            name = checkpoint.relative_to(files).as_posix().replace("/", "__")
            target = side.folder(case) / folder_name / f"{name}.safetensors"
            if not target.is_file():
                pairs.append([str(checkpoint), str(target)])
    if not pairs:
        return ""
    done = subprocess.run(
        [sys.executable, "-c", READER.read_text(encoding="utf-8")], input=json.dumps(pairs), text=True,
        env=side.environment(), cwd=side.results, capture_output=True,
    )  # fmt: skip
    return done.stderr[-2000:] if done.returncode else ""
