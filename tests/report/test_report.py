"""The report of a run: its numbers are those of the run, and it names what is missing."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from support.measured_runs import lines, write_run
from typer.testing import CliRunner

from g2rpo.cli.app import app
from g2rpo.inference.images import save_png, to_pil
from g2rpo.report.charts import Series, line_chart, number, signed
from g2rpo.report.findings import by_noise_step, differences
from g2rpo.report.page import render, write_report
from g2rpo.report.pictures import fitting_steps
from g2rpo.report.record import read_run

HOSTILE = '<img src=x onerror=alert(1)> </script> "quoted" & more'
STEPS = (0, 5, 10)


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
    generator = torch.Generator().manual_seed(0)
    for step in STEPS:
        for i in range(2):
            image = torch.rand(3, 16, 16, generator=generator)
            save_png(image, folder / "samples" / f"step_{step:06d}" / f"{i:04d}.png", HOSTILE, {"seed": i})
        (folder / "samples" / f"step_{step:06d}" / "grid.png").touch()
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


def test_the_slider_has_every_image_of_every_recorded_iteration(page):
    data = json.loads(re.search(r'id="slider-data">(.*?)</script>', page, re.S)[1])
    assert data["steps"] == list(STEPS)
    assert [len(frames) for frames in data["frames"]] == [3, 3]
    assert len({uri for frames in data["frames"] for uri in frames}) == 6
    assert page.count("data-cell=") == 2


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
    assert "0 of 5 iterations so far" in page and page.count("No iteration is complete yet") == 3
    old = write_run(tmp_path / "old", lines([0.1, 0.2]), iterations=5)
    page = render(read_run(old))
    for missing in (
        "groups.jsonl is missing",
        "No sample grids",
        "there is no verdict",
        "environment was not",
    ):
        assert missing in page
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
    assert 'aria-label="Reward: mine from 0.5 at iteration 1 to 0.75 at 9"' in chart
    with pytest.raises(ValueError, match="nothing to draw"):
        line_chart("Reward", [Series("mine", [])])
