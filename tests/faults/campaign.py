"""The campaign's command line: which cases, how many at once, until when, and the report."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from faults.outcomes import NOT_REACHED, Outcome, merge_reports, write_report
from faults.runs import Cases, World, undisturbed

ROOT = Path(__file__).parents[2]
SECTIONS = {
    "undisturbed": "The runs with which all others are compared, each made twice.",
    "kills": "SIGKILL at a random moment of each phase, a fifth twice; then the same command again.",
    "signals": "Requests to stop, once and twice, and a closed pipe; then the same command.",
    "ranks": "One of two and one of four processes (gloo) is killed; then the same command.",
    "damage": "Flipped bits, cut and missing files of a run and of its cache; then the same command.",
    "disk": "The disk is full from one write on; then there is space, and the same command.",
    "inputs": "Generated bad recipes, prompt files, images, adapters and safetensors files.",
    "servers": "Reward servers that fail, in fourteen ways, at the start and during a run.",
    "properties": "Readers of any bytes, values and headers (hypothesis); a case is a property.",
}
COUNTS = {  # section -> cases of the long form, of the short form
    "kills": (333, 4),
    "signals": (108, 2),
    "ranks": (40, 0),
    "damage": (60, 2),
    "disk": (64, 2),
    "inputs": (800, 40),
    "servers": (28, 2),
    "properties": (1000, 10),  # examples of each property
}


def main() -> int:
    arguments = _parse()
    if arguments.merge:
        outcomes, facts = merge_reports(arguments.merge)
        print(f"the report is {write_report(arguments.out, outcomes, facts, SECTIONS)}")
        return 1 if facts["failures"] else 0
    if "FAULTS_SHIM" not in os.environ:
        _with_shim()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # folders and mounts are removed
    began = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="g2rpo-faults-", dir=_scratch()))
    _import_everything()
    world = World(arguments.seed, work)
    outcomes = []
    try:
        _run_all(arguments, world, outcomes, began)
    finally:
        if not arguments.keep:
            shutil.rmtree(work, ignore_errors=True)
        if shim := os.environ["FAULTS_SHIM"]:
            shutil.rmtree(Path(shim).parent, ignore_errors=True)
    failed = [one for one in outcomes if not one.ok and one.verdict != NOT_REACHED]
    facts = {
        "commit": _commit(),
        "form": "short" if arguments.short else "long",
        "seed": arguments.seed,
        "cases": len(outcomes),
        "failures": len(failed),
        "seconds": round(time.monotonic() - began),
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}, {_torch()}",
    }
    path = write_report(arguments.out, outcomes, facts, SECTIONS)
    print(f"{len(outcomes)} cases, {len(failed)} failures in {facts['seconds']} s; the report is {path}")
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--short", action="store_true", help="the form of the normal suite")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sections", default="", help=f"of {', '.join(COUNTS)}; all by default")
    parser.add_argument("--counts", default="", help="numbers of cases, such as kills=30,inputs=100")
    parser.add_argument("--only", default="", help="one case, such as kills:17; its folder is kept")
    parser.add_argument("--jobs", type=int, default=max(1, os.cpu_count() or 1), help="cases at once")
    parser.add_argument("--minutes", type=float, default=120.0, help="no case begins after this time")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "faults", help="folder of the report")
    parser.add_argument(
        "--merge", type=Path, nargs="+", help="run nothing; join these report.json of parts of a campaign"
    )
    parser.add_argument("--keep", action="store_true", help="keep the folders of all cases")
    arguments = parser.parse_args()
    arguments.keep = arguments.keep or bool(arguments.only)
    return arguments


def _with_shim() -> NoReturn:
    """Starts this command again with the library that fills disks, on one thread per process."""
    folder = Path(tempfile.mkdtemp(prefix="g2rpo-shim-"))
    library = folder / "disk_full.so"
    source = Path(__file__).with_name("disk_full.c")
    environment = {**os.environ, "FAULTS_SHIM": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "Agg"}
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is not None:
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
        environment |= {"FAULTS_SHIM": str(library), "LD_PRELOAD": str(library)}
    os.chdir(ROOT)
    os.execve(sys.executable, [sys.executable, "-m", "tests.faults", *sys.argv[1:]], environment)


def _scratch() -> str | None:
    """In memory where there is room: syncs to a disk are most of a case's time, and no case loses power."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2**31
    return str(memory) if roomy else None


def _import_everything() -> None:
    """Imports, in the parent of all processes, what commands import: 8 s once instead of each time."""
    sys.path.insert(0, str(ROOT))
    for name in IMPORTED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def _run_all(arguments: argparse.Namespace, world: World, outcomes: list[Outcome], began: float) -> None:
    from faults.jobs import run_cases

    deadline = began + 60 * arguments.minutes
    counts = {name: short if arguments.short else long for name, (long, short) in COUNTS.items()}
    counts |= {
        name: int(n) for name, _, n in (pair.partition("=") for pair in arguments.counts.split(",") if pair)
    }
    chosen = [name for name in arguments.sections.split(",") if name]
    chosen = chosen or [name for name, count in counts.items() if count]
    if arguments.only:
        chosen = [arguments.only.partition(":")[0]]
        if chosen[0] != "properties":  # there, the number is one of examples
            counts[chosen[0]] = max(counts[chosen[0]], 10_000)

    def run(cases: list, at_once: int) -> None:
        for outcome in run_cases(
            cases, world.folder / "cases", at_once=at_once, deadline=deadline, keep=arguments.keep
        ):
            outcomes.append(outcome)
            if not outcome.ok:
                print(
                    f"{outcome.case} ({outcome.kind}): {outcome.verdict}: {outcome.detail[:700]}", flush=True
                )

    sizes = [1] if set(chosen) & {"kills", "signals", "damage", "disk"} else []
    sizes += [2] if "ranks" in chosen else []
    sizes += [4] if "ranks" in chosen and not arguments.short else []
    run([(f"undisturbed:{size}", undisturbed(world, size)) for size in sizes], arguments.jobs)
    if len(world.references) < len(sizes):
        raise SystemExit("the undisturbed runs fail; see above")
    for name in chosen:
        section_began = time.monotonic()
        cases = list(_cases(name, world, counts[name], arguments.short))
        if arguments.only:
            cases = [case for case in cases if case[0] in (arguments.only, f"{name}:stopped")]
            print(f"the case's folder is below {world.folder}")
        before = len(outcomes)
        run(cases, max(1, arguments.jobs // 2) if name == "ranks" else arguments.jobs)
        done = f"{len(outcomes) - before} of {len(cases)} cases"
        print(f"{name}: {done} in {time.monotonic() - section_began:.0f} s", flush=True)


IMPORTED = (
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.models.transformers.transformer_flux",
    "matplotlib.pyplot",
    "peft",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "transformers.models.clip.modeling_clip",
    "transformers.models.t5.modeling_t5",
    "g2rpo.__main__",
    "g2rpo.evaluation.evaluate",
    "g2rpo.evaluation.score_folder",
    "g2rpo.exporters.export",
    "g2rpo.inference.sample",
    "g2rpo.setup.doctor",
    "g2rpo.setup.verify",
    "g2rpo.training.trainer",
)
MAKERS = {  # section -> module and function that makes its cases
    "kills": ("kills", "kill_cases"),
    "signals": ("kills", "signal_cases"),
    "ranks": ("kills", "rank_cases"),
    "damage": ("damage", "damage_cases"),
    "disk": ("disk", "disk_cases"),
    "inputs": ("inputs", "input_cases"),
    "servers": ("servers", "server_cases"),
    "properties": ("properties", "property_cases"),
}


def _cases(name: str, world: World, count: int, short: bool) -> Cases:
    module, function = MAKERS[name]
    options = {"sizes": (2,)} if name == "ranks" and short else {}
    return getattr(importlib.import_module(f"faults.{module}"), function)(world, count, **options)


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


def _torch() -> str:
    import torch

    return f"torch {torch.__version__}"
