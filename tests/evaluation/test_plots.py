"""Curves as figures: colours of the lines, file types, nothing to plot."""

import os
import subprocess
import sys

import pytest
from PIL import Image

from g2rpo.evaluation.plots import PlottedLine, save_curves, write_curves


def test_curves_are_drawn(tmp_path):
    curves = {
        "reward": {
            "run a": PlottedLine([1, 2, 3], [0.1, 0.2, 0.3]),
            "run b": PlottedLine([1, 2, 3], [0.3, float("nan"), 0.1]),
        },
        "loss": {"run a": PlottedLine([1, 2, 3], [1, 0, 1])},
    }
    save_curves(curves, tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    assert {(0, 114, 178), (213, 94, 0)} <= colours  # the first two of the palette
    save_curves(curves, tmp_path / "curves.svg")
    assert "<svg" in (tmp_path / "curves.svg").read_text()
    with pytest.raises(ValueError, match="no curves"):
        save_curves({}, tmp_path / "none.png")


@pytest.mark.parametrize("backend", ["module://not_there", "nonsense", "TkAgg"])
def test_an_inherited_backend_does_not_matter(tmp_path, backend):
    code = (
        "from pathlib import Path; from g2rpo.evaluation.plots import write_curves;"
        f"write_curves(Path({str(tmp_path / 'curve.png')!r}), [{{'step': 1, 'reward/x': 0.5}}])"
    )
    environment = {**os.environ, "MPLBACKEND": backend}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_a_name_has_one_colour_in_all_panels(tmp_path):
    # The second panel has the second line only: it is in the second colour there too.
    save_curves({"a": {"x": PlottedLine([1], [1]), "y": PlottedLine([1], [1])}}, tmp_path / "both.svg")
    save_curves(
        {"a": {"x": PlottedLine([1], [1])}, "b": {"y": PlottedLine([1, 2], [1, 2])}}, tmp_path / "apart.svg"
    )
    both, apart = ((tmp_path / name).read_text() for name in ("both.svg", "apart.svg"))
    for text in (both, apart):
        assert "#0072b2" in text and "#d55e00" in text


def test_training_rewards_get_a_trailing_mean_and_evaluations_their_errors(tmp_path, monkeypatch):
    metrics = [{"step": step, "reward/x": float(step % 2), "loss": 1.0} for step in range(1, 41)]
    metrics += [{"step": 40, "eval/x": 0.75, "eval_se/x": 0.125}, {"step": 20, "eval/x": None}]
    drawn = {}
    monkeypatch.setattr("g2rpo.evaluation.plots.save_curves", lambda panels, path: drawn.update(panels))
    write_curves(tmp_path / "curve.png", metrics)
    assert drawn["x"]["training"].window == 6
    assert drawn["x"]["unseen prompts"] == PlottedLine([40.0], [0.75], [0.125], 1)
    monkeypatch.undo()
    write_curves(tmp_path / "curve.svg", metrics)
    assert "mean of 6" in (tmp_path / "curve.svg").read_text()
