"""Curves as figures: colours of the lines, file types, nothing to plot."""

import os
import subprocess
import sys

import pytest
from PIL import Image

from g2rpo.evaluation.plots import save_curves


def test_curves_are_drawn(tmp_path):
    curves = {
        "reward": {"run a": ([1, 2, 3], [0.1, 0.2, 0.3]), "run b": ([1, 2, 3], [0.3, float("nan"), 0.1])},
        "loss": {"run a": ([1, 2, 3], [1, 0, 1])},
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
    save_curves({"a": {"x": ([1], [1]), "y": ([1], [1])}}, tmp_path / "both.svg")
    save_curves({"a": {"x": ([1], [1])}, "b": {"y": ([1, 2], [1, 2])}}, tmp_path / "apart.svg")
    both, apart = ((tmp_path / name).read_text() for name in ("both.svg", "apart.svg"))
    for text in (both, apart):
        assert "#0072b2" in text and "#d55e00" in text
