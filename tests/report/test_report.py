"""The report of a run: its numbers are those of the run, and it names what is missing."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.measured_runs import lines, write_run, write_samples
from typer.testing import CliRunner

from g2rpo.cli.app import app
from g2rpo.inference.images import to_pil
from g2rpo.report.charts import Series, heat_map, line_chart, number, signed
from g2rpo.report.findings import Gain, by_noise_step, cost_rows, differences, gains
from g2rpo.report.health import preflight_rows
from g2rpo.report.page import render, write_report
from g2rpo.report.pictures import fitting_steps
from g2rpo.report.record import PairedSet, read_run

HOSTILE = '<img src=x onerror=alert(1)> </script> "quoted" & more'
STEPS = (0, 5, 10)
HOLD = """
import sys
from pathlib import Path
from g2rpo.run.lock import exclusive
with exclusive(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.readline()
"""
"""A process that holds the lock of a run folder."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of ten iterations with everything that a run records; one prompt is hostile."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    given = lines([0.1 * i for i in range(1, 11)], evals=[(0, 0.5), (5, 0.6), (10, 0.7)])
    for line in given:
        line |= {"eval_gain/e": line["eval/e"] - 0.5, "eval_gain_se/e": 0.05} if "eval/e" in line else {}
        line |= {"grad_norm": 1.0, "seconds_anchor": 0.5, "seconds_tails": 1.0} if "nfe" in line else {}
    write_run(folder, given, rewards={"tiny_clip": 1.0})
    (folder / "finished").write_text("10\n")
    write_samples(folder, STEPS, HOSTILE)
    generator = torch.Generator().manual_seed(1)
    prompts, seeds = [HOSTILE, "two stars", "three stars", "a cat"], [1, 2, 3, 4]
    before, after = [0.1, 0.2, 0.3, 0.4], [0.3, 0.5, 0.7, 0.6]
    for when in ("before", "after"):
        for i in range(4):
            path = folder / "comparison" / f"{when}_0" / f"{i:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            to_pil(torch.rand(3, 16, 16, generator=generator)).save(path)
    entry = {"title": "unseen prompts", "prompts": prompts, "seeds": seeds, "metadata": [{}] * 4}
    entry["scores"] = {"tiny_clip": before, "verifier": [0.5, 0.5, 0.5, None]}
    (folder / "comparison" / "before.json").write_text(json.dumps({"sets": [entry]}))
    scores = {"tiny_clip": after, "verifier": [0.4, 0.3, 0.2, 0.1]}
    (folder / "comparison" / "after.json").write_text(json.dumps({"scores": [scores]}))
    groups = [
        {
            "step": step,
            "prompt_index": p,
            "noise_steps": [0, 2],
            "reward": {"tiny_clip": 0.1 * step + 0.01 * p},
            "reward_std": {"tiny_clip": [[0.1, 0.2], [0.3, 0.4 + 0.1 * p]]},
            "advantage_std": [[1.0, 1.0], [1.0, 0.5]],
            "rank_correlation": [0.25, None],
        }
        for step in range(1, 11)
        for p in range(2)
    ]
    (folder / "groups.jsonl").write_text("".join(json.dumps(g) + "\n" for g in groups))
    (folder / "warnings.jsonl").write_text('{"step": 7, "kind": "guard", "message": "verifier falls"}\n')
    (folder / "preflight.json").write_text('{"ratio": {"largest": 1e-7}}')
    return folder


@pytest.fixture(scope="module")
def page(run):
    return render(read_run(run))


class Page(HTMLParser):
    """What a browser would load, run or follow."""

    def __init__(self, text):
        super().__init__()
        self.sources, self.handlers, self.ids, self.links, self.scripts = [], [], [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        for name, value in attrs:
            if name in ("src", "srcset") or (name == "href" and tag != "a"):
                self.sources.append(value)
            elif name == "href":
                self.links.append(value)
            elif name.startswith("on"):
                self.handlers.append(name)
            elif name == "id":
                self.ids.append(value)


def test_it_loads_nothing_and_a_prompt_is_only_text(page):
    parsed = Page(page)
    assert parsed.sources and all(source.startswith("data:image/webp;base64,") for source in parsed.sources)
    assert not parsed.handlers and parsed.scripts == 2
    assert "&lt;img src=x onerror=alert(1)&gt;" in page and HOSTILE not in page
    assert len(parsed.ids) == len(set(parsed.ids))
    assert {link.removeprefix("#") for link in parsed.links} <= set(parsed.ids)


def test_the_verdict_is_of_paired_prompts(run, page):
    rows = {row.reward: row for row in differences(read_run(run).sets[0], ["tiny_clip"])}
    assert list(rows) == ["tiny_clip", "verifier"]
    assert rows["tiny_clip"].difference == pytest.approx(np.mean([0.2, 0.3, 0.4, 0.2]))
    assert rows["tiny_clip"].verdict == "rose" and rows["tiny_clip"].trained
    assert rows["verifier"].prompts == 3 and rows["verifier"].difference == pytest.approx(-0.2)
    assert rows["verifier"].verdict == "fell"
    assert f"Trained: {rows['tiny_clip'].sentence}." in page
    assert f"Held out: {rows['verifier'].sentence}." in page
    assert signed(rows["tiny_clip"].difference) == "+0.275"


def test_the_verdict_in_one_line(page):
    assert '<p class="headline">Trained: tiny_clip rose. Held out: verifier fell.</p>' in page
    assert '<tr data-reward="verifier">' in page


def test_the_slider_has_every_image_of_every_recorded_iteration(page):
    data = json.loads(re.search(r'id="slider-data">(.*?)</script>', page, re.S)[1])
    assert data["steps"] == list(STEPS)
    assert [len(frames) for frames in data["frames"]] == [3, 3]
    assert len({uri for frames in data["frames"] for uri in frames}) == 6
    assert page.count("data-cell=") == 2
    assert page.count('<p class="prompt">') == 1  # both images are of one prompt


def test_figures_of_the_groups(run, page):
    record = read_run(run)
    spread = by_noise_step(record, "reward_std", "tiny_clip")
    assert spread == pytest.approx({(0, 0): 0.1, (0, 1): 0.2, (2, 0): 0.3, (2, 1): 0.45})
    assert by_noise_step(record, "rank_correlation") == {(0, 0): 0.25}
    cells = re.findall(r'<td style="--heat-share:\d+%">([^<]+)</td>', page)
    assert cells == ["0.1", "0.2", "0.3", "0.45", "1", "1", "1", "0.5", "0.25"]
    assert "verifier falls" in page and "ratio.largest" in page
    assert "finished after 10 iterations" in page


def test_gains_are_ordered(page):
    largest = page[page.index("The largest gains") : page.index("The smallest gains")]
    smallest = page[page.index("The smallest gains") :]
    assert "three stars" in largest and "three stars" not in smallest.split("</section>")[0]


def test_a_new_run_an_interrupted_one_and_one_of_an_earlier_version(tmp_path):
    started = write_run(tmp_path / "started", [], iterations=5)
    page = render(read_run(started))
    assert "interrupted: 0 of 5 iterations" in page and page.count("No iteration is complete yet") == 3
    old = write_run(tmp_path / "old", lines([0.1, 0.2]), iterations=5)
    page = render(read_run(old))
    for missing in (
        "groups.jsonl is missing",
        "No sample grids",
        "there is no verdict",
        "environment was not",
    ):
        assert missing in page
    assert "interrupted: 2 of 5 iterations" in page
    (old / "groups.jsonl").write_text("not json\n")
    assert "groups.jsonl, line 1" in render(read_run(old))


def test_a_custom_algorithm_is_not_imported(tmp_path):
    folder = write_run(tmp_path / "run", lines([0.1]))
    config = folder / "config.toml"
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config.write_text(
        config.read_text().replace('algorithm = "g2rpo"', f'algorithm = "{tmp_path}/evil.py:A"')
    )
    assert "custom algorithm is not imported" in render(read_run(folder))
    assert not (tmp_path / "ran").exists()


def test_the_command(run, tmp_path):
    done = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "mine.html")])
    assert done.exit_code == 0 and "open it in a browser" in done.output
    assert (tmp_path / "mine.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "nothing", "is not a folder"),
        (lambda path: path, "has no config.toml"),
    ],
)
def test_no_run_folder(tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        write_report(make(tmp_path))


def test_a_folder_for_the_file_must_exist(run, tmp_path):
    with pytest.raises(ValueError, match="create it, or give another --out"):
        write_report(run, tmp_path / "no" / "file.html")


def test_gains_are_of_prompts_not_of_images():
    pairs = PairedSet(
        "unseen",
        ("a", "b", "a", "b", "c"),
        (1, 2, 3, 4, 5),
        {"r": np.array([0.0, 1.0, 0.0, 1.0, np.nan])},  # spread 0.5
        {"r": np.array([1.0, 1.0, 0.0, 0.5, 1.0])},
    )
    # a: (1 + 0) / 2 / 0.5, b: (0 - 0.5) / 2 / 0.5; c has no score
    assert gains(pairs, {"r": 1.0}) == [Gain("a", 1.0, (0, 2)), Gain("b", -0.5, (1, 3))]
    assert gains(pairs, {"other": 1.0}) == []


def test_a_run_at_work_a_stopped_one_and_one_of_another_machine(tmp_path):
    folder = write_run(tmp_path / "run", lines([0.1, 0.2]), iterations=5)
    begun = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with begun as process:
        assert process.stdout.readline() == "locked\n"
        assert "in progress: 2 of 5 iterations" in render(read_run(folder))
        lock = (folder / ".lock").read_text()
        process.communicate("\n")
    assert "interrupted: 2 of 5 iterations" in render(read_run(folder))
    (folder / ".lock").write_text(lock)  # as after kill -9
    assert "interrupted: 2 of 5 iterations" in render(read_run(folder))
    (folder / ".lock").write_text(json.dumps(json.loads(lock) | {"host": "elsewhere"}))
    assert "2 of 5 iterations; in progress on another machine, or interrupted" in render(read_run(folder))


def test_before_and_after_come_from_the_sample_grids_of_a_run_in_progress(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(folder / "comparison")
    page = render(read_run(folder))
    assert "right at iteration 10, with the same seeds" in page and page.count('<figure class="pair">') == 2


def test_evaluations_without_single_scores_are_no_verdict(tmp_path):
    folder = write_run(tmp_path / "run", lines([0.1, 0.2], evals=[(0, 0.5), (2, 0.75)]))
    assert "Means of the evaluations: e (held out): 0.5 ± 0.1 at iteration 0, 0.75 ± 0.1 at 2." in render(
        read_run(folder)
    )


FOREIGN = {
    "comparison/before.json": '{"sets": [{"title": 1}]}',
    "comparison/after.json": '{"scores": 3}',
    "evaluations/step_000000.json": '{"prompts": 1, "seeds": 2, "num_steps": 3}',
    "groups.jsonl": '{"step": 1, "reward": 7, "reward_std": "x"}\n',
    "preflight.json": '{"rewards": 5, "limits": [], "warnings": [3]}',
    "samples/step_000005/0001.png": "no image",
    "warnings.jsonl": '{"step": 3, "message": {"a": [1]}}\n',
    "environment.jsonl": '{"step": 0, "packages": 4}\n',
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_damaged_or_foreign_record_costs_its_part_only(run, tmp_path, name):
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(FOREIGN[name])
    page = render(read_run(folder))
    assert "finished after 10 iterations" in page and 'id="settings"' in page and "<h2" in page
    if name not in ("warnings.jsonl", "evaluations/step_000000.json"):
        assert '<p class="problem">' in page.split('id="training"')[0]


def test_the_checks_before_the_first_update():
    record = {
        "ratio_noise": 2e-7,
        "clip_range": 1e-4,
        "num_groups": 4,
        "flat_group_share": 0.25,
        "rewards": {"r": {"mean": 0.5, "spread": 0.1, "noise_over_spread": 0.2}},
        "memory_gb": {"device": "cpu", "total": 24.0, "headroom": 12.0},
        "limits": {
            "ratio_noise": 0.001,
            "clip_range_over_noise": 2.0,
            "flat_group_share": 0.5,
            "noise_over_spread": 0.5,
            "headroom_share": 0.05,
        },
    }
    assert preflight_rows(record) == [
        (
            "|ratio \N{MINUS SIGN} 1| of update against rollout, before any update",
            "2e\N{MINUS SIGN}7",
            "at most 0.001",
        ),
        ("clip range", "0.0001", "at least 4e\N{MINUS SIGN}7"),
        ("groups without reward spread, share of 4", "0.25", "at most 0.5"),
        ("r", "mean 0.5, spread within a group 0.1", ""),
        ("r: noise of scoring again, over its spread", "0.2", "at most 0.5"),
        ("memory left on cpu", "12 of 24 GB", "at least 5 %"),
    ]
    assert preflight_rows({}) == []


def test_costs_are_compared_with_the_plan(run):
    record = read_run(run)
    planned = SimpleNamespace(
        forwards={"total": 8.0},
        update_forwards={"policy": 8.0, "snapshot": 0.0, "reference": 8.0},
        seconds={"rollout": 1.0, "update": 2.0},
        memory_bytes=2e9,
    )
    rows = {row.item: (row.measured, row.planned) for row in cost_rows(record, planned)}
    assert rows["forwards of the rollout, per iteration (mean)"] == ("10", "8")
    # a policy forward with its backward is 3; a reference forward is 1
    assert rows["forwards of the update, a backward counts as two (mean)"] == ("30", "32")
    assert rows["rollout (median)"] == ("1.5 s", "1 s") and rows["update (median)"] == ("", "2 s")
    assert rows["iteration (median)"] == ("2 s", "3 s")
    assert rows["peak memory per device"] == ("", "2 GB")
    assert rows["device hours of 10 iterations"] == ("0.00556", "0.00833")  # 20 s and 30 s


def test_equal_cells_of_a_heat_map_have_one_colour():
    cells = {(0, 0): 0.866025, (0, 1): 0.866020}
    shares = re.findall(r"--heat-share:(\d+)%", heat_map("spread", ["0"], ["a", "b"], cells, "k"))
    assert len(shares) == 2 and len(set(shares)) == 1


def test_numbers():
    assert number(-0.00123456) == "\N{MINUS SIGN}0.001235" and number(1234567) == "1.23e6"
    assert signed(0.0) == "+0" and number(float("nan")) == "-"


def test_long_runs_keep_the_ends_of_the_slider():
    steps = list(range(0, 3001, 10))
    kept = fitting_steps(steps, 16, 8_000_000)
    assert kept[0] == 0 and kept[-1] == 3000 and 50 < len(kept) < 100
    assert fitting_steps([0, 5], 1000, 10) == [0, 5]


def test_a_chart_describes_itself():
    chart = line_chart("Reward", [Series("mine", [(1, 0.5, 0.1), (9, 0.75, None)])])
    nan = float("nan")
    unclean = [(0, nan, 0.1), (1, 0.5, 0.1), (5, float("inf"), None), (9, 0.75, nan)]
    assert line_chart("Reward", [Series("mine", unclean)]) == chart
    assert 'aria-label="Reward: mine from 0.5 at iteration 1 to 0.75 at 9"' in chart
    with pytest.raises(ValueError, match="nothing to draw"):
        line_chart("Reward", [Series("mine", [])])
