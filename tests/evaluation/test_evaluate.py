"""`g2rpo evaluate`: the same seeds for every model, nothing done twice, two processes do what one does."""

import csv
import json
import math
import os
import shutil
import signal
import sys
from collections import Counter
from functools import cache

import numpy as np
import pytest
from PIL import Image
from support.processes import run_processes
from typer.testing import CliRunner

from g2rpo.__main__ import app
from g2rpo.data.prompts import Prompt
from g2rpo.evaluation import lineup
from g2rpo.evaluation.evaluate import evaluate
from g2rpo.evaluation.image_files import read_pixels
from g2rpo.evaluation.stats import difference_over_prompts, mean_over_prompts
from g2rpo.inference import sample as sampling
from g2rpo.inference.images import read_png_text
from g2rpo.inference.names import labels_of
from g2rpo.inference.open import open_policy
from g2rpo.inference.sample import SampleRequest
from g2rpo.models.tiny import tiny_folder

OWN = """
import os, signal, torch
CALLS, STOP_AFTER, BROKEN = [], [None], []

def red(images, prompts, metadata=None):
    CALLS.append((list(prompts), metadata))
    if STOP_AFTER[0] == len(CALLS):
        os.kill(os.getpid(), signal.SIGINT)
    return images[:, 0].mean((1, 2))

def picky(images, prompts, metadata=None):
    unknown = [prompt in BROKEN for prompt in prompts]
    return images[:, 1].mean((1, 2)).masked_fill(torch.tensor(unknown), torch.nan)
"""
TEXTS = ("a red circle", "two blue stars", "three green squares")
PROMPTS = tuple(Prompt(text, {"number": i}, i) for i, text in enumerate(TEXTS))
MODELS = ["tiny", "tiny@g2rpo"]
REWARDS = ["own_eval:red", "own_eval:picky"]


def request(**changes):
    given = {"prompts": PROMPTS, "steps": (1, 2), "num_images": 2, "seed": 7, "batch": 4, "device": "cpu"}
    return SampleRequest(**(given | changes))


def quiet(line):
    pass


@cache
def opened_once(model, *given):
    return open_policy(model, **dict(given))


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The user's module of rewards, in the current folder; each policy is loaded by one test alone."""
    monkeypatch.setattr(sampling, "open_policy", lambda model, **given: opened_once(model, *given.items()))
    (tmp_path / "own_eval.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    import own_eval

    yield own_eval
    sys.modules.pop("own_eval")


@pytest.fixture
def sampled(monkeypatch):
    """Seeds of every batch that is sampled; a signal comes before the batch number of sampled.stop."""

    class Sampled(list):
        stop = None

    seen, real = Sampled(), lineup.sample_images

    def counting(policy, prompts, **given):
        if seen.stop == len(seen):
            os.kill(os.getpid(), signal.SIGINT)
        seen.append((given["num_steps"], given["seeds"]))
        return real(policy, prompts, **given)

    monkeypatch.setattr(lineup, "sample_images", counting)
    return seen


def table(out):
    with (out / "scores.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def files(out):
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_every_model_draws_the_same_prompts_and_seeds(tmp_path, own, sampled):
    done = evaluate(MODELS, request(), REWARDS, out="out", say=quiet)
    seeds = [[7, 8, 9, 10], [11, 12]]
    assert sampled == [(steps, batch) for _ in MODELS for steps in (1, 2) for batch in seeds]
    rows = table(tmp_path / "out")
    assert [(r["model"], r["steps"], r["index"]) for r in rows] == [
        (model, steps, str(i)) for model in MODELS for steps in "12" for i in range(6)
    ]
    for row in rows:
        path, i = tmp_path / "out" / row["file"], int(row["index"])
        prompt, info = read_png_text(path)
        assert prompt == row["prompt"] == TEXTS[i // 2] and info["seed"] == int(row["seed"]) == 7 + i
        assert (info["model"], info["num_steps"]) == (row["model"], int(row["steps"]))
        assert info["guidance"] == 3.5 and info["shift"] == 3.0
        pixels = read_pixels(path)  # every score is that of the file that is kept
        assert float(row["own_eval:red"]) == pytest.approx(pixels[0].mean().item(), abs=1e-6)
        assert float(row["own_eval:picky"]) == pytest.approx(pixels[1].mean().item(), abs=1e-6)
    assert own.CALLS[0] == ([TEXTS[i // 2] for i in range(4)], [{"number": i // 2} for i in range(4)])

    def scores(model):
        values = [float(r["own_eval:red"]) for r in rows if (r["model"], r["steps"]) == (model, "2")]
        return np.reshape(values, (3, 2))

    gap = difference_over_prompts(scores("tiny@g2rpo"), scores("tiny"))
    assert done.differences[2, "tiny@g2rpo", "own_eval:red"] == gap and gap.mean != 0
    assert done.means[2, "tiny", "own_eval:red"] == mean_over_prompts(scores("tiny"))
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    cell = result["steps"]["2"]["tiny@g2rpo"]["own_eval:red"]
    assert cell["difference"]["low"] == gap.low and cell["difference"]["prompts"] == 3
    text = (tmp_path / "out" / "results.md").read_text()
    assert f"({gap.mean:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}])" in text and "## 1 steps" in text
    assert "| model | own_eval:red | own_eval:picky |" in text
    with Image.open(tmp_path / "out" / "grid_2.png") as grid:
        assert grid.height > 3 * 176 and grid.width > 2 * 176


def test_nothing_is_done_twice_and_models_and_steps_may_be_added(tmp_path, own, sampled):
    few = request(steps=(2,), num_images=1)
    evaluate(["tiny"], few, REWARDS, out="out", say=quiet)
    before = files(tmp_path / "out")
    sampled.clear(), own.CALLS.clear()
    evaluate(["tiny"], few, REWARDS, out="out", say=quiet)
    assert not sampled and not own.CALLS and files(tmp_path / "out") == before
    evaluate(MODELS, request(num_images=1), REWARDS, out="out", say=quiet)
    assert Counter(steps for steps, _ in sampled) == {1: 2, 2: 1} and len(own.CALLS) == 3
    (tmp_path / "out" / "tiny" / "2" / "00001.png").unlink()
    sampled.clear(), own.CALLS.clear()
    evaluate(MODELS, request(num_images=1), REWARDS, out="out", say=quiet)
    assert sampled == [(2, [7, 8, 9])] and [prompts for prompts, _ in own.CALLS] == [[TEXTS[1]]]
    evaluate(MODELS, request(num_images=1), REWARDS, out="whole", say=quiet)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize(
    ("models", "changes", "rewards", "said"),
    [
        (MODELS, {"seed": 8}, REWARDS, "seed: 7 stored, 8 given"),
        (MODELS, {"conditions": {"guidance": 2.0}}, REWARDS, "guidance: None stored, 2.0 given"),
        (MODELS, {"prompts": PROMPTS[:2]}, REWARDS, "prompts: 3 stored, 2 given"),
        (MODELS, {"steps": (2,)}, REWARDS, "steps: 1 stored, but not given"),
        (MODELS, {}, REWARDS[:1], "rewards: "),
        (MODELS[:1], {}, REWARDS, "models: tiny@g2rpo (tiny@g2rpo) is stored, but not given"),
        (MODELS[::-1], {}, REWARDS, "the first model: tiny stored, tiny@g2rpo given"),
    ],
)
def test_other_settings_are_refused(tmp_path, own, models, changes, rewards, said):
    (tmp_path / "out").mkdir()
    first = lineup.Lineup(
        "evaluation", MODELS, request(), tmp_path / "out", more={"rewards": reward_identities(REWARDS)}
    )
    first.write()
    before = files(tmp_path / "out")
    with pytest.raises(ValueError, match="contains images with other settings") as refused:
        evaluate(models, request(**changes), rewards, out="out", say=quiet)
    assert said in str(refused.value) and files(tmp_path / "out") == before


def reward_identities(names):
    from g2rpo.evaluation.score_folder import code_hash

    return {name: {"options": {}, "code": code_hash(name)} for name in names}


def test_a_model_that_changed_is_refused(tmp_path, own):
    folder = shutil.copytree(tiny_folder("tiny@g2rpo")[1], tmp_path / "weights")
    given = ("evaluation", ["tiny", "weights"], request(base="tiny"), tmp_path / "out")
    lineup.Lineup(*given).write()
    lineup.Lineup(*given)
    os.utime(folder / "pytorch_lora_weights.safetensors", (1, 1))
    with pytest.raises(ValueError, match="weights: not the stored model, or changed since then"):
        lineup.Lineup(*given)
    with pytest.raises(ValueError, match="contains other results"):
        lineup.Lineup("gallery", ["tiny"], request(), tmp_path / "out")


def test_interrupted_it_goes_on(tmp_path, own, sampled):
    given = {"out": tmp_path / "out", "say": quiet}
    sampled.stop = 3  # within the first model's second number of steps
    assert evaluate(MODELS, request(), REWARDS, **given).interrupted
    assert len(sampled) == 3 and not own.CALLS and not (tmp_path / "out" / "results.md").exists()
    sampled.stop, own.STOP_AFTER[0] = None, 3  # while the third batch is scored
    assert evaluate(MODELS, request(), REWARDS, **given).interrupted
    assert len(sampled) == 4 and len(table(tmp_path / "out")) == 6
    own.STOP_AFTER[0] = None
    # As if the power had failed: a part of a row, the last number of which is cut.
    head, *rows = (tmp_path / "out" / "scores.csv").read_text().splitlines(keepends=True)
    (tmp_path / "out" / "scores.csv").write_text(head + "".join(rows[:3]))
    (tmp_path / "out" / "scores.part-0.csv").write_text(head + rows[3] + rows[4].rstrip()[:-3])
    own.CALLS.clear()
    assert not evaluate(MODELS, request(), REWARDS, **given).interrupted
    assert len(sampled) == 8 and [len(prompts) for prompts, _ in own.CALLS] == [2, 4, 2, 4, 2, 4, 2]
    evaluate(MODELS, request(), REWARDS, out="whole", say=quiet)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_rewards_in_another_order_keep_their_scores(tmp_path, own):
    evaluate(MODELS[:1], request(), REWARDS, out="out", say=quiet)
    before = table(tmp_path / "out")
    again, clean = (evaluate(MODELS, request(), REWARDS[::-1], out=o, say=quiet) for o in ("out", "clean"))
    assert again.means == clean.means and again.differences == clean.differences
    assert table(tmp_path / "out")[: len(before)] == before


def test_what_has_no_score_is_counted_and_tried_again(tmp_path, own):
    own.BROKEN[:] = TEXTS[1:2]
    (tmp_path / "p.txt").write_text("\n".join(TEXTS))
    words = ["evaluate", "tiny", "tiny", "--prompts", "p.txt", "--steps", "1", "--device", "cpu"]
    words += ["--rewards", ",".join(REWARDS), "--out", "out"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "1 images of tiny-2 in 1 steps have no score by own_eval:picky" in said
    cells = json.loads((tmp_path / "out" / "results.json").read_text())["steps"]["1"]
    assert {key: cells["tiny"]["own_eval:picky"][key] for key in ("prompts", "invalid")} == {
        "prompts": 2,
        "invalid": 1,
    }
    gap = cells["tiny-2"]["own_eval:picky"]["difference"]  # the same model twice: no difference at all
    assert (gap["mean"], gap["low"], gap["high"], gap["prompts"], gap["invalid"]) == (0, 0, 0, 2, 1)
    own.CALLS.clear()
    own.BROKEN[:] = TEXTS
    result = CliRunner().invoke(app, words)  # only what failed is scored again
    assert result.exit_code == 0 and [prompts for prompts, _ in own.CALLS] == [[TEXTS[1]]] * 2
    own.BROKEN[:] = TEXTS
    result = CliRunner().invoke(app, [*words[:-1], "none"])
    assert result.exit_code == 1
    cell = json.loads((tmp_path / "none" / "results.json").read_text())["steps"]["1"]["tiny"]
    assert cell["own_eval:picky"]["mean"] is None and cell["own_eval:picky"]["invalid"] == 3
    assert math.isfinite(cell["own_eval:red"]["mean"])


def test_the_first_models_conditions_hold_for_all_and_are_told(tmp_path, own, monkeypatch):
    opened, real = [], sampling.open_policy

    def opening(model, **given):
        opened.append((model, given))
        return real(model, **given)

    monkeypatch.setattr(sampling, "open_policy", opening)
    monkeypatch.setattr(lineup, "own_conditions", lambda model: {"guidance": 1.5} if "@" in model else {})
    lines = []
    evaluate(MODELS, request(steps=(1,), num_images=1), REWARDS[:1], out="out", say=lines.append)
    assert [model for model, _ in opened] == MODELS and opened[1][1]["guidance"] == 3.5
    assert (
        "tiny@g2rpo: 3 images to sample, with guidance 3.5 (its own: 1.5), as tiny, or as requested" in lines
    )
    asked = request(steps=(1,), num_images=1, conditions={"guidance": 2.0, "resolution": None})
    evaluate(MODELS, asked, REWARDS[:1], out="asked", say=quiet)
    assert [given["guidance"] for _, given in opened[2:]] == [2.0, 2.0]
    assert read_png_text(tmp_path / "asked" / "tiny@g2rpo" / "1" / "00000.png")[1]["guidance"] == 2.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rewards", "tiny_clp"], "unknown reward 'tiny_clp'; did you mean 'tiny_clip'"),
        (["--rewards", "verifier", "--option", "ocr.exact=true"], "'ocr' is not among the rewards"),
        (["--steps", "0"], "steps=0: give numbers of denoising steps, at least 1"),
        (["--steps", "2,2"], "steps=2,2: give numbers of denoising steps"),
        (["--steps", "2,x"], "--steps 2,x: give whole numbers separated by commas"),
        (["--prompts", "empty.txt"], "empty.txt contains no prompts"),
        (["--prompts", "none.txt"], "no prompt file 'none.txt'"),
        (["--labels", "a,"], "2 labels for 1 models"),
        (["--guidance", "-1"], "Invalid value for '--guidance'"),
        (["tiny@g2rp"], "no embedded model 'tiny@g2rp'; there are: tiny"),
        (["nowhere"], "no model folder 'nowhere'"),
        (["weights"], "weights contains only weights; give the model that they belong to with --base NAME"),
        (["other"], "other contains no model_index.json"),
        (["empty_run"], "empty_run contains no checkpoint; train the run further"),
        (["--shift", "0"], "--shift 0: give a number above 0, or pipeline"),
        (["--out", "p.txt"], "is a file; give a folder"),
    ],
)
def test_mistakes_are_told_before_a_model_is_opened(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sampling, "open_policy", lambda *given, **more: pytest.fail("a model was opened"))
    (tmp_path / "p.txt").write_text("a red circle\n")
    (tmp_path / "empty.txt").write_text("\n")
    for file in ("weights/pytorch_lora_weights.safetensors", "empty_run/config.toml", "other/x.txt"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    given = {"--rewards": "verifier", "--prompts": "p.txt", "--steps": "1"}
    words = [*words, *(word for key in given if key not in words for word in (key, given[key]))]
    result = CliRunner().invoke(app, ["evaluate", "tiny", *words])
    assert result.exit_code == 2 and said in result.output.replace("\n", ""), result.output
    assert sorted(os.listdir(tmp_path)) == ["empty.txt", "empty_run", "other", "p.txt", "weights"]


def test_labels_are_short_and_different():
    models = ["tiny", "runs/a", "other/a", "runs/a/checkpoints/step_000050", "runs/b/export", "x/FLUX.1-dev"]
    assert labels_of([*models, "tiny", "l/lora.safetensors"]) == [
        "tiny",
        "a",
        "a-2",
        "a_step_000050",
        "b",
        "FLUX.1-dev",
        "tiny-2",
        "lora",
    ]
    assert labels_of(["x/runs/mine/0", "x/runs/other/0", "7"]) == ["mine_0", "other_0", "7"]
    assert labels_of(["a", "b", "c"], ["my base", "../x", "x"]) == ["my_base", "x", "x-2"]
    assert labels_of(["a", "b"], ["grid_2.png", "v1.5"]) == ["grid_2_png", "v1.5"]  # .png: a file's name
    with pytest.raises(ValueError, match="no models"):
        labels_of([])


def evaluate_as(folder, out):
    """With a line of seeds for each batch that this process draws."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    real = lineup.sample_images

    def telling(policy, prompts, **given):
        print("seeds", *given["seeds"], flush=True)
        return real(policy, prompts, **given)

    lineup.sample_images = telling
    evaluate(MODELS, request(batch=2), REWARDS, out=out)


def test_two_processes_write_what_one_writes(tmp_path, own):
    evaluate(MODELS, request(batch=2), REWARDS, out="one", say=quiet)
    for code, output in run_processes(2, evaluate_as, str(tmp_path), "two", log=tmp_path / "log"):
        assert code == 0, output
    outputs = [(tmp_path / "log" / f"process_{rank}.txt").read_text() for rank in range(2)]
    assert "tiny@g2rpo: 12 images" in outputs[0] and "images" not in outputs[1]
    shares = [[line for line in text.splitlines() if line.startswith("seeds")] for text in outputs]
    # Of each model 2 x 3 batches: every other one is sampled by the other process.
    assert shares[0] == ["seeds 7 8", "seeds 11 12", "seeds 9 10"] * 2
    assert shares[1] == ["seeds 9 10", "seeds 7 8", "seeds 11 12"] * 2
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    assert one.keys() == two.keys() and len(one) == 2 * 2 * 6 + 6
    assert [name for name in one if one[name] != two[name]] == []
