"""Kills, signals, closed pipes and lost processes at random moments of all phases."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from faults.jobs import Case, Job, Result
from faults.outcomes import HANG, LOST, NOT_REACHED, OK, SILENT, TRACEBACK, Outcome
from faults.runs import (
    Cases,
    World,
    ended_badly,
    jobs_of,
    newest_step,
    prepare,
    resumed,
    run_words,
    tree_hash,
)
from faults.tracing import PHASES, Trigger

RUN_PHASES = tuple(phase for phase in PHASES if phase != "export")
SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")
WAYS = (*SIGNALS, *(f"{name} twice" for name in ("SIGINT", "SIGTERM", "SIGUSR1")), "closed pipe")
KILLED = (-signal.SIGKILL, -signal.SIGALRM)


def moment(draw: Any, trace: Mapping[str, Any], phase: str, action: str = "kill") -> Trigger:
    """A random moment of a phase: before a call, a little after one, or before a change of a file."""
    changes = [change for change in trace["changes"] if change[0] == phase]
    how = draw.choice(["call", "later", "file"] if changes and action == "kill" else ["call", "later"])
    if how == "file":
        return Trigger(action, phase, files=draw.randint(1, len(changes)))
    calls = max(1, trace["calls"].get(phase, 1))
    gap = 2 * trace["seconds"].get(phase, 0.01) / calls
    delay = draw.uniform(0, gap) if how == "later" and action == "kill" else 0.0
    return Trigger(action, phase, calls=draw.randint(1, calls), delay=delay)


def kill_cases(world: World, count: int) -> Cases:
    """Kills of the smallest run in all phases, and of exports; each is resumed by the same command."""
    phases = tuple(PHASES)
    for number in range(count):
        phase = phases[number % len(phases)]
        make = _killed_export if phase == "export" else _killed_run
        yield f"kills:{number}", _of(make, world, f"kills:{number}", phase)


def _of(make: Callable[..., Case], *arguments: Any) -> Callable[[Path], Case]:
    return lambda folder: make(folder, *arguments)


def _killed_run(folder: Path, world: World, name: str, phase: str) -> Case:
    draw = world.random(name)
    prepare(folder)
    trigger = moment(draw, world.traces[1], phase)
    killed: Result = yield Job(run_words(), folder, trigger=trigger)
    if killed.code not in KILLED:
        return _not_killed(name, phase, killed)
    saved, where = killed.trace["saved"], f"killed at {killed.trace['fired']}"
    if draw.random() < 0.2:  # and once more while it resumes
        again = moment(draw, world.traces[1], draw.choice(RUN_PHASES))
        second: Result = yield Job(run_words(), folder, trigger=again)
        if second.code not in (*KILLED, 0):
            return Outcome(name, phase, *ended_badly(second))
        saved = max(saved, second.trace.get("saved", -1))
        where += f", and at {second.trace.get('fired')}"
    last: Result = yield Job(run_words(), folder)
    verdict, detail = resumed(world, folder / "run", [last], saved)
    return Outcome(name, phase, verdict, f"{where}: {detail}" if detail else where)


def _not_killed(name: str, phase: str, result: Result) -> Outcome:
    if result.timed_out:
        return Outcome(name, phase, HANG, f"after {result.seconds:.0f} s: {result.text[-300:]}")
    if result.traceback:
        return Outcome(name, phase, TRACEBACK, result.traceback)
    return Outcome(name, phase, NOT_REACHED, f"exit code {result.code}: {result.text[-300:]}")


def _killed_export(folder: Path, world: World, name: str, phase: str) -> Case:
    """An export is complete or absent, and an earlier one stays until the new one is complete."""
    draw = world.random(name)
    world.copy("finished 1", folder)
    layout = draw.choice(["lora", "diffusers", "single_file", "comfyui"])
    words = ["export", "run", "--layout", layout]
    export = folder / "run" / "export"
    whole: Result = yield Job(words, folder)
    if whole.code:
        return Outcome(name, phase, LOST, f"exit code {whole.code}: {whole.text[-300:]}")
    expected = tree_hash(export)
    earlier = draw.random() < 0.5
    if not earlier:
        yield Job([], folder, function=lambda: _remove(export))
    trigger = moment(draw, whole.trace, phase)
    killed: Result = yield Job(words, folder, trigger=trigger)
    if killed.code not in KILLED:
        return _not_killed(name, phase, killed)
    where = f"{layout}, killed at {killed.trace['fired']}"
    if export.exists() and tree_hash(export) != expected:
        return Outcome(name, phase, SILENT, f"{where}: {export} is neither the old nor the new export")
    last: Result = yield Job(words, folder)
    if last.code or tree_hash(export) != expected:
        return Outcome(name, phase, LOST, f"{where}: exporting again gives {last.code}: {last.text[-300:]}")
    return Outcome(name, phase, OK, where)


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)


def signal_cases(world: World, count: int) -> Cases:
    """All signals that ask a run to stop, once and twice, and a pipe whose reader goes away."""
    for number in range(count):
        way = WAYS[number % len(WAYS)]
        yield f"signals:{number}", _of(_signalled, world, f"signals:{number}", way)


def _signalled(folder: Path, world: World, name: str, way: str) -> Case:
    """The run stops, says so without a traceback, and has saved all iterations that it did."""
    draw = world.random(name)
    prepare(folder)
    if way == "closed pipe":
        lines = draw.randint(1, 8)
        stopped: Result = yield Job(run_words(), folder, lines=lines)
        where = f"the reader left after {lines} lines"
    else:
        number, _, twice = way.partition(" ")
        action = f"signal{' twice' if twice else ''}:{number}"
        phase = draw.choice(RUN_PHASES)
        trigger = moment(draw, world.traces[1], phase, action)
        stopped = yield Job(run_words(), folder, trigger=trigger)
        where = stopped.trace.get("fired") or f"in {phase}"
    run = folder / "run"
    done, saved = stopped.trace.get("updated", 0), newest_step(run)
    verdict, detail = OK, ""
    if stopped.timed_out:
        verdict, detail = HANG, f"after {stopped.seconds:.0f} s"
    elif stopped.code < 0:
        verdict, detail = LOST, f"the process was ended by signal {-stopped.code}, {saved=}"
    elif stopped.traceback:
        verdict, detail = TRACEBACK, stopped.traceback
    elif done > max(saved, 0):
        verdict, detail = LOST, f"{done} iterations were done and {saved} saved; exit code {stopped.code}"
    elif way != "closed pipe" and stopped.code not in (130, 128 + getattr(signal, number)) and saved < 3:
        verdict, detail = "wrong message", f"exit code {stopped.code} of a run that was stopped"
    if verdict == OK:
        last: Result = yield Job(run_words(), folder)
        verdict, detail = resumed(world, run, [last], saved)
    return Outcome(name, way, verdict, f"{where}: {detail}" if detail else where)


def rank_cases(world: World, count: int, sizes: tuple[int, ...] = (2, 4)) -> Cases:
    """One of several processes is killed; the others end, and the same command resumes the run."""
    for number in range(count):
        size = sizes[number % len(sizes)]
        yield f"ranks:{number}", _of(_lost_rank, world, f"ranks:{number}", size)


def _lost_rank(folder: Path, world: World, name: str, size: int) -> Case:
    draw = world.random(name)
    prepare(folder)
    killed = draw.randrange(size)
    trace = world.rank_traces[size][killed]  # what the first process alone does is no moment of another
    phases = ["first images", "rollout", "scoring", "update", "checkpoint", "evaluation"]
    phase = draw.choice([name for name in phases if trace["calls"].get(name)])
    trigger = moment(draw, trace, phase)
    kind = f"one of {size} processes"
    results: list[Result] = yield jobs_of(folder, size, killed, trigger)
    victim, peers = results[killed], [r for rank, r in enumerate(results) if rank != killed]
    if victim.code not in KILLED:
        return _not_killed(name, kind, victim)
    where = f"rank {killed} killed at {victim.trace['fired']}"
    saved = max(result.trace.get("saved", -1) for result in results)
    for peer in peers:
        if peer.timed_out:
            return Outcome(name, kind, HANG, f"{where}: a peer goes on for {peer.seconds:.0f} s")
    last: list[Result] = yield jobs_of(folder, size)
    verdict, detail = resumed(world, folder / "run", last, saved, size)
    if verdict == OK and (shown := [peer.traceback for peer in peers if peer.traceback]):
        verdict, detail = TRACEBACK, f"of a peer: {shown[0]}"
    return Outcome(name, kind, verdict, f"{where}: {detail}" if detail else where)
