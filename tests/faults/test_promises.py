"""docs/reliability.md names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_promise_has_its_test():
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = page.partition("## Promises")[2].partition("\n## ")[0].splitlines()
    promises = [
        row for row in rows if row.startswith("| ") and row not in ("| promise | test |", "| --- | --- |")
    ]
    assert len(promises) >= 90
    for row in promises:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, f"no test: {row}"
        for file, test in named:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, row
