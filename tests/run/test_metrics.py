import json
import math
import subprocess
import sys

import pytest
import torch

from g2rpo.config.load import load_settings
from g2rpo.run.checkpoint import save_checkpoint
from g2rpo.run.groups import truncate_groups
from g2rpo.run.metrics import MetricsWriter, read_metrics
from g2rpo.run.run import check_metrics, checkpoint_to_resume


def line(step: int, **more: float) -> dict[str, float]:
    return {"step": step, "nfe": 100, "reward/verifier": 0.1 * step, **more}


def test_a_line_an_iteration_that_any_json_reader_takes(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(line(1, loss=math.nan, ratio_max_dev=math.inf))
        # Line-buffered: it is there before anything is closed.
        raw = (tmp_path / "metrics.jsonl").read_text()
        writer.write(line(2, loss=0.1))
    assert json.loads(raw, parse_constant=pytest.fail) == line(1, loss=None, ratio_max_dev=None)
    assert read_metrics(tmp_path / "metrics.jsonl")[1] == line(2, loss=0.1)  # floats come back bit by bit


def test_resume_cuts_what_came_after_and_nothing_else(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3, 4):
            writer.write(line(step))
        writer.write({"step": 2, "eval/verifier": 0.5})  # out of order: the step decides, not the position
    with open(path, "a") as file:
        file.write('{"step": 5, "nf')  # killed here
    before = path.read_bytes().split(b"\n")
    with MetricsWriter(tmp_path, resumed_step=2) as writer:
        assert path.read_bytes().split(b"\n") == [before[0], before[1], before[4], b""]
        writer.write(line(3, again=1))
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 2, 3]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_torn_line_goes_even_if_nothing_else_does(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    with MetricsWriter(tmp_path, resumed_step=9) as writer:
        writer.write({"step": 2})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_resume_at_the_end_leaves_the_file_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{ "step":  2 }\n')
    inode = path.stat().st_ino
    MetricsWriter(tmp_path, resumed_step=2).close()
    assert path.read_text() == '{"step": 1}\n{ "step":  2 }\n' and path.stat().st_ino == inode


def test_a_broken_line_is_not_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nfive\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        MetricsWriter(tmp_path, resumed_step=2)
    assert path.read_text() == '{"step": 1}\nfive\n{"step": 2}\n'


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="earlier run"):
        MetricsWriter(tmp_path)
    with pytest.raises(ValueError, match="step"):
        MetricsWriter(tmp_path / "new").write({"loss": 1.0})


def test_a_line_is_written_completely_or_not_at_all(tmp_path):
    """With a limit for the size of files as the full disk; in a child, because the limit stays."""
    path = tmp_path / "metrics.jsonl"
    code = f"""
import resource
from pathlib import Path
from g2rpo.run.metrics import MetricsWriter
from g2rpo.runtime.files import DiskFull
writer = MetricsWriter({str(tmp_path)!r})
writer.write({{"step": 1, "loss": 0.5}})
size = Path({str(path)!r}).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
try:
    writer.write({{"step": 2, "loss": 0.25}})
except DiskFull as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert str(path) in done.stdout and "bytes are free" in done.stdout, done
    assert path.read_text() == '{"step": 1, "loss": 0.5}\n'


def test_metrics_that_are_shorter_than_the_checkpoint_are_reported(tmp_path, caplog):
    path = save_checkpoint(tmp_path, 4, {"module": torch.nn.Linear(1, 1)})
    lines = [{"step": step, "seconds": 1.0} for step in (1, 2, 3, 4)]
    metrics = tmp_path / "metrics.jsonl"

    def check(kept):
        metrics.write_text("".join(json.dumps(line) + "\n" for line in kept))
        check_metrics(tmp_path, path)

    check(lines)
    assert not caplog.records
    check(lines[:2])
    assert "lacks 2 of its lines (iterations 3 to 4)" in caplog.text and str(metrics) in caplog.text
    check([lines[0], {"step": 2, "eval/x": 1.0}, *lines[2:]])
    assert "lacks 1 of its lines (iterations 2)" in caplog.text
    metrics.write_text('{"step": 1, "loss"\x00: 1}\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1: not a line of metrics.*remove the line"):
        check_metrics(tmp_path, path)
    metrics.write_text('{"step": 1}\n{"step": 2, "a": ' + "[" * 5000 + "]" * 5000 + "}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not a line of metrics"):
        check_metrics(tmp_path, path)
    metrics.write_text('{"step": 1}\n\n{"step": 2}\n \n')
    assert [line["step"] for line in read_metrics(metrics)] == [1, 2], "an editor may add empty lines"
    metrics.unlink()
    check_metrics(tmp_path, path)
    assert "lacks 4 of its lines (iterations 1 to 4)" in caplog.text


def test_empty_settings_of_a_run_are_damage(tmp_path):
    (tmp_path / "config.toml").write_text("\n")
    with pytest.raises(ValueError, match=r"config\.toml is damaged: it is empty"):
        checkpoint_to_resume(load_settings("tiny", [f"out={tmp_path}"]))


def test_a_run_whose_checkpoints_are_lost_is_not_begun_again(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 1}\n')
    check_metrics(tmp_path, None)  # stopped before its first checkpoint
    metrics.write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 1, "seconds_checkpoint": 0.5}\n')
    with pytest.raises(
        ValueError, match=r"metrics\.jsonl says so, line 2.*copy.*another out=FOLDER.*Nothing"
    ):
        check_metrics(tmp_path, None)
    metrics.unlink()
    (tmp_path / "finished").write_text("2\n")
    with pytest.raises(ValueError, match="had checkpoints"):
        check_metrics(tmp_path, None)


def test_damaged_records_do_not_keep_a_run_from_going_on(tmp_path, caplog):
    """Unlike metrics.jsonl, groups.jsonl and warnings.jsonl hold nothing that a number depends on."""
    lines = ['{"step": 1, "kind": "a"}', "not JSON", "[1]", '{"step": 2}', '{"step": 3}', '{"step": 4']
    path = tmp_path / "groups.jsonl"
    path.write_text("\n".join(lines))
    with caplog.at_level("WARNING"):
        truncate_groups(tmp_path, 2)
    assert path.read_text() == lines[0] + "\n" + lines[3] + "\n"
    assert "groups.jsonl: 2 damaged lines were removed" in caplog.text
    truncate_groups(tmp_path / "none", 2)
