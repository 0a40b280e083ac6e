"""`g2rpo compare`: its words, the report's files, and small real comparisons."""

import csv
import itertools
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.measured_runs import lines, write_run
from support.processes import FORKS, run_command
from typer.testing import CliRunner

from g2rpo.__main__ import app
from g2rpo.comparison.arms import read_arms, read_runs, read_seeds
from g2rpo.comparison.compare import Comparison, compare, measured, report
from g2rpo.comparison.page import bands_of, write_curves, write_page
from g2rpo.comparison.tables import MetricTables, Table, reach_table, settings_table, value_table
from g2rpo.comparison.verdict import difference_table, verdict
from g2rpo.run.folder import latest_checkpoint
from g2rpo.run.metrics import read_metrics

# Words.


def test_arms_from_words():
    arms = read_arms(
        ["a=tiny lr=1 'granularities=[1, 2]' rewards={\"x y:z\"=1, b=2}"], ["my/one.toml", "iterations=3"], []
    )
    assert [(a.name, a.recipe) for a in arms] == [("a", "tiny"), ("one", "my/one.toml")]
    assert arms[0].overrides == ("iterations=3", "lr=1", "granularities=[1, 2]", 'rewards={"x y:z"=1, b=2}')
    assert arms[1].overrides == ("iterations=3",)
    assert arms[0].words(4, Path("1e5"))[-2:] == ["seed=4", "out='1e5'"]


def test_vary_multiplies_arms_and_wins_over_them():
    arms = read_arms(["a=tiny lr=1"], [], ["lr=2,3", "granularities=[1],[1,2]"])
    assert [a.name for a in arms][::3] == ["a lr=2 granularities=[1]", "a lr=3 granularities=[1,2]"]
    assert len({a.folder for a in arms}) == 4 and not any(set(a.folder) & set(" []/") for a in arms)
    assert arms[0].overrides == ("lr=1", "lr=2", "granularities=[1]")
    assert [a.name for a in read_arms([], ["seedless=1"], ["lr=2,3"])] == ["tiny lr=2", "tiny lr=3"]
    assert read_arms([], [], []) == [] and read_seeds("3, 1") == [3, 1]


@pytest.mark.parametrize(
    ("arms", "words", "vary", "message"),
    [
        (["tiny"], [], [], "is not NAME=RECIPE"),
        (["../a=tiny"], [], [], "is not NAME=RECIPE"),
        (["a=tiny", "a=tiny lr=1"], [], [], "2 arms are called 'a'"),
        (["a=tiny"], ["x/a.toml"], [], "2 arms are called 'a'"),
        (["a=tiny"], [], ["model=x/y,x y"], "2 arms are called 'a_model=x_y'"),
        (["a=tiny seed=3"], [], [], "arm a: seed cannot be set per arm; --seeds sets it for all arms"),
        (
            ["a=tiny"],
            ["stop_after=3"],
            [],
            "stop_after cannot be set per arm; every run is trained to its end",
        ),
        (["a=tiny"], [], ["lr=1"], "not KEY=V1,V2 with two or more"),
        (["a=tiny"], [], ["lr=1,1"], "not KEY=V1,V2 with two or more"),
        (["a=tiny"], [], ["lr=1,2", "lr=3,4"], "--vary lr is given twice"),
    ],
)
def test_words_that_are_no_arms(arms, words, vary, message):
    with pytest.raises(ValueError, match=message):
        read_arms(arms, words, vary)


@pytest.mark.parametrize("text", ["", "a", "0,,1", "-1", "1,1", "1.5"])
def test_words_that_are_no_seeds(text):
    with pytest.raises(ValueError, match="--seeds"):
        read_seeds(text)


# Reports of runs that are there.


@pytest.fixture
def three_arms(tmp_path):
    """a: two seeds; b: one, with an evaluation; "c" is not begun."""
    a0 = write_run(tmp_path / "a0", lines([0.0, 2.0, 4.0]), 0)
    a1 = write_run(tmp_path / "a1", lines([0.0, 4.0, 8.0]), 1)
    b0 = write_run(
        tmp_path / "b0", lines([1.0, 7.0], nfe=20, evals=[(0, 0.5), (2, 0.25)]), 0, iterations=4, lr=1e-3
    )
    return measured({"a": {0: a0, 1: a1}, "b": {0: b0}, "c": {0: tmp_path / "c0"}}, {}, 0.0, ["g2rpo <x>"])


def test_tables_by_hand(three_arms):
    assert three_arms.metrics() == ["eval/e", "reward/r"]
    table = value_table(three_arms, "reward/r")
    assert list(table.heads[4:]) == [
        "final − a",
        "at 2 iterations",
        "at 30 forwards",
        "at 100 forwards + update",
        "at 4 s",
    ]
    assert table.rows[0][:6] == ["a", "2", "6.0000 ± 2.0000", "6.0000 ± 2.0000", "–", "3.0000 ± 1.0000"]
    # b at 30 forwards: halfway between 20 and 40, 1 + 7 over 2; of seed 0 alone, 7 - 4.
    assert table.rows[1] == ["b", "1", "7.0000", "7.0000", "+3.0000", "7.0000", "4.0000", "7.0000", "7.0000"]
    assert table.rows[2] == ["c", "0", *["not measured"] * 7]
    rows = {(row[0], row[1]): list(row[2:]) for row in reach_table(three_arms, "reward/r").rows}
    assert rows["a", "b"] == [
        "6.0000",
        "2 of 3 (0.67×)",
        "40 of 30 (1.33×)",
        "100 of 120 (0.83×)",
        "4 s of 6 s (0.67×)",
    ]
    assert rows["b", "a"] == [
        "7.0000",
        "not reached (own best 7.0000 at iteration 2)",
        "not reached (own best 7.0000 at 40 forwards)",
        "not reached (own best 7.0000 at 100 forwards + update)",
        "not reached (own best 7.0000 at 4 s)",
    ]
    assert rows["c", "a"] == ["not measured"] * 5
    evaluation = value_table(three_arms, "eval/e")
    assert evaluation.rows[0][2:] == ["not measured"] * 7
    assert evaluation.rows[1][2:5] == ["0.2500", "0.5000", "–"]  # nothing of a to pair with


class Parts(HTMLParser):
    """Open tags, whatever would be fetched, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.fetched, self.images, self.text = [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.images += [dict(attrs)["alt"]] if tag == "img" else []
        self.fetched += [v for k, v in attrs if k in ("src", "href", "srcset") and v[:5] != "data:"]
        if tag not in ("meta", "img", "source", "br", "link", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_report_and_its_page(three_arms, tmp_path):
    tables = report(tmp_path, three_arms)
    assert list(tables) == ["eval/e", "reward/r"]
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    parts = Parts(page)
    assert parts.open == [] and parts.fetched == [] and len(parts.images) == 2 * 4
    assert "url(" not in page and "<script" not in page and "@import" not in page
    assert "g2rpo <x>" in parts.text and "<x>" not in page  # escaped
    for phrase in (
        "2 of 4 runs are not finished",
        "not reached (own best 7.0000 at iteration 2)",
        "not measured",
        "not begun",
        "lr",
    ):
        assert phrase in parts.text, phrase
    assert all("reward" in alt or "evaluation" in alt for alt in parts.images)
    markdown = (tmp_path / "compare.md").read_text(encoding="utf-8")
    assert "| a | 2 | 6.0000 ± 2.0000 |" in markdown and "| lr | 5e-05 | 0.001 | – |" in markdown
    with open(tmp_path / "compare.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 + 3 + 2 + 2
    assert list(rows[-1].values()) == ["b", "0", "2", "40", "100", "4", "reward/r", "7.0"]
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    before = (tmp_path / "curves.svg").read_bytes()
    write_curves(tmp_path, three_arms)
    assert b"<svg" in before and (tmp_path / "curves.svg").read_bytes() == before


@pytest.fixture
def evaluated(tmp_path):
    """Arms of three seeds: evaluations of b are 0.2, 0.3 and 0.4 above those of a, and c is as good as a."""
    values = {"a": (0.1, 0.2, 0.3), "b": (0.3, 0.5, 0.7), "c": (0.1, 0.3, 0.2)}
    rewards = {"a": [8.0, 9.0], "b": [1.0, 2.0], "c": [8.0, 9.0]}  # of training: the other way round
    folders = {
        arm: {
            seed: write_run(
                tmp_path / "evaluated" / f"{arm}{seed}",
                lines(rewards[arm], evals=[(0, 0.0), (2, value)]),
                seed,
                eval_every=2,
                eval_prompts="world:heldout",
            )
            for seed, value in enumerate(of_arm)
        }
        for arm, of_arm in values.items()
    }
    return lambda *arms: measured({arm: folders[arm] for arm in arms}, {}, 0.0)


def test_the_verdict_by_hand(evaluated):
    # b - a: 0.2, 0.3, 0.4, mean 0.3, standard error 0.1 / sqrt(3) = 0.0577; t of 2 degrees of freedom 4.3027.
    two = evaluated("a", "b")
    assert verdict(two) == (
        "At equal cost (80 forwards + update): e (held out) is highest for b with 0.5000, clearly above "
        "a (+0.3000, [+0.0516, +0.5484])."
    )
    table = difference_table(two, "eval/e")
    assert list(table.heads) == [
        "arm",
        "seeds",
        "at 80 forwards + update",
        "− a",
        "95 % interval",
        "result",
    ]
    assert table.rows[1] == [
        "b",
        "3",
        "0.5000 ± 0.1155",
        "+0.3000 ± 0.0577",
        "[+0.0516, +0.5484]",
        "higher",
    ]
    assert difference_table(evaluated("b", "a"), "eval/e").rows[1][-1] == "lower"
    # c - a: 0, 0.1, -0.1: no difference, and no arm is clearly above the other.
    assert difference_table(evaluated("a", "c"), "eval/e").rows[1][-1] == "no clear difference"
    assert "not clearly above" in verdict(evaluated("a", "c"))
    three = verdict(evaluated("a", "c", "b"))
    assert "clearly above a (+0.3000" in three and "not clearly above c (+0.3000" in three
    assert verdict(evaluated("a")) == "At equal cost (80 forwards + update): e (held out) of a is 0.2000."


def test_verdicts_where_little_was_measured(three_arms, tmp_path, evaluated):
    found = verdict(three_arms)  # b alone was evaluated
    assert found.endswith("e (held out) of b is 0.2500. Not measured: a, c.")
    plain = write_run(tmp_path / "plain", lines([1.0, 2.0]), 0)
    assert verdict(measured({"a": {0: plain}}, {}, 0.0)).startswith("No verdict: no run was evaluated")
    one = measured({arm: {0: evaluated(arm).arms[arm][0].folder} for arm in "ab"}, {}, 0.0)
    assert "clearly above a (+0.2000, one common seed)" in verdict(one)
    assert difference_table(one, "eval/e").rows[1][-2:] == ["–", "one common seed: no interval"]
    other = write_run(
        tmp_path / "other",
        lines([1.0, 2.0], evals=[(0, 0.0), (2, 1.0)]),
        eval_every=2,
        eval_prompts="world:heldout",
        eval_num_steps=3,
    )
    mixed = measured({"a": {0: evaluated("a").arms["a"][0].folder}, "b": {0: other}}, {}, 0.0)
    assert verdict(mixed) == "No verdict: the arms were evaluated in different ways (eval_num_steps)."


def test_the_page_begins_with_what_compares_methods(evaluated, tmp_path):
    (tmp_path / "out").mkdir()
    report(tmp_path / "out", evaluated("a", "b"))
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    titles = re.findall(r"<h([1-4])[^>]*>([^<]*)</h", page)
    assert [title for level, title in titles if level == "2"] == [
        "Verdict",
        "Evaluations",
        "Training rewards",
        "Runs",
        "How to read this",
        "Commands",
    ]
    levels = [int(level) for level, _ in titles]
    assert levels[0] == 1 and all(b - a <= 1 for a, b in itertools.pairwise(levels))
    text = Parts(page).text
    order = [
        "is highest for b",
        "e, evaluation",
        "+0.3000\xa0±\xa00.0577",
        "Do not compare methods by training rewards",
        "r, training reward",
    ]
    places = [text.index(phrase) for phrase in order]
    assert places == sorted(places)
    assert '<html lang="en">' in page and "prefers-color-scheme: dark" in page
    cells = re.findall(r"<td ([^>]*)>", page)
    assert cells and all("data-head=" in cell for cell in cells)
    assert len(re.findall(r'<div class="wide[^>]*tabindex="0"', page)) == page.count('<div class="wide')
    markdown = (tmp_path / "out" / "compare.md").read_text(encoding="utf-8")
    assert markdown.split("\n\n")[1].startswith("**At equal cost")
    assert markdown.index("## Evaluations") < markdown.index("## Training rewards")
    assert "\n## " not in markdown[: markdown.index("## Evaluations") - 1]


def test_a_table_of_many_columns_may_break_words(evaluated, tmp_path):
    arms = evaluated("a", "b")
    wide = Table("Wide", [f"c{i}" for i in range(12)], [["x"] * 12])
    tables = {"eval/e": MetricTables(None, value_table(arms, "eval/e"), None)}
    write_page(tmp_path / "index.html", arms, "verdict", tables, [wide])
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert (
        'class="wide dense many" role="region" aria-label="Table: Wide"' in page
        and page.count("dense many") == 1
    )


def test_settings_of_many_arms_are_columns(tmp_path):
    run = write_run(tmp_path / "a", lines([1.0, 2.0]), lr=1e-3)
    other = write_run(tmp_path / "b", lines([1.0, 2.0]), lr=1e-5)
    folders = {f"a{i}": {0: run} for i in range(7)} | {"b": {0: other}}
    few = settings_table(measured(folders, {}, 0.0))
    assert (few.heads[0], few.heads[-1]) == ("setting", "b") and few.rows == [["lr", *["0.001"] * 7, "1e-05"]]
    many = settings_table(measured(folders | {"c": {0: other}}, {}, 0.0))
    assert many.heads == ["arm", "lr"] and many.rows[-3:] == [["a6", "0.001"], ["b", "1e-05"], ["c", "1e-05"]]


def test_a_share_is_given_for_smoothing(tmp_path):
    for smoothing in (-0.1, 1.0, 5):
        with pytest.raises(ValueError, match="is not a share of the cost axis: give a number >= 0"):
            compare(tmp_path / "out", runs=[], smoothing=smoothing)


def test_training_rewards_are_smoothed_over_the_same_share_of_each_axis(tmp_path):
    # 40 and 160 per iteration, both to a total of 640: a share of 0.5 is 8 iterations of one, 2 of the other.
    cheap = write_run(tmp_path / "cheap", lines([float(i) for i in range(16)]), 0)
    dear = write_run(
        tmp_path / "dear", lines([0.0, 1.0, 2.0, 3.0], nfe=40, nfe_update=120, evals=[(0, 0.0), (4, 1.0)]), 0
    )
    compared = measured({"cheap": {0: cheap}, "dear": {0: dear}}, {}, 0.5)
    curves = {arm: runs[0] for arm, runs in compared.curves("reward/r").items()}
    assert curves["cheap"].x["step"].tolist() == list(range(8, 17)) and curves["cheap"].y[0] == 3.5
    assert curves["dear"].x["step"].tolist() == [2, 3, 4] and curves["dear"].y.tolist() == [0.5, 1.5, 2.5]
    # Of the iterations' axis, which is 16 long, the share is 8: more than the second run has.
    by_step = {arm: runs[0] for arm, runs in compared.curves("reward/r", "step").items()}
    assert by_step["cheap"].y.tolist() == curves["cheap"].y.tolist() and by_step["dear"].y.tolist() == [1.5]
    assert compared.curves("eval/e")["dear"][0].y.tolist() == [0, 1]  # evaluations are as measured
    bands = bands_of(compared, "reward/r", "step")
    assert bands["dear"].mean.tolist() == [1.5] and len(bands["cheap"].mean) == 9


def test_runs_that_are_there(tmp_path):
    one = write_run(tmp_path / "one", lines([1.0, 2.0]), 0)
    two = write_run(tmp_path / "two", lines([2.0, 4.0]), 1)
    odd = write_run(tmp_path / "odd", lines([2.0, 4.0]), 2, lr=1e-3)
    found = compare(tmp_path / "out", runs=[f"a={one}", f"a={two}", f"b={odd}"], smoothing=0)
    assert found.values["reward/r"].rows[0][2] == "3.0000 ± 1.0000" and not found.failed
    again = compare(tmp_path / "out", report_only=True, smoothing=0)  # from its record
    assert again.values == found.values
    with pytest.raises(ValueError, match=r"may differ only in the seed.*lr: 5e-05 and 0\.001"):
        compare(tmp_path / "out", runs=[f"a={one}", f"a={odd}"])
    with pytest.raises(ValueError, match="is already seed 0 of a;"):
        read_runs([f"a={one}", f"a={one}"])
    with pytest.raises(ValueError, match="is not NAME=FOLDER"):
        read_runs([str(one)])
    with pytest.raises(ValueError, match="is not a run folder"):
        read_runs([f"a={tmp_path / 'no'}"])
    (tmp_path / "two" / "metrics.jsonl").write_text(
        '{"step": 1, "nfe": 10, "seconds": 1.0, "reward/r": 2.0}\n'
    )
    with pytest.raises(ValueError, match="two: iteration 1 has no nfe_update"):
        compare(tmp_path / "out", runs=[f"a={two}"])
    (tmp_path / "two" / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="contains no metrics"):
        read_runs([f"a={two}"])


def test_where_every_run_failed_their_reasons_are_told(tmp_path, monkeypatch):
    ended = SimpleNamespace(failed={"a, seed 0": "signal SIGKILL"}, interrupted=False)
    monkeypatch.setattr("g2rpo.comparison.compare.train_side_by_side", lambda *given: ended)
    words = ["compare", "--arm", "a=tiny", "--seeds", "0", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1 and "failed: a, seed 0: signal SIGKILL" in result.output
    assert "index.html" not in result.output


def test_nothing_to_report_on(tmp_path):
    with pytest.raises(ValueError, match="nothing to compare"):
        compare(tmp_path)
    with pytest.raises(ValueError, match="contains no comparison"):
        compare(tmp_path, report_only=True)
    (tmp_path / "compare.json").write_text("[]")
    with pytest.raises(ValueError, match=r"compare\.json is damaged: it is not a JSON object"):
        compare(tmp_path, report_only=True)
    with pytest.raises(ValueError, match="nothing was measured yet"):
        compare(tmp_path, read_arms(["a=tiny"], [], []), [0], report_only=True)


# The command.


def test_the_command_reports_on_runs(tmp_path):
    write_run(tmp_path / "one", lines([1.0, 2.0]), 0)
    done = run_command(
        "compare", "--run", "a=one", "--run", "b=one", "--smooth", "0", "--out", "out", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "2.0000" in done.stdout and "out/index.html shows the curves" in done.stdout
    assert "g2rpo compare --run a=one" in (tmp_path / "out" / "compare.md").read_text()


def test_exit_codes(tmp_path, monkeypatch):
    def call(*words):
        return CliRunner().invoke(app, ["compare", "tiny", "--out", str(tmp_path / "out"), *words])

    ended = Comparison(tmp_path, {"a, seed 0": "signal SIGKILL"}, False)
    monkeypatch.setattr("g2rpo.comparison.compare.compare", lambda *given, **options: ended)
    failed = call()
    assert failed.exit_code == 1 and "failed: a, seed 0: signal SIGKILL" in failed.output
    ended = Comparison(tmp_path, {}, True)
    stopped = call()
    assert stopped.exit_code == 130 and "run the same command to continue" in stopped.output
    assert call("--seeds", "x").exit_code == 2


# Real runs, at the smallest size.

SMALL = [
    "prompts=world:demo",
    "prompts_per_iteration=1",
    "num_steps=3",
    "group_size=2",
    "rewards={tiny_clip=1.0}",
    "sample_every=0",
    "num_sample_prompts=1",
    "compare_images=0",
    "eval_num_steps=1",
    "tensorboard=false",
    "warmup_iterations=0",
    "ema_decay=0",
    "iterations=3",
    "device=cpu",
    "num_eval_prompts=1",
    "eval_every=3",
    "eval_rewards=[]",
]
G2RPO = "g2rpo=tiny train_steps=1 granularities=[1]"
DANCE = "dance=tiny algorithm=dance_grpo eta=0.3 train_steps=none granularities=none"
BROKEN = "broken=tiny train_steps=1 granularities=[1] rewards={'support.custom_rewards:all_missing'=1}"


def nothing():
    """A first process starts the server that has everything imported."""


def test_stopped_resumed_failed_and_finished_runs(tmp_path):
    FORKS.Process(target=nothing).start()
    out, output = tmp_path / "out", []
    words = [*SMALL, f"cache={tmp_path / 'cache'}"]

    def both(*arms, jobs=2, say=output.append, more=()):
        return compare(out, read_arms(arms, [*words, *more], []), [0, 1], jobs=jobs, smoothing=0, say=say)

    def interrupting(text):
        output.append(text)
        if "started" in text:  # as Ctrl-C would be, while it trains
            first = out / "runs" / "g2rpo" / "0" / "metrics.jsonl"
            deadline = time.monotonic() + 120
            while not (first.is_file() and '"nfe"' in first.read_text()):
                assert time.monotonic() < deadline
                time.sleep(0.005)
            raise KeyboardInterrupt

    stopped = both(G2RPO, DANCE, jobs=1, say=interrupting)
    assert stopped.interrupted and not (out / "index.html").exists()
    assert latest_checkpoint(out / "runs" / "g2rpo" / "0") is not None
    assert not (out / "runs" / "g2rpo" / "1").exists()

    done = both(BROKEN, G2RPO, DANCE)
    assert not done.interrupted and set(done.failed) == {"broken, seed 0", "broken, seed 1"}
    assert "100% of the samples have no reward" in done.failed["broken, seed 0"]
    for arm in ("g2rpo", "dance"):
        for seed in (0, 1):
            found = read_metrics(out / "runs" / arm / str(seed) / "metrics.jsonl")
            assert [line["step"] for line in found if "nfe" in line] == [1, 2, 3]  # nothing twice
            assert read_metrics(out / "runs" / arm / str(seed) / "metrics.jsonl")[0]["step"] == 0
    rows = {row[0]: row for row in done.values["reward/tiny_clip"].rows}
    assert rows["g2rpo"][1] == rows["dance"][1] == "2" and rows["broken"][2] == "not measured"
    assert list(done.values) == ["eval/tiny_clip", "eval_gain/tiny_clip", "reward/tiny_clip"]

    before = {path: path.read_bytes() for path in out.glob("runs/*/*/metrics.jsonl")}
    output.clear()
    again = both(G2RPO, DANCE)
    assert output == [] and again.values["eval/tiny_clip"].rows[0] == done.values["eval/tiny_clip"].rows[1]
    with pytest.raises(
        ValueError, match=r"arm g2rpo: .* contains a run with other settings(.|\n)*lr: 5e-05 stored"
    ):
        both(G2RPO, DANCE, more=["lr=1e-2"])
    with pytest.raises(
        ValueError, match=r"arm g2rpo: .* evaluated with other settings.*eval_num_steps: 1 and 2"
    ):
        both(G2RPO, DANCE, more=["eval_num_steps=2"])
    assert {path: path.read_bytes() for path in out.glob("runs/*/*/metrics.jsonl")} == before and output == []

    # As a signal during the last evaluation leaves it: trained to the end, but not finished.
    first = out / "runs" / "g2rpo" / "0"
    (first / "finished").unlink()
    kept = (first / "metrics.jsonl").read_text().splitlines(keepends=True)
    (first / "metrics.jsonl").write_text("".join(kept[:-1]))
    assert "eval/tiny_clip" in kept[-1] and "eval/tiny_clip" not in kept[-2]
    both(G2RPO, DANCE)
    assert "3 of 4 runs are finished already" in output
    assert {path: path.read_bytes() for path in out.glob("runs/*/*/metrics.jsonl")} == before


@pytest.mark.parametrize(
    ("arms", "seeds", "message"),
    [
        (["a=tiny", "b=tinny"], [0], "arm b: no recipe 'tinny'"),
        (["a=tiny", "b=tiny algorithm=dance_grpo"], [0], "arm b: .*has no option train_steps, granularities"),
        (["a=tiny", "b=tiny prompts=missing.txt"], [0], "arm b: .*missing.txt"),
        (["a=tiny", "b=tiny lr"], [0], "arm b: override 'lr' is not key=value"),
        (["a=tiny"], [], "no seeds: give --seeds"),
    ],
)
def test_bad_arms_are_told_before_anything_is_trained(tmp_path, arms, seeds, message):
    with pytest.raises(ValueError, match=message):
        compare(tmp_path / "out", read_arms(arms, [], []), seeds)
    assert not (tmp_path / "out").exists()
