"""The disk space of a run is compared with the free space, and the advice makes the run fit."""

import re

import pytest

from g2rpo.config.load import load_settings
from g2rpo.costs.costs import plan_costs
from g2rpo.costs.disk import check_disk, checkpoint_bytes, disk_problem, export_note
from g2rpo.costs.memory import shape_of_run, trained_params
from g2rpo.run.checkpoint import headroom
from g2rpo.runtime.files import DiskFull


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that makes settings and sets the free space, in checkpoints beside the headroom."""

    def made(free, **changes):
        values = {"keep_last": 3, "keep_every": 10, "iterations": 40, "checkpoint_every": 5} | changes
        words = [f"{k}={v}" for k, v in values.items()]
        settings = load_settings("tiny", [*words, f"out={tmp_path / 'run'}", f"cache={tmp_path / 'cache'}"])
        size = checkpoint_bytes(settings, trained_params(settings, shape_of_run(settings)))
        space = type("Usage", (), {"free": round(free * size) + headroom(size)})
        monkeypatch.setattr("shutil.disk_usage", lambda path: space)
        return settings, size

    return made


def test_the_peak_is_what_plan_reports(run):
    settings, size = run(0)
    disk = plan_costs(settings).disk
    assert disk["one checkpoint"] == size and disk["checkpoints (7 kept, 1 being written)"] == 8 * size
    assert disk_problem(run(8)[0]) == "" and disk_problem(run(7.99)[0]) != ""


@pytest.mark.parametrize(
    ("free", "advice"), [(6.5, "keep_last=1"), (4.5, "keep_every=0"), (2.5, "keep_last=1 keep_every=0")]
)
def test_the_advice_makes_the_run_fit(run, free, advice):
    settings, _ = run(free)
    problem = disk_problem(settings)
    assert f"keep fewer checkpoints: {advice} (then " in problem and "out=FOLDER on another disk" in problem
    changes = dict(word.split("=") for word in advice.split())
    assert disk_problem(run(free, **changes)[0]) == ""
    missing = float(re.search(r"free ([\d.,]+) GB, or", problem)[1].replace(",", "")) * 1e9
    size = run(free)[1]
    assert disk_problem(run(free + (missing + 1e7) / size)[0]) == ""


def test_no_settings_are_advised_that_do_not_help(run):
    problem = disk_problem(run(1.5)[0])
    assert "keep_last" not in problem and "keep_every" not in problem and "free " in problem


def test_checkpoints_that_are_there_count_as_the_runs_own(run, tmp_path):
    settings, size = run(5.5)
    assert disk_problem(settings) != ""
    folder = tmp_path / "run" / "checkpoints" / "step_000005"
    folder.mkdir(parents=True)
    with open(folder / "__0_0.distcp", "wb") as file:
        file.truncate(3 * size)
    assert disk_problem(settings) == "", "8 at the peak, 3 are there"
    with open(folder / "__0_0.distcp", "wb") as file:
        file.truncate(9 * size)
    assert disk_problem(run(0.9)[0]) != "" and disk_problem(run(1)[0]) == "", (
        "old ones go after the next write"
    )


def test_embeddings_on_the_same_disk_count(run):
    settings, _ = run(8)
    assert disk_problem(settings, missing_texts=1) != ""
    assert "embeddings of 1 prompts" in disk_problem(settings, missing_texts=1)
    with pytest.raises(DiskFull, match="Nothing was loaded, and no file was changed"):
        check_disk(settings, 1)
    check_disk(settings, 1, needed=False)


def test_an_export_that_does_not_fit_is_a_note(run):
    assert "not for its export" in export_note(run(8)[0])
    assert export_note(run(9)[0]) == ""
