"""Documents and docstrings state what the code has."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from g2rpo.algorithms.registry import PRESETS
from g2rpo.models.family import ModelShape


def test_the_docs_table_is_the_presets():
    """docs/algorithms.md: T and eta, updates and forwards as the presets have them."""
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    rows = {
        cells[0]: cells[1:]
        for line in page.splitlines()
        if line.startswith("| ")
        and len(cells := [cell.strip() for cell in line.strip("| ").split(" | ")]) == 6
    }
    for column, name in enumerate(("flow_grpo", "dance_grpo", "mix_grpo", "g2rpo_single", "g2rpo")):
        assert f"`{name}`" in page
        made = PRESETS[name]()
        assert rows["$T$, $\\eta$"][column] == f"{made.num_steps}, {made.eta:g}"
        shares = {3: "a third", 4: "a quarter"}
        chunks = made.chunks(12)
        assert rows["optimizer steps an iteration"][column] == (
            "1" if chunks == 1 else f"{chunks}, over {shares[chunks]} of the members each"
        )
        totals = [made.plan(0, i).nfe(12)["total"] for i in range(300)]
        stated = float(
            rows["forwards a prompt (G=12; mean of 300 iterations)"][column]
            .removeprefix("about ")
            .replace(",", "")
        )
        assert sum(totals) / 300 == pytest.approx(stated, rel=0.02 if name == "mix_grpo" else 1e-9)


def test_the_docstring_names_the_fields():
    attributes = ModelShape.__doc__.split("Attributes:")[1].splitlines()
    named = [name for line in attributes for name in line.partition(":")[0].split(", ") if ":" in line]
    assert sorted(name.strip() for name in named) == sorted(field.name for field in fields(ModelShape))


def test_no_merge_conflict_is_left():
    root = Path(__file__).parents[2]
    documents = [*root.glob("*.md"), *root.glob("docs/**/*.md")]
    markers = ("<<<<<<< ", ">>>>>>> ")
    left = [
        f"{path}: {line}"
        for path in documents
        for line in path.read_text().splitlines()
        if line[:8] in markers
    ]
    assert len(documents) > 10 and not left, left


def test_the_test_files_that_documents_name_exist():
    root = Path(__file__).parents[2]
    named = {
        (path.name, name)
        for path in [*root.glob("*.md"), *root.glob("docs/**/*.md")]
        for name in re.findall(r"tests/[\w./*]+\.py", path.read_text(encoding="utf-8"))
    }
    absent = [(page, name) for page, name in sorted(named) if not any(root.glob(name))]
    assert named and not absent, absent
