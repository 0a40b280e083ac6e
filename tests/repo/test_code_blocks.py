"""Code in the documents: it parses, and its commands name commands, options, recipes and settings that exist.

Nothing is run. A block that needs more than a checkout and two CPU cores is marked (see CONTRIBUTING.md).
"""

import ast
import re
import shlex
import subprocess
import tomllib

import pytest
from support.documents import ROOT, Block, blocks, commands, documents
from typer.main import get_command

from g2rpo.algorithms.registry import PRESET_OPTIONS
from g2rpo.cli.app import app
from g2rpo.cli.console import recipe_and_overrides
from g2rpo.comparison.arms import read_arms, read_seeds
from g2rpo.config.load import load_settings
from g2rpo.config.settings import Settings
from g2rpo.models.tiny import is_tiny
from g2rpo.rewards.registry import REWARDS, reward_spec

PROGRAM = get_command(app)
BASH, PYTHON, TOML = (
    [block for path in documents() for block in blocks(path, language)]
    for language in ("bash", "python", "toml")
)
NEEDS = {"gpu", "weights", "network"}
"""Words of the mark; CONTRIBUTING.md has their meaning."""
SMALL = "random:tiny"
"""A model besides `tiny` that needs nothing."""
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.fixture(autouse=True)
def components_of_the_examples(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def settings_of(words: list[str]) -> Settings:
    """Settings of a recipe and overrides; a recipe of the user's that does not exist counts as the demo's."""
    recipe, overrides = recipe_and_overrides(words[0] if words else None, words[1:])
    if recipe is not None and "/" not in recipe and recipe.endswith(".toml"):
        recipe = "tiny"
    settings = load_settings(recipe, overrides, check_files=False)
    settings.make_algorithm()
    return settings


def what_a_run_needs(settings: Settings) -> set[str]:
    """What `train` needs for these settings."""
    needs = set()
    if not is_tiny(settings.model) and settings.model != SMALL and settings.family is None:
        needs |= {"gpu"} if settings.model.startswith("random:") else {"gpu", "weights"}
    for name in (*settings.rewards, *settings.eval_rewards):
        if name in REWARDS and reward_spec(name).sources:
            needs.add("weights")
    return needs


def what_a_model_needs(name: str) -> set[str]:
    """What it takes to open what a command names: a run of a shipped recipe, a hub name, or another word."""
    for recipe in RECIPES:
        settings = load_settings(str(recipe), check_files=False)
        if name == settings.out or name.startswith(f"{settings.out}/"):
            return what_a_run_needs(settings) & {"gpu", "weights"}
    is_hub_name = re.fullmatch(r"[A-Za-z][\w-]+/[\w.-]+", name) and not name.startswith("runs/")
    return {"gpu", "weights"} if is_hub_name else set()


def check_command(words: list[str]) -> set[str]:
    """Checks the words after `g2rpo`; returns what the command needs."""
    if words[0].startswith("-"):
        return set()
    assert words[0] in PROGRAM.commands, f"no command {words[0]}"
    if words[1:] == ["--help"]:
        return set()
    # The command's own parser, which refuses unknown options and missing arguments; nothing is run.
    given = PROGRAM.commands[words[0]].make_context(words[0], words[1:]).params
    for option in ("rewards", "reward"):
        for name in str(given.get(option) or "").split(","):
            assert not name or ":" in name or name in REWARDS, f"no reward {name}"
    if words[0] == "compare":
        read_seeds(given["seeds"])
        arms = read_arms(given["arm"] or (), given["words"] or (), given["vary"] or ())
        return set().union(*(what_a_run_needs(settings_of([arm.recipe, *arm.overrides])) for arm in arms))
    if "overrides" in given:
        listed = [word for word in (given["recipe"], *(given["overrides"] or ())) if word is not None]
        needs = what_a_run_needs(settings_of(listed))
        if words[0] == "train":
            return needs
        if words[0] == "fetch":
            return set() if given["dry_run"] else {"network"}
        return needs & {"weights"} if words[0] == "embed" else set()
    if words[0] in ("report", "doctor"):
        return set()
    named = [value for value in given.values() if isinstance(value, str | list | tuple)]
    names = [name for value in named for name in ([value] if isinstance(value, str) else value)]
    return set().union(*(what_a_model_needs(str(name)) for name in names))


def needs_of(block: Block) -> set[str]:
    """Checks all commands of a block; returns what they need."""
    needs: set[str] = set()
    for words in commands(block.code):
        program, line = words[0], " ".join(words)
        if program == "g2rpo":
            needs |= check_command(words[1:]) if words[1:] else set()
        elif program in ("vllm", "hf", "git") or words[:2] == ["pip", "install"] or "-m sglang" in line:
            needs.add("network")
        elif program.startswith("python") and words[1:] and words[1].endswith(".py"):
            assert (ROOT / words[1]).exists(), f"{block}: no {words[1]}"
        elif program == "make":
            makefile = (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv")
            targets = re.findall(r"^(\S+):", makefile, re.MULTILINE)
            assert {word for word in words[1:] if "=" not in word} <= set(targets), f"{block}: {line}"
    return needs


@pytest.mark.parametrize("block", BASH, ids=str)
def test_shell_blocks_parse_and_their_commands_exist(block):
    done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True)
    assert done.returncode == 0, f"{block}: {done.stderr}"
    needs = needs_of(block)
    assert block.needs <= NEEDS, f"{block}: unknown words in the mark: {sorted(block.needs - NEEDS)}"
    if block.path.name != "README.md":
        missing = sorted(needs - block.needs)
        assert not missing, f"{block}: put <!-- needs: {', '.join(missing)} --> above the block"


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_the_text_exist(document):
    """`g2rpo ...` in prose; capitals and dots stand for what a reader puts there."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`(g2rpo [^`]*)`", text):
        words = shlex.split(span)[1:]
        if words[0].isupper() or words[0].startswith("-"):
            continue
        assert words[0] in PROGRAM.commands, f"{document}: {span}"
        if len(words) > 1 and not re.search(r"…|\.\.\.|\b[A-Z][A-Z_]+\b", span):
            check_command(words)


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_blocks_compile(block):
    ast.parse(block.code, filename=str(block))


@pytest.mark.parametrize("block", TOML, ids=str)
def test_toml_blocks_hold_settings(block):
    known = {*Settings.model_fields, *PRESET_OPTIONS, "options"}
    unknown = [key for key in tomllib.loads(block.code) if key not in known]
    assert not unknown, f"{block}: {unknown}"


@pytest.mark.parametrize(
    "words, message",
    [
        ("trian tiny", "no command trian"),
        ("sample tiny --promt x", "No such option"),
        ("train no_such_recipe", "no_such_recipe"),
        ("train tiny learning_rate=1", "learning_rate"),
        ("train tiny lr=fast", "lr"),
        ("score --images x --rewards hsp", "no reward hsp"),
        ("compare tiny --vary lrr=1,2", "lrr"),
    ],
)
def test_wrong_commands_are_found(words, message):
    with pytest.raises(Exception, match=message):
        check_command(words.split())


@pytest.mark.parametrize(
    "words, needs",
    [
        ("train tiny", set()),
        ("train flux_hps", {"gpu", "weights"}),
        ("train flux_hps model=random:flux-dev rewards={colourfulness=1.0}", {"gpu"}),
        ("plan flux_hps", set()),
        ("fetch flux_hps", {"network"}),
        ("fetch flux_hps --dry-run", set()),
        ("sample runs/flux_hps/best --compare tiny --prompt x", {"gpu", "weights"}),
        ("sample black-forest-labs/FLUX.1-dev --prompt x", {"gpu", "weights"}),
        ("sample runs/tiny --prompt x", set()),
    ],
)
def test_what_a_command_needs(words, needs):
    assert check_command(words.split()) == needs
