"""Conventions of this repository that no linter checks. Each test loops over the files and names them."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A reward is code of a user, or what a server answers: whatever it raises means "no score", and is logged.
# The thread that draws the display gives whatever a drawing raises to the thread that asked for it.
BROAD_EXCEPTS = {"g2rpo/rewards/checked.py": 1, "g2rpo/cli/display.py": 1}


def package_trees() -> dict[str, ast.Module]:
    """The syntax tree of each file of the package, by its path."""
    paths = sorted((ROOT / "g2rpo").rglob("*.py"))
    assert len(paths) > 20
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def test_exceptions_are_caught_by_their_class():
    for path, tree in package_trees().items():
        broad = []
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                catches_all = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
                if catches_all and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                    broad.append(f"{path}:{node.lineno}")
        assert len(broad) == BROAD_EXCEPTS.get(path, 0), f"broad except: {broad}"
