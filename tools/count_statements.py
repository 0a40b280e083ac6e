"""Counts the executable statements of g2rpo, per package.

    python tools/count_statements.py
    python tools/count_statements.py --against DIR   # the growth over another checkout

Every node of the syntax tree that is a statement counts (definitions and imports too), except docstrings,
those of classes' attributes included. Layout, comments and line breaks change nothing. Modules that lie in no
subpackage count as "g2rpo".
"""

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "g2rpo"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Count the executable statements of g2rpo, per package.")
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("checkout", nargs="?", type=Path, default=here, help="default: this one")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, to show the growth")
    options = parser.parse_args(arguments)
    try:
        counts = count_packages(options.checkout)
        before = None if options.against is None else count_packages(options.against)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(table(counts, before)))
    return 0


def count_packages(checkout: Path) -> Counter[str]:
    """Statements by top-level subpackage; "g2rpo" for the modules beside them.

    Raises:
        ValueError: no package g2rpo in this folder.
    """
    package = checkout / PACKAGE
    files = sorted(package.rglob("*.py"))
    if not files:
        raise ValueError(f"{checkout} holds no package {PACKAGE}; give the folder of a checkout")
    counts: Counter[str] = Counter()
    for path in files:
        parts = path.relative_to(package).parts
        counts[parts[0] if len(parts) > 1 else PACKAGE] += count_statements(path.read_text(encoding="utf-8"))
    return counts


def count_statements(source: str) -> int:
    """Statements of a module, docstrings excluded."""
    return sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(ast.parse(source)))


def _is_docstring(node: ast.stmt) -> bool:
    """A string that stands alone: of a module, class or function, or of the attribute above it."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def table(counts: Counter[str], before: Counter[str] | None) -> list[str]:
    """Lines: a package each, and the total; with `before` also its count, the difference and the growth."""
    if before is None:
        return [
            f"{name:16}{number:8}" for name, number in [*sorted(counts.items()), ("total", counts.total())]
        ]
    lines = [f"{'package':16}{'before':>8}{'now':>8}{'change':>8}{'growth':>9}"]
    for name in [*sorted(counts.keys() | before.keys()), "total"]:
        old, now = (one.total() if name == "total" else one[name] for one in (before, counts))
        growth = f"{100 * (now - old) / old:+8.1f}%" if old else f"{'new':>9}"
        lines.append(f"{name:16}{old:8}{now:8}{now - old:+8}{growth}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
