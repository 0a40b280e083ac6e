"""The smallest run that has all phases, what it must leave, and undisturbed runs to compare with."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.jobs import Case, Job, Result
from faults.outcomes import Outcome

ITERATIONS = 3
SEED = 5
"""With it the second of three iterations is the best: RUN/best names another checkpoint than RUN/latest."""
PROMPTS = ("a red circle", "two blue stars", "a green square above a white star", "a black circle")
RUN = (
    "train tiny out=run cache=cache prompts=prompts.txt eval_prompts=prompts.txt device=cpu guidance=1 "
    "prompts_per_iteration=2 num_steps=2 train_steps=1 granularities=[1] group_size=2 lora_rank=2 lr=1e-3 "
    "rewards={colourfulness=1.0} eval_rewards=[] eval_every=1 num_eval_prompts=2 eval_num_steps=1 "
    "num_sample_prompts=1 sample_every=2 compare_images=2 checkpoint_every=1 keep_last=2 "
    f"keep_best=colourfulness warmup_iterations=0 ema_decay=0.5 iterations={ITERATIONS} "
    f"seed={SEED}"
).split()
# Parts of names of values that differ between equal runs: times, memory, and checksums of such values.
VARYING = ("second", "memory", "time", "bytes", "host", "pid", "free", "crc", "checksum")
# Files that hold such values or belong to one process.
_IGNORED = ("events.out", ".lock", ".tmp", ".removed", "tensorboard", "environment.jsonl")  # one line a start


def run_words(*changes: str) -> list[str]:
    """The words of the smallest run, changed as later words of a command line change it."""
    changed = {word.partition("=")[0] for word in changes}
    return [word for word in RUN if word.partition("=")[0] not in changed] + list(changes)


def prepare(folder: Path) -> None:
    """Writes the files that the smallest run reads."""
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")


def fingerprint(run: Path) -> dict[str, str]:
    """Returns what two equal runs have in common: name of a file or line -> content, or its hash."""
    own: dict[str, str] = {}
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        if not path.is_file() or any(part in name for part in _IGNORED) or name == "config.toml":
            continue
        if name.startswith("checkpoints/"):
            continue
        if path.suffix in (".json", ".jsonl"):
            lines = (
                path.read_text(encoding="utf-8").splitlines()
                if path.suffix == ".jsonl"
                else [path.read_text()]
            )
            for number, line in enumerate(line for line in lines if line.strip()):  # readers skip empty lines
                try:
                    kept = _timeless(json.loads(line))
                except ValueError:
                    kept = line  # damage that is still there, so that the runs are not equal
                if set(kept) - {"step"} if isinstance(kept, dict) else kept:
                    own[f"{name}, {number + 1}"] = json.dumps(kept, sort_keys=True)
        elif path.suffix == ".md":
            own[name] = path.read_text(encoding="utf-8")
        else:
            own[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    latest = run / "latest"
    if latest.is_file():
        newest = run / "checkpoints" / latest.read_text().split()[0]
        for path in sorted(newest.glob("*.distcp")):
            own[f"{newest.name}/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return own


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if not any(word in k for word in VARYING)}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


def difference(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Returns the first differences of two fingerprints, or nothing."""
    parts = [f"{name} is missing" for name in expected if name not in found]
    parts += [f"{name} is new" for name in found if name not in expected]
    for name in expected:
        if name in found and expected[name] != found[name]:
            values = (
                f": {found[name][:120]} instead of {expected[name][:120]}" if len(expected[name]) > 64 else ""
            )
            parts.append(f"{name} differs{values}")
    return f"{len(parts)} differences: " + "; ".join(parts[:3]) if parts else ""


def newest_step(run: Path) -> int:
    """Returns the iteration of the checkpoint that `latest` names, -1 without one."""
    latest = run / "latest"
    return int(latest.read_text().split()[0].rpartition("_")[2]) if latest.is_file() else -1


@dataclass
class World:
    """What all cases share: the seed, the folder, and undisturbed runs.

    Attributes:
        references: number of processes -> fingerprint of the undisturbed run.
        traces: number of processes -> trace of its first process.
        rank_traces: number of processes -> trace of each of them.
        folders: name -> folder of files that cases copy.
    """

    seed: int
    folder: Path
    references: dict[int, dict[str, str]] = field(default_factory=dict)
    traces: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    rank_traces: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def random(self, case: str) -> random.Random:
        """The random numbers of a case, which depend on the seed and its name alone."""
        return random.Random(f"{self.seed}/{case}")

    def copy(self, name: str, to: Path) -> None:
        """Copies a shared folder into a case's folder."""
        shutil.copytree(self.folders[name], to, dirs_exist_ok=True)


Cases = Iterator[tuple[str, Callable[[Path], Case]]]


def undisturbed(world: World, processes: int) -> Callable[[Path], Case]:
    """A case that makes the run of so many processes with which others are compared, twice."""

    def case(folder: Path) -> Case:
        found = []
        for attempt in ("first", "second"):
            own = world.folder / f"undisturbed_{processes}_{attempt}"
            shutil.rmtree(own, ignore_errors=True)
            own.mkdir(parents=True)
            prepare(own)
            results = yield jobs_of(own, processes)
            for result in results:
                if result.code != 0:
                    detail = f"exit code {result.code}: {result.text[-800:]}"
                    return Outcome(f"undisturbed:{processes}", "undisturbed", "wrong message", detail)
            found.append(fingerprint(own / "run"))
        world.references[processes], world.traces[processes] = found[0], results[0].trace
        world.rank_traces[processes] = [result.trace for result in results]
        world.folders[f"finished {processes}"] = own
        unequal = difference(*found)
        if processes == 1 and not unequal and not (own / "run" / "best").is_file():
            unequal = "no iteration is the best, so RUN/best is not tested: choose another SEED"
        verdict = "silently wrong" if unequal else "survived"
        return Outcome(f"undisturbed:{processes}", f"{processes} processes, twice", verdict, unequal)

    return case


def jobs_of(folder: Path, processes: int, killed: int = 0, trigger: Any = None, *changes: str) -> list[Job]:
    """The jobs of one run.

    Args:
        folder: working directory.
        processes: number of processes.
        killed: rank to which `trigger` happens.
        changes: words that change the smallest run.
    """
    words = run_words(*changes) if processes < 4 else run_words("prompts_per_iteration=4", *changes)
    if processes == 1:
        return [Job(words, folder, trigger=trigger)]
    port = str(free_port())
    common = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        Job(
            words,
            folder,
            environment=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            trigger=trigger if rank == killed else None,
        )
        for rank in range(processes)
    ]


def free_port() -> int:
    """A port that nothing listens at now."""
    import socket

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def ended_badly(result: Result) -> tuple[str, str]:
    """Verdict and detail of a run that should have finished, or empty."""
    if result.timed_out:
        return "hangs", f"{' '.join(result.words[:2])} after {result.seconds:.0f} s"
    if result.traceback:
        return "unhandled traceback", result.traceback
    if result.code:
        return "lost work", f"the same command ends with exit code {result.code}: {result.text[-500:]}"
    return "", ""


def resumed(
    world: World, run: Path, results: list[Result], saved: int, processes: int = 1
) -> tuple[str, str]:
    """Verdict and detail of a run that was disturbed and has been resumed.

    Args:
        run: its folder.
        results: of the command that resumed it, by rank.
        saved: iteration of the last checkpoint that was complete before; -1: none.
    """
    for result in results:
        if (bad := ended_badly(result))[0]:
            return bad
    repeated = results[0].trace.get("updated", 0) - (ITERATIONS - max(saved, 0))
    if repeated > 0:
        return "lost work", f"{repeated} saved iterations were done again"
    if unequal := difference(world.references[processes], fingerprint(run)):
        return "silently wrong", unequal
    return "survived", ""


def tree_hash(folder: Path) -> dict[str, str]:
    """File -> hash, of all files of a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not os.path.islink(path)
    }
