"""Model families are named only in models/, algorithms only in algorithms/ (and in recipes)."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "g2rpo"
FAMILIES = re.compile(r"flux|qwen|\bT5", re.IGNORECASE)
"""Model families, which are also in the names of their pipelines and networks, and a text encoder of one."""
ALGORITHMS = re.compile(r"flow_grpo|dance_grpo|mix_grpo|g2rpo_single|\bnft\b")
"""Algorithms as settings name them; prose cites methods in other spellings. `g2rpo` is the package's name."""


def lines_naming(pattern: re.Pattern[str], allowed: str) -> list[str]:
    """The lines of the package, outside one folder of it, in which a pattern occurs."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] != allowed]
    assert len(paths) > 50
    return [
        f"{path.relative_to(PACKAGE.parent)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


def test_model_families_are_named_only_in_models():
    found = lines_naming(FAMILIES, "models")
    assert not found, "\n".join(found)


def test_every_family_is_looked_for():
    from g2rpo.models.registry import families

    for family in families():
        names = [family.name, family.pipeline]
        names += [family.architecture.network] if family.architecture else []
        assert all(FAMILIES.search(name) for name in names), f"add {family.name} to FAMILIES of this test"


def test_algorithms_are_named_only_in_algorithms():
    found = lines_naming(ALGORITHMS, "algorithms")
    assert not found, "\n".join(found)


def test_every_algorithm_is_looked_for():
    from g2rpo.algorithms.registry import PRESETS

    assert {name for name in PRESETS if not ALGORITHMS.search(name)} == {"g2rpo"}


def test_no_code_compares_the_name_of_an_algorithm():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Compare) or path.parent.name == "algorithms":
                continue
            sides = [ast.unparse(side).split(".")[-1] for side in (node.left, *node.comparators)]
            by_name = any(isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for op in node.ops)
            assert not (by_name and "algorithm" in sides), f"{path}:{node.lineno}: {ast.unparse(node)}"
