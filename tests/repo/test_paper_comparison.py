"""benchmarks/paper_comparison.sh: its arms are settings that exist, and those whose runs are committed."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from g2rpo.comparison.arms import read_arms, read_words
from g2rpo.config.identity import identity
from g2rpo.config.load import read_settings

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "compare"
RUNS_OF = {"tune": "search1", "tune2": "search2", "tune3": "search3", "tune4": "search4", "tune5": "search5"}
STAGES = [*RUNS_OF, "joint", "single", "lambda", "rest", "more"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)  # the arms' recipe is named from there


def calls(tmp_path, *words, **environment):
    """What the script would call: it finds a `python` that writes down its words."""
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir()
    fake.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@" "" >> "$(dirname "$0")/calls"\n')
    fake.chmod(0o755)
    script = ["bash", str(ROOT / "benchmarks" / "paper_comparison.sh"), *words, str(tmp_path / "out")]
    path = f"{fake.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        script, env={**os.environ, "PATH": path, **environment}, capture_output=True, text=True
    )
    file = fake.parent / "calls"
    calls = file.read_text().removesuffix("\0\0").split("\0\0") if file.is_file() else []
    return done, [call.split("\0") for call in calls]


def benchmark(name, *words):
    return subprocess.run(
        [sys.executable, f"benchmarks/{name}", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def arms_of(call):
    """Arm name -> its settings for seed 0, and the seeds, of a call of `g2rpo compare`."""
    assert call[:3] == ["-m", "g2rpo", "compare"]
    options: dict[str, list[str]] = {}
    words, rest = [], iter(call[3:])
    for word in rest:
        if word.startswith("--"):
            options.setdefault(word, []).append(next(rest))
        else:
            words.append(word)
    assert read_words(words)[0] == []
    arms = read_arms(options["--arm"], words, [])
    return {arm.name: arm.settings(0, Path("out")) for arm in arms}, options["--seeds"][0].split(",")


@pytest.mark.parametrize("stage", STAGES)
def test_the_arms_are_those_whose_runs_are_committed(stage, tmp_path):
    done, made = calls(tmp_path, stage)
    assert done.returncode == 0, done.stderr
    arms, seeds = arms_of(made[0])
    committed = RESULTS / RUNS_OF.get(stage, stage)
    apart = {"seed": 0, "iterations": 0, "out": ""}
    there = {path.name for path in committed.iterdir()}
    assert there <= set(arms), "runs of arms that the script does not have"
    for name in there:
        for seed in (committed / name).iterdir():
            ran = read_settings(seed)
            assert identity(ran) | apart == identity(arms[name]) | apart, f"{stage}/{name}/{seed.name}"
            assert str(ran.seed) == seed.name
            # The first search was to be longer: the clock stopped it.
            assert ran.iterations == arms[name].iterations or stage == "tune"
    if stage not in RUNS_OF:
        for name in arms:
            assert {seed.name for seed in (committed / name).iterdir()} >= set(seeds), f"{stage}/{name}"


def test_the_control_variate(tmp_path):
    done, made = calls(tmp_path, "variate", SEEDS="4")
    assert done.returncode == 0 and len(made) == 2
    for call, coarse in zip(made, ("3", "2"), strict=True):
        assert call[0] == "benchmarks/control_variate.py" and call[call.index("--coarse") + 1] == coarse
        assert call[call.index("--seeds") + 1] == "4"
        ran = read_settings(RESULTS / "variate" / f"controlled{coarse}" / "0")
        size = int(call[call.index("--group-size") + 1])
        assert (ran.group_size, ran.option("granularities")) == (size, [1, int(coarse)])


def test_some_arms_and_other_seeds(tmp_path):
    done, made = calls(tmp_path, "lambda", ONLY="L2|L1_.*", SEEDS="7,8")
    assert done.returncode == 0
    arms, seeds = arms_of(made[0])
    assert (list(arms), seeds) == (["L2", "L1_G16"], ["7", "8"])


@pytest.mark.parametrize(
    "words, environment, said",
    [(["lambda"], {"ONLY": "L9"}, "no arm of lambda is called L9"), (["lamda"], {}, "no such stage: lamda")],
)
def test_what_it_does_not_have(words, environment, said, tmp_path):
    done, made = calls(tmp_path, *words, **environment)
    assert (done.returncode, made) == (2, []) and said in done.stderr


def test_the_table_of_steps():
    done = benchmark("steps_table.py", "results/compare/joint_steps")
    results = json.loads((RESULTS / "joint_steps" / "results.json").read_text())["steps"]["4"]
    gains = [results[f"MixGRPO.{seed}"]["verifier"]["difference"]["mean"] for seed in (0, 1, 2)]
    error = statistics.stdev(gains) / 3**0.5
    assert f"| {statistics.mean(gains):+.4f} ± {error:.4f} |" in done.stdout
    assert "| steps | reward | base | DanceGRPO (3) | MixGRPO (3) | G2RPO_1 (3) | G2RPO (3) |" in done.stdout


def test_the_table_of_steps_of_one_seed(tmp_path):
    results = json.loads((RESULTS / "more_steps" / "results.json").read_text())
    results["models"] = {"base": "tiny", "FlowGRPO": "runs/FlowGRPO/2"}
    for by_label in results["steps"].values():
        by_label["FlowGRPO"] = by_label["FlowGRPO.2"]
    (tmp_path / "results.json").write_text(json.dumps(results))
    done = benchmark("steps_table.py", tmp_path)
    gain = results["steps"]["4"]["FlowGRPO.2"]["verifier"]["difference"]
    assert "| steps | reward | base | FlowGRPO (1) |" in done.stdout
    assert f"| {gain['mean']:+.4f} [{gain['low']:.4f}, {gain['high']:.4f}] |" in done.stdout


@pytest.mark.parametrize(
    "stage, arms",
    [("joint", ["DanceGRPO", "G2RPO"]), ("rest", ["FlowGRPO"]), ("more", ["L2_constant", "MixGRPO_cosine"])],
)
def test_what_is_finished_is_evaluated_in_several_steps(stage, arms, tmp_path):
    for arm in [*arms, "G2RPO_twice"]:  # the last is no arm that is drawn in several steps
        for seed in "013":
            (tmp_path / "out" / "runs" / arm / seed).mkdir(parents=True)
        for seed in "03":
            (tmp_path / "out" / "runs" / arm / seed / "finished").touch()
    done, made = calls(tmp_path, stage)
    assert done.returncode == 0, done.stderr
    assert [call[:3] for call in made[1:3]] == [
        ["-m", "g2rpo", "evaluate"],
        ["benchmarks/steps_table.py", str(tmp_path / "out" / "steps")],
    ]
    models = made[1][3 : made[1].index("--labels")]
    assert models == ["tiny", *(str(tmp_path / "out" / "runs" / arm / "0") for arm in arms)]
    assert made[1][made[1].index("--labels") + 1] == ",".join(["base", *(f"{arm}.0" for arm in arms)])


def ends(arm):
    """Seed -> the last evaluation by the verifier."""
    lines = {p.parent.name: p.read_text().splitlines() for p in sorted(arm.glob("*/metrics.jsonl"))}
    found = {seed: [json.loads(line).get("eval/verifier") for line in one] for seed, one in lines.items()}
    return {seed: [value for value in one if value is not None][-1] for seed, one in found.items()}


def test_the_table_of_a_stage():
    done = benchmark("paper_tables.py", "results/compare/joint")
    values = list(ends(RESULTS / "joint" / "MixGRPO_4").values())
    error = statistics.stdev(values) / len(values) ** 0.5
    row = next(line for line in done.stdout.splitlines() if line.startswith("| MixGRPO_4 | 5 |"))
    assert f"| {statistics.mean(values):.4f} ± {error:.4f} |" in row


def test_paired_differences():
    arm, other = RESULTS / "joint" / "MixGRPO_4", RESULTS / "more" / "MixGRPO_random"  # five seeds, four
    done = benchmark("paired_differences.py", arm, other)
    one, two = ends(arm), ends(other)
    gaps = {seed: one[seed] - two[seed] for seed in two}
    error = statistics.stdev(gaps.values()) / len(gaps) ** 0.5
    each = ", ".join(f"{seed}: {gap:+.4f}" for seed, gap in gaps.items())
    assert len(gaps) == 4
    said = f"| MixGRPO_random | verifier | {statistics.mean(gaps.values()):+.4f} ± {error:.4f} | {each} |"
    assert said in done.stdout


def test_paired_differences_at_equal_cost_are_those_of_the_page():
    others = ["joint/MixGRPO_4", "more/MixGRPO_cosine", "joint/DanceGRPO_3"]
    done = benchmark(
        "paired_differences.py",
        RESULTS / "more" / "L2_constant",
        *(RESULTS / one for one in others),
        "--at",
        "compute",
    )
    page = " ".join((ROOT / "docs" / "appendix" / "comparison.md").read_text().split())
    rows = [line.split(" | ") for line in done.stdout.splitlines() if "| verifier |" in line]
    assert len(rows) == len(others)
    for row in rows:
        assert f"{row[2].removeprefix('+')} above" in page
    done = benchmark(
        "paired_differences.py", *[RESULTS / "joint" / "G2RPO"] * 2, "--at", "nfe", "--cost", "1e9"
    )
    assert "| G2RPO | verifier | +nan ± nan |" in done.stdout, "no run got that far"


@pytest.mark.parametrize(
    "words, said",
    [
        (["results/compare", "results/compare/joint/G2RPO"], "holds no SEED/metrics.jsonl"),
        (["results/compare/search5/mix_4_lr1e-5", "results/compare/joint/G2RPO"], "no seed in common: [100]"),
        (["results/compare/joint/G2RPO"] * 2 + ["--cost", "9"], "Give --at step|nfe|compute|seconds with it"),
    ],
)
def test_what_cannot_be_paired(words, said):
    done = benchmark("paired_differences.py", *words)
    assert done.returncode and said in done.stderr and not done.stdout
