"""`g2rpo score`: each image with its own prompt, every score on disk once, and failures are explained."""

import csv
import json
import os
import sys

import pytest
from support.painted_images import paint
from typer.testing import CliRunner

from g2rpo.__main__ import app
from g2rpo.evaluation.score_folder import score

OWN = """
import os, signal, torch
CALLS, STOP_AFTER, BROKEN = [], [None], []

def red(images, prompts, metadata=None):
    CALLS.append((tuple(images.shape), list(prompts), metadata))
    if STOP_AFTER[0] == len(CALLS):
        os.kill(os.getpid(), signal.SIGINT)
    return images[:, 0].mean((1, 2))

def fails(images, prompts, metadata=None):
    if BROKEN:
        raise RuntimeError("the scorer is down")
    return images[:, 0].mean((1, 2))

def some(images, prompts, metadata=None):
    known = {"nan": float("nan"), "inf": float("inf")}
    return torch.tensor([known.get(prompt, float(len(prompt))) for prompt in prompts])

def watching(images, prompts, metadata=None):
    CALLS.append(open("out/scores.csv").read().count("\\n"))
    return images[:, 0].mean((1, 2))

def none(images, prompts, metadata=None):
    return torch.full((len(images),), torch.nan)

class Scaled:
    def __init__(self, device, factor=1.0):
        self.factor = factor

    def describe(self):
        return f"{self.factor} times red"

    def __call__(self, images, prompts, metadata=None):
        return self.factor * images[:, 0].mean((1, 2))
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The user's module, in a folder that is the current one and is searched for modules."""
    (tmp_path / "own_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    import own_rewards

    yield own_rewards
    sys.modules.pop("own_rewards")


def table(out):
    with (out / "scores.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def quiet(line):
    pass


def reds(out):
    return {row["file"]: round(float(row["own_rewards:red"]) * 255, 3) for row in table(out)}


def test_sizes_are_grouped_and_rows_keep_the_images_order(tmp_path, own):
    folder = paint(tmp_path / "in", {"a.png": 10, "c.png": 30, "e.png": 50})
    paint(folder, {"b.png": 20, "d.png": 40}, size=(12, 6))
    (tmp_path / "p.txt").write_text("pa\npb\npc\npd\npe\n")
    done = score(
        folder, ["own_rewards:red"], prompts=str(tmp_path / "p.txt"), out=tmp_path / "out", batch=2, say=quiet
    )
    assert [(shape, prompts) for shape, prompts, _ in own.CALLS] == [
        ((2, 3, 8, 8), ["pa", "pc"]),
        ((1, 3, 8, 8), ["pe"]),
        ((1, 3, 6, 12), ["pb"]),
        ((1, 3, 6, 12), ["pd"]),
    ]
    assert reds(tmp_path / "out") == {"a.png": 10, "b.png": 20, "c.png": 30, "d.png": 40, "e.png": 50}
    assert [row["prompt"] for row in table(tmp_path / "out")] == ["pa", "pb", "pc", "pd", "pe"]
    got = done.rewards["own_rewards:red"]
    assert got.mean * 255 == pytest.approx(30) and (got.n, got.invalid) == (5, 0)
    assert got.standard_error * 255 == pytest.approx((250 / 5) ** 0.5)  # variance 1000 / 4, of 5


def test_what_is_no_number_is_counted_and_in_no_mean(tmp_path, own):
    folder = paint(tmp_path / "in", {f"{i}.png": i for i in range(4)})
    (tmp_path / "p.txt").write_text("four\nnan\nsixsix\ninf\n")
    words = ["score", "--images", str(folder), "--prompts", "p.txt", "--out", "out", "--device", "cpu"]
    result = CliRunner().invoke(app, [*words, "--rewards", "own_rewards:some, own_rewards:red"])
    assert result.exit_code == 0, result.output
    assert "2 of 4 images have no score by own_rewards:some" in result.output
    line = next(line for line in result.output.splitlines() if line.strip().startswith("own_rewards:some"))
    assert line.split() == ["own_rewards:some", "5.0000", "1.0000", "2", "2"]
    wrote = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert wrote["rewards"]["own_rewards:some"] == {"mean": 5, "standard_error": 1, "n": 2, "invalid": 2}
    assert wrote["complete"] is True and wrote["num_images"] == wrote["scored"] == 4
    assert [row["own_rewards:some"] for row in table(tmp_path / "out")] == ["4", "nan", "6", "inf"]
    again = CliRunner().invoke(
        app, [*words[:-4], "--out", "none", "--rewards", "own_rewards:none,own_rewards:red"]
    )
    assert again.exit_code == 1 and "4 of 4 images have no score by own_rewards:none" in again.output
    assert (
        json.loads((tmp_path / "none" / "scores.json").read_text())["rewards"]["own_rewards:none"]["mean"]
        is None
    )


def test_interrupted_it_goes_on(tmp_path, own):
    folder = paint(tmp_path / "in", {f"{i}.png": 10 * i for i in range(6)})
    (tmp_path / "p.txt").write_text("a\nb\nc\nd\ne\nf\n")
    words = [
        "score",
        "--images",
        str(folder),
        "--prompts",
        "p.txt",
        "--rewards",
        "own_rewards:red",
        "--batch",
        "1",
    ]
    own.STOP_AFTER[0] = 3
    result = CliRunner().invoke(app, [*words, "--out", "out"])
    assert result.exit_code == 130 and "2 rows are kept" in result.output
    assert json.loads((tmp_path / "out" / "scores.json").read_text())["complete"] is False
    kept = (tmp_path / "out" / "scores.csv").read_text()
    (tmp_path / "out" / "scores.csv").write_text(kept[:-6])  # and as if the power had failed in the last row
    own.STOP_AFTER[0] = None
    own.CALLS.clear()
    result = CliRunner().invoke(app, [*words, "--out", "out"])
    assert result.exit_code == 0 and "1 were scored before" in result.output
    assert [prompts for _, prompts, _ in own.CALLS] == [["b"], ["c"], ["d"], ["e"], ["f"]]
    CliRunner().invoke(app, [*words, "--out", "whole"])
    for name in ("scores.csv", "scores.json"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_rows_are_on_disk_as_they_are_scored(tmp_path, own):
    folder = paint(tmp_path / "in", {f"{i}.png": i for i in range(4)})
    (tmp_path / "p.txt").write_text("a\nb\nc\nd\n")
    score(folder, ["own_rewards:watching"], prompts="p.txt", out="out", batch=2, say=quiet)
    assert own.CALLS == [1, 3]  # lines: the header, then two rows more


def test_what_had_no_score_is_tried_again(tmp_path, own):
    folder = paint(tmp_path / "in", {f"{i}.png": 51 * i for i in range(2)})
    (tmp_path / "p.txt").write_text("a\nb\n")
    words = ["score", "--images", str(folder), "--prompts", "p.txt", "--rewards", "own_rewards:fails"]
    own.BROKEN.append(True)
    result = CliRunner().invoke(app, words)
    assert (
        result.exit_code == 1
        and "2 of 2 images have no score by own_rewards:fails: RuntimeError" in result.output
    )
    own.BROKEN.clear()
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and "0.1000" in result.output and "were scored before" not in result.output


def test_rows_are_on_disk_when_a_file_breaks_off(tmp_path, own):
    folder = paint(tmp_path / "in", {f"{i}.png": 10 * i for i in range(3)})
    data = (folder / "2.png").read_bytes()
    (folder / "2.png").write_bytes(data[: len(data) // 2 + 8])  # a good header, then torn data
    (tmp_path / "p.txt").write_text("a\nb\nc\n")
    done = score(folder, ["own_rewards:red"], prompts="p.txt", out="out", batch=1, say=quiet)
    assert list(done.unreadable) == ["2.png"] and done.rewards["own_rewards:red"].n == 2
    lines = (tmp_path / "out" / "scores.csv").read_text().splitlines()
    assert lines[-1] == "2.png,c,,"
    (folder / "2.png").write_bytes(data)  # repaired: only this one is scored
    own.CALLS.clear()
    done = score(folder, ["own_rewards:red"], prompts="p.txt", out="out", batch=1, say=quiet)
    assert not done.unreadable and [prompts for _, prompts, _ in own.CALLS] == [["c"]]
    assert reds(tmp_path / "out") == {"0.png": 0, "1.png": 10, "2.png": 20}


def test_all_bad_files_are_listed_at_once(tmp_path, own):
    folder = paint(tmp_path / "in", {f"{i}.png": 10 * i for i in range(3)})
    data = (folder / "2.png").read_bytes()
    damaged = bytearray(data)
    damaged[damaged.index(b"IDAT") + 6] ^= 4
    (folder / "checksum.png").write_bytes(damaged)
    (folder / "cut.png").write_bytes(data[:50])
    (folder / "page.png").write_text("<!DOCTYPE html><html>Log in</html>")
    (folder / "pointer.png").write_text("version https://git-lfs.github.com/spec/v1\n")
    (folder / "empty.png").touch()
    (folder / "folder.png").mkdir()
    (folder / "no_suffix").write_bytes(data)
    bad = ["checksum.png", "cut.png", "empty.png", "folder.png", "gone.png", "page.png", "pointer.png"]
    good = ["0.png", "1.png", "2.png", "no_suffix"]
    (tmp_path / "m.jsonl").write_text("".join(f'{{"file": "{n}", "prompt": "p"}}\n' for n in [*bad, *good]))
    words = [
        "score",
        "--images",
        str(folder),
        "--rewards",
        "own_rewards:red",
        "--map",
        "m.jsonl",
        "--out",
        "out",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    listed = result.output.partition("7 of 11 files cannot be read as images and have no score:\n")[
        2
    ].splitlines()
    assert [line.split(":")[0].strip() for line in listed[:7]] == bad
    reasons = dict(line.strip().split(": ", 1) for line in listed[:7])
    assert "0 bytes" in reasons["empty.png"] and "a folder" in reasons["folder.png"]
    assert "web page" in reasons["page.png"] and "Git LFS" in reasons["pointer.png"]
    assert "no such file" in reasons["gone.png"] and "damaged or cut off" in reasons["checksum.png"]
    rows = (tmp_path / "out" / "scores.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == [*bad, *good]
    assert [row for row in rows if row.endswith(",p,,")] == [f"{name},p,," for name in bad]
    summary = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert list(summary["unreadable"]) == bad and summary["rewards"]["own_rewards:red"]["n"] == 4


def test_only_what_changed_is_scored_again(tmp_path, own):
    folder = paint(tmp_path / "in", {f"{i}.png": 10 * i for i in range(4)})
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n{"prompt": "d", "text": "T"}\n')

    def scored():
        own.CALLS.clear()
        score(folder, ["own_rewards:red"], prompts=str(prompts), out="out", say=quiet)
        return [prompt for _, prompts, _ in own.CALLS for prompt in prompts]

    assert scored() == ["a", "b", "c", "d"] and scored() == []
    paint(folder, {"1.png": 99})
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "C"}\n{"prompt": "d", "text": "U"}\n')
    assert scored() == ["b", "C", "d"]
    assert reds(tmp_path / "out") == {"0.png": 0, "1.png": 99, "2.png": 20, "3.png": 30}


@pytest.mark.parametrize("edit", [(",", ";"), ("file,", "name,"), (",1,", ",,"), (",1,", ",good,")])
def test_rows_that_somebody_edited_are_scored_again(tmp_path, own, edit):
    """As a spreadsheet leaves them: other separators, no such column, an empty cell, words."""
    folder = paint(tmp_path / "in", {"0.png": 255})
    (tmp_path / "p.txt").write_text("a\n")
    score(folder, ["own_rewards:red"], prompts="p.txt", out="out", say=quiet)
    written = tmp_path / "out" / "scores.csv"
    before = written.read_text()
    written.write_text(before.replace(*edit))
    assert written.read_text() != before
    score(folder, ["own_rewards:red"], prompts="p.txt", out="out", say=quiet)
    assert written.read_text() == before and len(own.CALLS) == 2


def test_a_folder_of_scores_belongs_to_its_rewards(tmp_path, own):
    folder = paint(tmp_path / "in", {"0.png": 51})
    (tmp_path / "p.txt").write_text("a\n")
    given = {"prompts": str(tmp_path / "p.txt"), "out": "out", "say": quiet}
    done = score(folder, ["own_rewards:Scaled"], options=["own_rewards:Scaled.factor=2"], **given)
    assert json.loads((tmp_path / "out" / "scores.json").read_text())["described"] == {
        "own_rewards:Scaled": "2 times red"
    }
    assert done.rewards["own_rewards:Scaled"].mean == pytest.approx(0.4)
    refused = pytest.raises(
        ValueError, match=r"out contains scores of .* by own_rewards:Scaled, from another"
    )
    with refused:
        score(folder, ["own_rewards:Scaled"], options=["own_rewards:Scaled.factor=3"], **given)
    with refused:
        score(paint(tmp_path / "other", {"0.png": 51}), ["own_rewards:Scaled"], **given)
    (tmp_path / "own_rewards.py").write_text(OWN + "\n# edited\n")
    with refused:
        score(folder, ["own_rewards:Scaled"], options=["own_rewards:Scaled.factor=2"], **given)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rewards", "tiny_clp"], "unknown reward 'tiny_clp'; did you mean 'tiny_clip'"),
        (["--rewards", ","], "no rewards given"),
        (["--rewards", "verifier,verifier"], "'verifier' is given twice"),
        (["--rewards", "verifier", "--option", "ocr.exact=true"], "'ocr' is not among the rewards verifier"),
        (["--rewards", "verifier", "--option", "exact"], "an option is NAME.KEY=VALUE"),
        (["--rewards", "verifier", "--prompts", "none.txt"], "no prompt file 'none.txt'"),
        (["--rewards", "verifier", "--prompts", "bad.json"], "bad.json, line 1: not JSON"),
        (["--rewards", "verifier", "--prompts", "p.txt", "--map", "p.txt"], "--prompts or --map, not both"),
        (["--rewards", "verifier", "--images", "nowhere"], "--images nowhere: no such folder"),
        (["--rewards", "verifier", "--images", "bare"], "no images (.png, .jpg, .jpeg, .webp) in bare; "),
        (["--rewards", "verifier", "--out", "p.txt"], "is a file; give a folder"),
    ],
)
def test_mistakes_are_told(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    paint(tmp_path / "in", {"a.png": 1})
    (tmp_path / "bare").mkdir()
    (tmp_path / "p.txt").write_text("a\n")
    (tmp_path / "bad.json").write_text("[")
    given = words if "--images" in words else [*words, "--images", "in"]
    given = given if {"--prompts", "--map"} & set(words) else [*given, "--prompts", "p.txt"]
    result = CliRunner().invoke(app, ["score", *given])
    assert result.exit_code == 2 and said in result.output.replace("\n", ""), result.output
    assert sorted(os.listdir(tmp_path)) == ["bad.json", "bare", "in", "p.txt"]
