"""The notebook of the examples runs from its first cell to its last, and is stored with images and tables."""

import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from g2rpo.run.metrics import read_metrics

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import run_notebook

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_run.ipynb"

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
FIGURES = ("sample", "group-figure", "score", "curve", "before")
"""Cells that show an image."""

pytestmark = pytest.mark.timeout(600)  # the first test waits for the notebook, 50 s on idle cores


def shown(node, cell: str, kind: str) -> list[str]:
    """The outputs of a cell of this kind, such as "image/png"."""
    (found,) = (entry for entry in node.cells if entry.id == cell)
    return [output.data[kind] for output in found.outputs if kind in output.get("data", {})]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def executed(folder):
    return run_notebook.executed(NOTEBOOK, folder)


def test_every_cell_runs_and_shows_its_figure(executed, folder):
    assert all(len(shown(executed, cell, "image/png")) == 1 for cell in FIGURES)
    assert (folder / "my_reward.py").is_file() and (folder / "runs/first/before_after.png").is_file()


def test_the_trained_reward_rises_as_the_text_says(executed, folder):
    lines = [line for line in read_metrics(folder / "runs/first/metrics.jsonl") if "loss" in line]
    rewards = [line["reward/my_reward:warmth"] for line in lines]
    assert len(rewards) == 10
    # 0.14 and 0.37 where the stored outputs were made.
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    (table,) = shown(executed, "evaluate", "text/markdown")
    before, after = (
        [cell.split()[0] for cell in line.strip("| ").split(" | ")[1:]]
        for name in ("before", "after")
        for line in table.splitlines()
        if line.startswith(f"| {name} |")
    )
    assert float(after[0]) > float(before[0]) + 0.1  # warmth, on unseen prompts
    assert float(after[1]) < float(before[1])  # the verifier: the text calls this reward hacking


def test_the_stored_notebook_holds_images_and_tables_only():
    node = nbformat.read(NOTEBOOK, as_version=4)
    assert all(len(shown(node, cell, "image/png")) == 1 for cell in FIGURES)
    assert len(shown(node, "evaluate", "text/markdown")) == 1
    outputs = [output for cell in node.cells for output in cell.get("outputs", [])]
    assert len(outputs) == len(FIGURES) + 1
    assert all(cell.execution_count is None for cell in node.cells if cell.cell_type == "code")
    assert NOTEBOOK.stat().st_size < 300_000


def test_a_cell_that_fails_is_an_error_and_leaves_the_notebook_as_it_was(tmp_path, monkeypatch, capsys):
    path = tmp_path / "broken.ipynb"
    cells = [new_code_cell("print('a line')\n1 + 1"), new_code_cell("raise ValueError('no such prompt')")]
    nbformat.write(new_notebook(cells=cells, metadata=KERNEL), path)
    before = path.read_bytes()
    monkeypatch.setattr(sys, "argv", ["run_notebook.py", str(path)])
    assert run_notebook.main() == 1
    assert "no such prompt" in capsys.readouterr().err and path.read_bytes() == before

    nbformat.write(new_notebook(cells=cells[:1], metadata=KERNEL), path)
    assert run_notebook.main() == 0
    (cell,) = nbformat.read(path, as_version=4).cells
    assert [output.data for output in cell.outputs] == [{"text/plain": "2"}] and cell.execution_count is None
