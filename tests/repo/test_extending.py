"""docs/extending.md: its code is that of the examples, and its commands run in the order of the page."""

import re
import shlex
import shutil
import textwrap
from pathlib import Path

import pytest
from support.code_lines import code_lines
from support.processes import run_command

import g2rpo

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("own_*.py"))
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(command)
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for command in block.replace("\\\n", " ").splitlines()
]
SMALL = """
model = "tiny"
guidance = 1.0
num_steps = 5
train_steps = 1
granularities = [1]
eta = 0.7
group_size = 2
prompts = "prompts.txt"
prompts_per_iteration = 1
rewards = { verifier = 1.0 }
eval_rewards = ["tiny_clip"]
iterations = 1
num_sample_prompts = 1
eval_num_steps = 1
tensorboard = false
device = "cpu"
cache = "cache"
"""


def test_the_code_of_the_page_is_that_of_the_examples():
    sources = [path.read_text(encoding="utf-8") for path in EXAMPLES]
    sources.append((ROOT / "tests" / "support" / "user_script.py").read_text(encoding="utf-8"))
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) > 10
    for block in blocks:
        versions = [block, textwrap.indent(block, "    ")]
        assert any(version in source for version in versions for source in sources), block


def test_the_commands_of_the_page_are_those_of_the_examples():
    docstrings = [path.read_text().split('"""')[1].replace("\\\n", " ") for path in EXAMPLES]
    stated = " ".join(" ".join(docstrings).split())
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL):
        for command in block.replace("\\\n", " ").splitlines():
            assert command == "cd examples" or " ".join(command.split()) in stated, command


def test_the_lines_of_code_on_the_page_are_counted():
    stated = dict(re.findall(r"\[(own_\w+\.py)\]\(\S+\) \| (\d+) \|", PAGE))
    assert stated == {path.name: str(code_lines(path)) for path in EXAMPLES}


def test_the_public_modules_of_the_page_exist():
    import importlib

    rows = re.findall(r"^\| `(g2rpo\.[\w.]+)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) > 8
    for module, purpose in rows:
        own = importlib.import_module(module)
        for name in re.findall(r"`(\w+)`", purpose):
            assert hasattr(own, name), (module, name)
    for name in re.findall(r"`g2rpo\.([A-Z]\w+)`", PAGE):
        assert name in g2rpo.__all__, name


def small(words: list[str]) -> list[str]:
    """The command with a small recipe in place of `tiny`, and less to draw."""
    if words[0] in ("train", "plan", "compare"):
        words = [re.sub(r"(^|=)tiny(?= |$)", r"\1small.toml", word) for word in words]
        return [word.replace("iterations=20", "iterations=1") for word in words]
    return [*words, "--device", "cpu", *(["--steps", "1"] if words[0] in ("sample", "evaluate") else [])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    for file in EXAMPLES:
        shutil.copy(file, folder)
    (folder / "small.toml").write_text(SMALL)
    (folder / "prompts.txt").write_text("a red circle\n")
    return folder


def test_the_commands_of_the_page_run(folder):
    assert COMMANDS[0] == ["cd", "examples"] and len(COMMANDS) > 12
    for _, *words in COMMANDS[1:]:
        words = words if words[0] == "export" else small(words)
        done = run_command(*words, cwd=folder)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    runs = {path.name for path in (folder / "runs").iterdir()}
    assert runs == {"orange", "colourful", "drawn", "weighted", "tiles"}
    assert (folder / "compared" / "index.html").is_file() and (folder / "evaluation" / "results.md").is_file()
