"""`g2rpo compare` over runs that are there: which may be put together, which are whole, where they lie."""

from pathlib import Path

import pytest
from support.measured_runs import lines, write_run
from typer.testing import CliRunner

from g2rpo.__main__ import app
from g2rpo.comparison.compare import compare


def test_runs_that_were_evaluated_in_different_ways(tmp_path):
    evaluated = lines([1.0, 2.0], evals=[(0, 0.5), (2, 0.7)])
    few, many = (
        write_run(
            tmp_path / f"{n}", evaluated, n, eval_every=2, eval_prompts="world:heldout", num_eval_prompts=n
        )
        for n in (2, 4)
    )
    not_evaluated = write_run(tmp_path / "not_evaluated", lines([1.0, 2.0]), 7, eval_every=0)
    with pytest.raises(ValueError, match=r"may differ only in the seed.*num_eval_prompts: 2 and 4"):
        compare(tmp_path / "out", runs=[f"a={few}", f"a={many}"])
    compare(tmp_path / "out", runs=[f"a={few}", f"b={many}"])
    note = "Arms were evaluated in different ways (num_eval_prompts; see Settings that differ)"
    assert note in (tmp_path / "out" / "compare.md").read_text()
    compare(tmp_path / "out", runs=[f"a={few}", f"a={not_evaluated}"])
    assert "in different ways" not in (tmp_path / "out" / "compare.md").read_text()


def test_a_run_without_its_last_evaluation_is_not_whole(tmp_path):
    cut = write_run(
        tmp_path / "cut", lines([1.0, 2.0], evals=[(0, 0.5)]), eval_every=2, eval_prompts="world:heldout"
    )
    said: list[str] = []
    compare(tmp_path / "out", runs=[f"a={cut}"], say=said.append)
    text = (tmp_path / "out" / "compare.md").read_text()
    assert said[-1].startswith("note: 1 of 1 runs are not finished")
    assert "1 of 1 runs are not finished" in text and "its last evaluation is missing" in text


def test_a_comparison_may_be_moved(tmp_path, monkeypatch):
    write_run(tmp_path / "one" / "runs" / "a" / "0", lines([1.0, 2.0]))
    write_run(tmp_path / "far", lines([3.0, 4.0]))
    monkeypatch.chdir(tmp_path)
    found = compare(Path("one"), runs=["a=one/runs/a/0", "b=far"], smoothing=0)
    Path("one").rename("two")
    monkeypatch.chdir("/")
    assert compare(tmp_path / "two", report_only=True, smoothing=0).values == found.values


def test_the_terminal_shows_names_whole_in_80_columns(tmp_path, monkeypatch):
    measure, arm = "reward/a_judge_of_25_long", "MixGRPO_Flash_cosine"
    words = []
    for name in (arm, "b"):
        for seed in (0, 1):
            rows = [{measure if k == "reward/r" else k: v for k, v in line.items()} for line in lines([seed])]
            folder = write_run(tmp_path / name / str(seed), rows, seed)
            words += ["--run", f"{name}={folder}"]
    monkeypatch.setenv("COLUMNS", "80")
    output = CliRunner().invoke(app, ["compare", *words, "--out", str(tmp_path / "out")]).output.splitlines()
    place = next(i for i, line in enumerate(output) if line.split() == [measure])
    assert [" ".join(line.split()) for line in output[place + 1 : place + 3]] == [
        f"{arm} 0.5000 ± 0.5000 0.5000 ± 0.5000 –",
        "b 0.5000 ± 0.5000 0.5000 ± 0.5000 +0.0000 ± 0.0000",
    ]
