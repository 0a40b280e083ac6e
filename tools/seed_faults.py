"""Seeds faults in g2rpo and shows that the tests find them.

    python tools/seed_faults.py CHECKOUT --side base|new    # exit code 1: a fault was missed
    python tools/seed_faults.py CHECKOUT --side new --check # checks the table, runs no test

`seeded_faults.toml` lists the faults. A fault replaces one text of one file; `base` is the package with flat
modules before its reorganisation, `new` the package with subpackages. Each fault names the tests that should
find it. A selection of tests must pass without a fault before it counts.

    found    a test failed
    missed   all tests passed
    broken   no test was run to its end (such as an error at import), or the tests fail without the fault too
"""

import argparse
import ast
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("seeded_faults.toml")
MARKERS = {"base": "not gpu", "new": "not gpu and not long"}
COPIED = ("g2rpo", "tests")
"""Folders that are copied without their caches; other folders are linked, because tests only read them."""

TIMEOUT = 900
"""Seconds after which a call of pytest is ended and its fault counts as broken."""


@dataclass(frozen=True)
class Fault:
    """One fault on one side.

    Attributes:
        name: short name.
        breaks: what it breaks, in a line.
        file: path of the file in the checkout.
        old, new: the text that is replaced, and by what.
        tests: files or node ids for pytest.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What the tests said: `result` is "passed", "failed" or "broken"; `detail` a test or an explanation."""

    result: str
    detail: str
    seconds: float


@dataclass(frozen=True)
class Row:
    """A row of the report; `result` is "found", "missed" or "broken"."""

    fault: Fault
    result: str
    detail: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Seed faults in g2rpo and show that the tests find them.")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--side", choices=tuple(MARKERS), required=True, help="layout of the checkout")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="these faults only")
    parser.add_argument("--jobs", type=int, default=2, help="calls of pytest at once (default: 2)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table as Markdown too")
    parser.add_argument("--check", action="store_true", help="check the table without running a test")
    options = parser.parse_args(arguments)
    checkout = options.checkout.resolve()
    try:
        faults = read_faults(TABLE, options.side, options.only)
        check_faults(checkout, faults)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.check:
        print(f"{len(faults)} faults: each text occurs once in {checkout}, and each changed file compiles")
        return 0
    rows = run_faults(checkout, faults, MARKERS[options.side], max(1, options.jobs))
    lines = markdown(rows, options.side)
    print("\n".join(lines))
    if options.report is not None:
        options.report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(any(row.result != "found" for row in rows))


def read_faults(table: Path, side: str, only: Sequence[str] = ()) -> list[Fault]:
    """Reads the faults of one side, in the order of the table.

    Raises:
        ValueError: a name occurs twice, or a name in `only` is not in the table.
    """
    entries = tomllib.loads(table.read_text(encoding="utf-8"))["fault"]
    faults = []
    for entry in entries:
        # `replace` and `by` are given once where the text is the same on both sides.
        texts = {key: entry[key] for key in ("replace", "by") if key in entry} | entry[side]
        faults.append(
            Fault(
                name=entry["name"],
                breaks=entry["breaks"],
                file=texts["file"],
                old=texts["replace"],
                new=texts["by"],
                tests=tuple(texts["tests"]),
            )
        )
    names = [fault.name for fault in faults]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{table} has faults of the same name: {', '.join(repeated)}")
    if unknown := sorted(set(only) - set(names)):
        raise ValueError(f"no fault {', '.join(unknown)}; there are {', '.join(names)}")
    return [fault for fault in faults if not only or fault.name in only]


def check_faults(checkout: Path, faults: Sequence[Fault]) -> None:
    """Checks the table against a checkout.

    Raises:
        ValueError: a text does not occur exactly once, a changed file does not compile, or a test does not
            exist; the message lists all problems.
    """
    problems = []
    for fault in faults:
        path = checkout / fault.file
        if not path.is_file():
            problems.append(f"{fault.name}: no file {fault.file}")
            continue
        source = path.read_text(encoding="utf-8")
        if (count := source.count(fault.old)) != 1:
            problems.append(f"{fault.name}: the text occurs {count} times in {fault.file}, not once")
            continue
        before, after = ast.parse(source), source.replace(fault.old, fault.new)
        try:
            if ast.dump(ast.parse(after)) == ast.dump(before):
                problems.append(f"{fault.name}: the fault changes nothing that is run")
        except SyntaxError as error:
            problems.append(f"{fault.name}: {fault.file} does not compile with the fault: {error}")
        for test in fault.tests:
            file, _, function = test.partition("::")
            if not (checkout / file).is_file():
                problems.append(f"{fault.name}: no tests {file}")
            elif function and f"def {function}(" not in (checkout / file).read_text(encoding="utf-8"):
                problems.append(f"{fault.name}: no test {function} in {file}")
    if problems:
        raise ValueError(f"the table does not fit {checkout}:\n  " + "\n  ".join(problems))


def run_faults(checkout: Path, faults: Sequence[Fault], marker: str, jobs: int) -> list[Row]:
    """Runs each distinct selection of tests without a fault, then each fault.

    Raises:
        RuntimeError: Python would import g2rpo from elsewhere than the private copies.
    """
    with tempfile.TemporaryDirectory(prefix="seed_faults_") as temporary:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            copy = Path(temporary) / f"copy{number}"
            copy_checkout(checkout, copy)
            check_import(copy)
            copies.put(copy)

        def in_a_copy(name: str, run: Callable[[Path], Outcome]) -> Outcome:
            copy = copies.get()
            try:
                outcome = run(copy)
            finally:
                copies.put(copy)
            print(f"  {name:28} {outcome.result:7} {outcome.seconds:6.1f} s", file=sys.stderr, flush=True)
            return outcome

        with ThreadPoolExecutor(jobs) as pool:
            selections = list(dict.fromkeys(fault.tests for fault in faults))
            sound = pool.map(
                lambda tests: in_a_copy("(no fault)", lambda copy: run_tests(copy, tests, marker)), selections
            )
            without_fault = dict(zip(selections, sound, strict=True))
            tried = [fault for fault in faults if without_fault[fault.tests].result == "passed"]
            seeded = pool.map(
                lambda fault: in_a_copy(fault.name, lambda copy: run_seeded(copy, fault, marker)), tried
            )
            with_fault = dict(zip((fault.name for fault in tried), seeded, strict=True))
    results = {"passed": "missed", "failed": "found", "broken": "broken"}
    rows = []
    for fault in faults:
        outcome = with_fault.get(fault.name)
        if outcome is None:
            outcome = without_fault[fault.tests]
            rows.append(Row(fault, "broken", f"without the fault: {outcome.detail}", outcome.seconds))
        else:
            rows.append(Row(fault, results[outcome.result], outcome.detail, outcome.seconds))
    return rows


def copy_checkout(checkout: Path, copy: Path) -> None:
    """Makes a private copy: package, tests and files are copied, assets and other folders are linked."""
    copy.mkdir()
    for path in checkout.iterdir():
        target = copy / path.name
        if path.name in COPIED:
            shutil.copytree(
                path, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "assets")
            )
        elif path.is_symlink():  # recipes -> g2rpo/recipes
            target.symlink_to(os.readlink(path))
        elif path.is_dir() and not path.name.startswith("."):
            target.symlink_to(path)
        elif path.is_file() and path.name != ".git":
            shutil.copyfile(path, target)
    (copy / "g2rpo" / "assets").symlink_to(checkout / "g2rpo" / "assets")


def environment(copy: Path) -> dict[str, str]:
    """Environment of pytest; without bytecode files, which could be those of the file before its change."""
    changes = {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **changes}


def check_import(copy: Path) -> None:
    """Checks that Python imports g2rpo from the copy, not from an installed package.

    Raises:
        RuntimeError: it does not.
    """
    code = "import importlib.util; print(importlib.util.find_spec('g2rpo').origin)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=copy, env=environment(copy), capture_output=True, text=True)
    if Path(done.stdout.strip()).parent.resolve() != (copy / "g2rpo").resolve():
        raise RuntimeError(f"g2rpo is imported from {done.stdout.strip() or done.stderr}, not from {copy}")


def run_seeded(copy: Path, fault: Fault, marker: str) -> Outcome:
    """Runs a fault's tests with the fault in a private copy, and takes the fault out again."""
    path = copy / fault.file
    source = path.read_text(encoding="utf-8")
    path.write_text(source.replace(fault.old, fault.new), encoding="utf-8")
    try:
        return run_tests(copy, fault.tests, marker)
    finally:
        path.write_text(source, encoding="utf-8")


def run_tests(copy: Path, tests: Sequence[str], marker: str) -> Outcome:
    """Runs a selection of tests in a private copy."""
    options = ["-x", "-q", "-rfE", "-m", marker, "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment(copy), capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return Outcome("broken", f"not at an end after {TIMEOUT} s", time.monotonic() - began)
    seconds = time.monotonic() - began
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return Outcome("failed", failed[0], seconds)
    if done.returncode == 0 and re.search(r"\b\d+ passed\b", done.stdout):
        return Outcome("passed", "", seconds)
    last = (done.stdout + done.stderr).strip().splitlines()[-1:]
    return Outcome("broken", f"exit code {done.returncode}: {''.join(last)}", seconds)


def markdown(rows: Sequence[Row], side: str) -> list[str]:
    """The report, a line of Markdown each."""
    found = sum(row.result == "found" for row in rows)
    lines = [f"{side}: {found} of {len(rows)} seeded faults found.", ""]
    lines += ["| fault | what it breaks | result | by | seconds |", "| --- | --- | --- | --- | ---: |"]
    for row in rows:
        detail = row.detail.replace("|", r"\|")
        lines.append(
            f"| {row.fault.name} | {row.fault.breaks} | {row.result} | {detail} | {row.seconds:.0f} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
