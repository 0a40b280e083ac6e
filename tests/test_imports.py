"""Who may import whom: the package is read from top to bottom, each room using only the rooms above it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "g2rpo"

# The order of the data flow. A folder is one room; within it files import each other freely.
ROWS = [
    "words",
    "schedule sde plans advantages loss algorithms",
    "distributed noise stopwatch",
    "policy models world rewards",
    "prompts conditioning tree explore rollout",
    "pointers checkpoint_index checkpoint metrics progress options recipe settings config",
    "best interrupt reward_stats saved named pictures matching sample export",
    "optimizer update watch before_after run stops lock guard embed memory focus",
    "trainer",
    "curves compare_tables compare_page arms side_by_side",
    "score bootstrap lineup gallery results evaluation",
    "compare speeds costs planning report demo doctor headers verify_rewards verify fetch",
    "console commands commands_compare",
    "__main__",
]
ROOMS = [room for row in ROWS for room in row.split()]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            if node.module == "g2rpo":
                rooms |= {alias.name for alias in node.names if alias.name != "__version__"}
            elif node.module and node.module.startswith("g2rpo."):
                rooms.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            rooms |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("g2rpo.")}
    return rooms - {room_of(path)}


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_upwards(path):
    assert room_of(path) in ROOMS, f"give {room_of(path)} its place in ROOMS"
    above = ROOMS[: ROOMS.index(room_of(path))]
    assert imported_rooms(path) <= set(above), f"{path.name} imports from below itself"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_needs_torchvision(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        assert not any(name.split(".")[0] == "torchvision" for name in [*names, module])


def loaded_by(*modules: str) -> set[str]:
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_the_package_itself_loads_nothing_heavy():
    heavy = {"torch", "diffusers", "transformers", "pydantic", "numpy", "matplotlib", "rich", "g2rpo.config"}
    assert not loaded_by("g2rpo") & heavy


def test_settings_and_files_load_no_models():
    loaded = loaded_by("g2rpo.config", "g2rpo.prompts", "g2rpo.metrics", "g2rpo.checkpoint", "g2rpo.doctor")
    assert not loaded & {"diffusers", "transformers", "peft", "matplotlib", "tensorboard", "httpx"}


def test_reading_settings_needs_no_torch():
    assert "torch" not in loaded_by("g2rpo.config")  # `g2rpo --help` answers at once
