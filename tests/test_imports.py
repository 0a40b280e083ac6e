"""Which package may import which: the layers of docs/architecture.md, from the bottom up."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "g2rpo"

LAYERS = [
    "runtime",
    "flow",
    "models",
    "world",
    "rewards",
    "data",
    "rollouts",
    "objectives",
    "algorithms",
    "config",
    "run",
    "costs",
    "inference",
    "evaluation",
    "exporters",
    "setup",
    "training",
    "comparison",
    "report",
    "reproduction",
    "web",
    "cli",
]
"""A package imports from those before it; the public API, g2rpo/__init__.py, from all but cli."""

FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)


def imported_packages(path: Path) -> set[str]:
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            modules = [node.module or ""]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        packages |= {module.split(".")[1] for module in modules if module.startswith("g2rpo.")}
        assert "g2rpo" not in modules or path.parent.name == "cli", f"{path}:{node.lineno}: imports the API"
    return packages


def test_every_package_has_its_place():
    packages = {path.relative_to(PACKAGE).parts[0] for path in FILES}
    assert packages <= set(LAYERS)
    assert not packages & {"runs", "build", "dist"}, ".gitignore ignores folders of these names"


def test_imports_point_downward():
    for path in FILES:
        layer = path.relative_to(PACKAGE).parts[0]
        allowed = set(LAYERS[: LAYERS.index(layer) + 1])
        assert imported_packages(path) <= allowed, f"{path} imports {imported_packages(path) - allowed}"


def test_no_package_has_the_name_of_a_public_function():
    import g2rpo

    assert not set(LAYERS) & set(g2rpo.__all__)


def test_nothing_needs_torchvision():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            )
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            needs = any(name.split(".")[0] == "torchvision" for name in [*names, module])
            assert not needs, f"{path}:{node.lineno}: imports torchvision"


def loaded_by(*modules: str) -> set[str]:
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_the_package_itself_loads_nothing_heavy():
    heavy = {
        "torch",
        "diffusers",
        "transformers",
        "pydantic",
        "numpy",
        "matplotlib",
        "rich",
        "g2rpo.config.load",
    }
    assert not loaded_by("g2rpo") & heavy


def test_settings_and_files_load_no_models():
    loaded = loaded_by(
        "g2rpo.config.load",
        "g2rpo.data.prompts",
        "g2rpo.run.metrics",
        "g2rpo.run.checkpoint",
        "g2rpo.setup.doctor",
    )
    assert not loaded & {"diffusers", "transformers", "peft", "matplotlib", "tensorboard", "httpx"}


def test_reading_settings_needs_no_torch():
    assert "torch" not in loaded_by("g2rpo.config.load")  # `g2rpo --help` answers at once


def test_plan_imports_no_model_library():
    code = """
import sys
from g2rpo.config.load import load_settings
from g2rpo.costs.estimate import plan_here
from g2rpo.training.run_prompts import RunPrompts

settings = load_settings("flux_hps", {"prompts": "world:train"})
plan_here(settings, gpu="H100", num_texts=len(RunPrompts.of(settings).texts))
slow = "diffusers", "transformers", "peft", "torch.distributed.checkpoint", "torch.distributed.fsdp"
print([name for name in slow if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
