"""Shows that two checkouts of g2rpo compute the same numbers, bit for bit.

    python tools/compare_checkouts.py BASE NEW
    python tools/compare_checkouts.py BASE NEW --only demo lora --jobs 1
    python tools/compare_checkouts.py --list

Runs the same small commands in both checkouts (tools/checkouts/cases.py), with this interpreter, on the CPU
and without a network, and compares their files (tools/checkouts/difference.py): metrics.jsonl without times,
the trained weights, their averages and the optimizer's state, all images, exported tensors, evaluations,
scores, the cache of embeddings and the resolved settings. Some cases continue or open in both checkouts what
BASE wrote; some must also equal another run: a resumed or killed one the run without a stop.

Only the command line of a checkout is used, and `read_tensors` of g2rpo.run.checkpoint or g2rpo.checkpoint,
where it exists, to read checkpoints. NEW is always run. BASE's results are kept in --work, a folder per case
with its files and output, and are used again while the package, the cases and the installed packages are the
same.

Exit code 0: everything is equal. 1: something differs; the first differences are printed with file, step or
tensor, and both values. Exports of adapters are compared as products (alpha / rank) B A, to 1e-6.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from checkouts.cases import Case, all_cases, selected
from checkouts.difference import COUNTED, TRAINED, Comparison, compare_folders, total
from checkouts.runs import (
    Outcome,
    Side,
    close_servers,
    keep_results_of_this_environment,
    output_of,
    package_digest,
    read_checkpoints,
    run_case,
)

READ_BY_NEW = "tensors_of_base"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Compare two checkouts of g2rpo, bit for bit.")
    parser.add_argument("base", nargs="?", type=Path, help="checkout whose numbers count")
    parser.add_argument("new", nargs="?", type=Path, help="checkout that must have the same")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases, by the start of a name")
    parser.add_argument("--work", type=Path, help="folder of the results; default: a temporary one")
    parser.add_argument("--jobs", type=int, default=2, help="commands that run at once")
    parser.add_argument("--show", type=int, default=5, help="differences that are printed of each case")
    parser.add_argument("--allow-additional", action="store_true", help="allow what only NEW has")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    options = parser.parse_args(arguments)
    if options.list:
        for case in all_cases():
            print(f"{case.name:32} {' '.join(case.words)}")
        return 0
    if options.base is None or options.new is None:
        parser.error("give two checkouts: BASE NEW")
    if options.work is not None:
        return compare(options, options.work.absolute())
    with tempfile.TemporaryDirectory() as work:
        return compare(options, Path(work))


def compare(options: argparse.Namespace, work: Path) -> int:
    """Runs, compares and prints; returns the exit code."""
    compared, needed = selected(options.only)
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        print("not run, for want of a C++ compiler:", *(case.name for case in compared if case.compiles))
        compared = [case for case in compared if not case.compiles]
        needed = [case for case in needed if not case.compiles]
    base_checkout, new_checkout = options.base.absolute(), options.new.absolute()
    base = Side(base_checkout, work / "base" / package_digest(base_checkout), work)
    new = Side(new_checkout, work / "new", work)
    keep_results_of_this_environment(base.results)
    shutil.rmtree(new.results, ignore_errors=True)
    new.results.mkdir(parents=True)
    for side, name in ((base, "BASE"), (new, "NEW")):
        print(f"{name}: {side.checkout} ({commit(side.checkout)}, package {package_digest(side.checkout)})")
    began = time.monotonic()
    try:
        outcomes, outcomes_new = run_all(needed, compared, base, new, options.jobs)
    finally:
        close_servers()
    problems = read_all(needed, compared, base, new)
    results = {
        case: compare_case(
            case, base, new, (outcomes[case.name], outcomes_new[case.name]), options.allow_additional
        )
        for case in compared
    }
    print_table(results, outcomes, outcomes_new)
    print(f"{time.monotonic() - began:.0f} s; results are in {work}" if options.work else "")
    return print_differences(results, problems, options.show)


def commit(checkout: Path) -> str:
    """The commit of a checkout, for the record."""
    done = subprocess.run(
        ["git", "-C", str(checkout), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else "no git"


def run_all(
    needed: Sequence[Case], compared: Sequence[Case], base: Side, new: Side, jobs: int
) -> tuple[dict[str, Outcome], dict[str, Outcome]]:
    """Outcomes in BASE and NEW by case. A case waits for the runs of BASE that it needs."""
    started: dict[str, Future[Outcome]] = {}

    def run(case: Case, side: Side) -> Outcome:
        for name in case.needs():  # these were handed to the pool before, so they run already or are done
            started[name].result()
        outcome = run_case(case, side, base)
        print(f"  {'BASE' if side is base else 'NEW':4} {case.name:32} {outcome.seconds:6.1f} s", flush=True)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        for case in needed:
            started[case.name] = pool.submit(run, case, base)
        started_new = {case.name: pool.submit(run, case, new) for case in compared}
        try:
            return (
                {name: future.result() for name, future in started.items()},
                {name: future.result() for name, future in started_new.items()},
            )
        except BaseException:  # Ctrl-C too: what runs comes to its end, nothing new is started
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def read_all(needed: Sequence[Case], compared: Sequence[Case], base: Side, new: Side) -> list[str]:
    """Reads the checkpoints of BASE by both checkouts and those of NEW by NEW; returns what went wrong."""
    read = {
        "BASE cannot read its checkpoints": read_checkpoints(list(needed), base, base),
        "NEW cannot read its checkpoints": read_checkpoints(list(compared), new, new),
        "NEW cannot read BASE's checkpoints": read_checkpoints(list(compared), new, base, READ_BY_NEW),
    }
    return [f"{what}:\n{problem}" for what, problem in read.items() if problem]


def compare_case(
    case: Case, base: Side, new: Side, outcomes: tuple[Outcome, Outcome], additional: bool
) -> Comparison:
    """What differs between both checkouts in one case, of which `outcomes` are those in BASE and NEW."""
    found = Comparison()
    for name, side, one in zip(("BASE", "NEW"), (base, new), outcomes, strict=True):
        if one.problem:
            found.differences.append(f"{name}: {one.problem}")
        if bool(one.exit_code) != bool(case.refusal):
            end = "\n    ".join(output_of(case, side).strip().splitlines()[-4:])
            found.differences.append(f"{name}: exit code {one.exit_code}; the output ends with\n    {end}")
        elif case.refusal and case.refusal not in output_of(case, side):
            found.differences.append(f"{name}: the message does not name {case.refusal}")
    if outcomes[0].exit_code != outcomes[1].exit_code:
        found.differ("exit code", outcomes[0].exit_code, outcomes[1].exit_code)
    for part in comparisons(case, base, new, additional):
        found.differences += part.differences
        found.counts = total(iter((found.counts, part.counts)))
    return found


def comparisons(case: Case, base: Side, new: Side, additional: bool) -> Iterator[Comparison]:
    """BASE with NEW; BASE's checkpoints as both read them; and BASE with the run that it must equal."""
    folder, folder_new = base.folder(case), new.folder(case)
    yield compare_folders(folder / "files", folder_new / "files", additional=additional)
    yield compare_tensors(folder / TRAINED, folder_new / TRAINED, additional)
    read = compare_tensors(folder / TRAINED, folder_new / READ_BY_NEW, additional)
    read.differences = [f"BASE's checkpoint, read by NEW: {one}" for one in read.differences]
    yield Comparison(differences=read.differences)
    if case.equals is not None:
        other = base.folder(next(one for one in all_cases() if one.name == case.equals))
        for part in ("files", TRAINED):
            same = compare_folders(other / part, folder / part)
            where = f"within BASE, to {case.equals}"
            yield Comparison(differences=[f"{where}: {one}" for one in same.differences])


def compare_tensors(base: Path, new: Path, additional: bool) -> Comparison:
    """Two folders of checkpoints' tensors."""
    return compare_folders(base, new, additional=additional)


def print_table(
    results: dict[Case, Comparison], outcomes: dict[str, Outcome], outcomes_new: dict[str, Outcome]
) -> None:
    """A row per case, and the sums."""

    def row(name: str, counts: Mapping[str, object], seconds: Sequence[object], result: str) -> None:
        cells = [*(counts.get(column, 0) for column in COUNTED), *seconds]
        print(f"{name:32}" + "".join(f"{cell!s:>11}" for cell in cells) + f"  {result}")

    print()
    row("case", {name: name for name in COUNTED}, ("s in BASE", "s in NEW"), "result")
    for case, found in results.items():
        result = "refused by both" if case.refusal else "equal"
        if found.differences:
            result = f"{len(found.differences)} differences"
        both = (outcomes[case.name], outcomes_new[case.name])
        row(case.name, found.counts, [f"{one.seconds:.1f}" for one in both], result)
    sums = total(found.counts for found in results.values())
    times = [f"{sum(o.seconds for o in some.values()):.0f}" for some in (outcomes, outcomes_new)]
    row(f"{len(results)} cases", sums, times, "")


def print_differences(results: dict[Case, Comparison], problems: list[str], show: int) -> int:
    """The first differences of each case; returns the exit code."""
    for problem in problems:
        print(problem)
    for case, found in results.items():
        if found.differences:
            print(f"\n{case.name}: g2rpo {' '.join(case.words)}")
            print(*(f"  {one}" for one in found.differences[:show]), sep="\n")
            if len(found.differences) > show:
                print(f"  … and {len(found.differences) - show} more")
    differing = sum(bool(found.differences) for found in results.values())
    if differing or problems:
        print(f"\nDIFFERENT: {differing} of {len(results)} cases differ")
        return 1
    print(f"EQUAL: {len(results)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
