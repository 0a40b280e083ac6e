"""The live display, in real terminals: what it shows, and what it leaves behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from support.terminal import ROOT, Terminal

from g2rpo.cli.display import LiveDisplay, cropped, cropped_path, packed
from g2rpo.run.metrics import read_metrics

WORK = """
import sys, time
from pathlib import Path
from g2rpo.cli.display import live_progress
from g2rpo.cli.streams import guard_standard_streams
from g2rpo.runtime.progress import RunProgress, note, phase

line = {{"nfe": 100, "seconds": 0.5, "invalid_fraction": 0.125, "peak_memory_gb": 23.14}}
guard_standard_streams()
with live_progress():
    with phase("images before training"), phase("sampling", 8, "images") as sampling:
        sampling.to(2)
        time.sleep(1.8)
    with RunProgress(4) as progress:
        progress.note("a note [of] the run")
        progress.update({{"step": 1, "reward/hps": 0.25, **line}})
        gain = {{"eval_gain/verifier": 0.01, "eval_gain_se/verifier": 0.002}}
        progress.evaluated({{"step": 1, "eval/verifier": 0.5, **gain}})
        progress.sampled(Path("/runs/with a long name/of-a-folder/samples/step_000001/grid.png"))
        with phase("rollout", 46, "forwards", repeated=True) as rollout:
            rollout.to(23)
            {during}
            time.sleep(1.2)
        progress.update({{"step": 2, "reward/hps": 0.375, **line}})
        time.sleep(0.8)
print("THE END")
"""


def shown(during: str = "pass", **terminal: object) -> Terminal:
    opened = Terminal(["-c", WORK.format(during=during)], **terminal)
    opened.read(60)
    assert opened.process.returncode == 0, opened.text
    return opened


@pytest.fixture(scope="module")
def wide():
    return shown()


def test_a_phase_shows_count_and_time_left(wide):
    found = [text for text in wide.shown if "images before training, sampling: 2/8 images" in text]
    assert found and re.search(r"2/8 images, \S+ images/s, \d+ s left", found[-1])
    assert "sampling" not in wide.text  # it leaves nothing behind


def test_the_state_of_a_run_is_all_there(wide):
    state = next(text for text in wide.shown if "rollout" in text and "grid.png" in text)
    assert "a note [of] the run" in state
    assert re.search(r"^iteration 1/4 ━+  left \d+ s$", state, re.MULTILINE)
    assert re.search(r"^rollout: 23/46 forwards, ", state, re.MULTILINE)
    assert re.search(r"^hps 0\.2500   invalid 12\.5%   NFE/s \d+   GPU 23\.1 GB$", state, re.MULTILINE)
    assert "evaluation:   verifier 0.5000 (+0.0100 ± 0.0020)" in state
    assert state.endswith("samples: /runs/with a long name/of-a-folder/samples/step_000001/grid.png")


def test_the_last_state_stays_and_the_cursor_comes_back(wide):
    lines = wide.text.splitlines()
    assert lines[-1] == "THE END" and not wide.screen.cursor.hidden
    assert "iteration 2/4" in wide.text and "hps 0.3750 (+0.1250)" in wide.text
    assert wide.text.count("iteration ") == 2  # the block once, and the line of the evaluation
    assert "rollout" not in wide.text


def test_what_is_printed_meanwhile_appears_above():
    during = (
        'print("from a reward"); print("in", end=" "); print("parts"); sys.stderr.write("10%\\r100%\\n"); '
        'import warnings; warnings.warn("a library warns"); time.sleep(0.6)'
    )
    opened = shown(during)
    for text in ("from a reward", "in parts", "100%", "UserWarning: a library warns"):
        (line,) = [number for number, line in enumerate(opened.text.splitlines()) if text in line]
        assert line < opened.text[: opened.text.index("iteration 2/4")].count("\n"), opened.text
    assert "10%\n" not in opened.text and opened.text.count("iteration 2/4") == 1


@pytest.mark.parametrize("columns", [12, 30])
def test_a_narrow_terminal_wraps_no_line_of_the_display(columns):
    opened = shown(columns=columns)
    head = "2/4" if columns < 14 else "iteration 2/4"
    (first,) = [number for number, line in enumerate(opened.text.splitlines()) if line.startswith(head)]
    block = opened.text.splitlines()[first:]
    assert all(len(line) < columns for line in block), opened.text
    path = next(line for line in block if line.startswith("samples"))
    assert path.endswith("grid.png" if columns > 20 else "g"), path


def test_a_terminal_without_utf8_gets_ascii():
    opened = shown(PYTHONUTF8="0", LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONCOERCECLOCALE="0")
    assert re.search(r"iteration 2/4 [#-]+  left", opened.text)
    assert not re.search(rb"[\x80-\xff]", opened.raw)


@pytest.mark.parametrize("variable", [{"TERM": "dumb"}, {"CI": "true"}])
def test_plain_lines_where_lines_cannot_be_redrawn(variable):
    opened = shown(**variable)
    assert b"\x1b" not in opened.raw and opened.text.count("\niteration ") == 2
    assert "iteration 1/4  hps 0.2500  invalid 12.5%  NFE/s" in opened.text


def test_a_pipe_gets_one_line_per_iteration():
    done = subprocess.run(
        [sys.executable, "-c", WORK.format(during="pass")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    times = re.sub(r"NFE/s \S+", "NFE/s N", re.sub(r"left .*", "left T", done.stdout))
    assert times.splitlines() == [
        "a note [of] the run",
        "iteration 1/4  hps 0.2500  invalid 12.5%  NFE/s N  GPU 23.1 GB  left T",
        "evaluation after iteration 1: verifier 0.5000 (+0.0100 ± 0.0020)",
        "iteration 2/4  hps 0.3750 (+0.1250)  invalid 12.5%  NFE/s N  GPU 23.1 GB  left T",
        "THE END",
    ]
    assert done.stderr == ""


INTERRUPTED = """
import signal, sys
from g2rpo.cli import display
from g2rpo.runtime.interrupt import interruptible
from g2rpo.runtime.progress import RunProgress
from g2rpo.runtime.stop_signals import command_signals

class Rude:
    \"\"\"A terminal at which somebody presses Ctrl-C while a line is half written.\"\"\"
    def write(self, text):
        half = len(text) // 2 if "the last note" in text else 0
        sys.__stdout__.write(text[:half])
        if half:
            signal.raise_signal(signal.SIGINT)
        sys.__stdout__.write(text[half:])
        return len(text)
    def __getattr__(self, name):
        return getattr(sys.__stdout__, name)

sys.stdout = Rude()
with command_signals(), display.live_progress():
    try:
        with RunProgress(9) as progress, interruptible():
            for step in range(1, 5):
                progress.update({"step": step, "reward/hps": 0.25, "seconds": 0.5, "nfe": 10})
                progress.sampled("a file")
                display.TICKER._displays[0].tick()
            progress.note("the last note")
            raise SystemExit("the signal did not come")
    except KeyboardInterrupt:
        print("stopped")
print("THE END")
"""


def test_a_signal_in_the_middle_of_a_drawing_leaves_one_block():
    opened = Terminal(["-c", INTERRUPTED], columns=130)
    lines = [line for line in opened.read(60).splitlines() if not line.startswith("hps")]
    assert opened.process.returncode == 0, opened.text
    block = [line for line in lines if line.startswith("iteration 4/9")]
    assert len(block) == 1 and "iteration" not in "".join(lines).replace(block[0], ""), opened.text
    (said,) = [line for line in lines if line.startswith("SIGINT: stopping")]
    assert sorted(lines) == sorted(["the last note", said, block[0], "samples: a file", "stopped", "THE END"])


def test_a_display_that_is_closed_prints_plain_lines(capsys):
    display = LiveDisplay(sys.stdout)
    display.close()
    for _ in range(2):
        display.tick()
        display.note("one\ntwo")
    assert capsys.readouterr().out == "one\ntwo\n" * 2


def test_an_error_of_the_terminal_reaches_who_prints():
    class Closed:
        def write(self, text):
            raise OSError("closed")

        flush = write

    display = LiveDisplay(Closed())
    with pytest.raises(OSError, match="closed"):
        display.note("one")
    display.close()


def test_texts_that_fit():
    assert packed(["one", "two", "three"], 9) == ["one   two", "three"]
    assert packed(["much too long"], 8) == ["much to…"]
    assert cropped("abc", 3) == "abc" and cropped("abcdef", 3, "...") == "..."
    assert cropped_path("/a/b/grid.png", 9) == "…grid.png"


SMALL = [
    "iterations=40", "prompts=world:demo", "prompts_per_iteration=1", "group_size=2", "num_steps=3",
    "train_steps=1", "granularities=[1]", "rewards={tiny_preference=1.0}", "eval_every=0", "keep_best=none",
    "num_sample_prompts=1", "eval_num_steps=1", "compare_images=0", "device=cpu", "loggers=[]",
]  # fmt: skip


def test_ctrl_c_in_a_terminal_leaves_a_checkpoint_and_a_clean_terminal(tmp_path):
    words = ["-m", "g2rpo", "train", "tiny", f"out={tmp_path / 'run'}", f"cache={tmp_path / 'cache'}", *SMALL]
    opened = Terminal(words)
    opened.read(until=lambda text: re.search(r"iteration [2-9]/40", text))
    os.killpg(opened.process.pid, signal.SIGINT)  # what a terminal does
    text = opened.read(120)
    assert opened.process.returncode == 130, text
    assert text.count("SIGINT: stopping; finished work is kept") == 1
    blocks = re.findall(r"^iteration (\d+)/40", text, re.MULTILINE)
    (saved,) = re.findall(r"interrupted; (\d+) iterations are saved", text)
    assert blocks == [saved] and not opened.screen.cursor.hidden, text
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [
        *range(1, int(saved) + 1)
    ]
    state = json.loads((tmp_path / "run/checkpoints" / f"step_{int(saved):06d}" / "state.json").read_text())
    assert state["iteration"] == int(saved)


@pytest.mark.long
def test_a_closed_terminal_ends_the_run_with_a_checkpoint(tmp_path):
    words = ["-m", "g2rpo", "train", "tiny", f"out={tmp_path / 'run'}", f"cache={tmp_path / 'cache'}", *SMALL]
    opened = Terminal(words)
    opened.read(until=lambda text: re.search(r"iteration [2-9]/40", text))
    opened.close()
    end = time.monotonic() + 120
    while opened.process.poll() is None and time.monotonic() < end:
        time.sleep(0.2)
    assert opened.process.returncode == 130 and list((tmp_path / "run" / "checkpoints").iterdir())
