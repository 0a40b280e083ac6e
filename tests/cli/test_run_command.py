"""Settings and recipes given as options are answered with what to type; `train --help` lists the recipes."""

import pytest
from typer.testing import CliRunner

from g2rpo.cli.app import app
from g2rpo.config.recipe import recipe_summary, shipped_recipes


def said(*words: str, code: int = 0, width: int = 110) -> str:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": str(width)})
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["train", "tiny", "--lr", "1e-5"], "lr=1e-5"),
        (["train", "tiny", "--lr=1e-5"], "lr=1e-5"),
        (["train", "-lr", "1e-5"], "lr=1e-5"),
        (["train", "--learning-rate", "1e-5"], "lr=1e-5"),
        (["train", "tiny", "--num-steps", "4"], "num_steps=4"),
        (["train", "tiny", "--seed", "-1"], "seed=-1"),
        (["train", "--granularities", "[1, 2]"], "'granularities=[1, 2]'"),
        (["train", "--skip-flat", "--lr", "1"], "skip_flat=true"),
        (["train", "--lr"], "lr=VALUE"),
        (["train", "--lr", "eta=0.7"], "lr=VALUE"),
        (["plan", "tiny", "--iterations=5"], "iterations=5"),
        (["plan", "--steps", "5"], "steps=5"),
        (["embed", "--prompts", "my prompts.txt"], "'prompts=my prompts.txt'"),
        (["fetch", "--rewards.hps", "1"], "rewards.hps=1"),
        (["compare", "tiny", "--iterations", "5"], "iterations=5"),
        (["train", "--config", "my.toml"], "g2rpo train my.toml"),
        (["train", "--config=my.toml"], "g2rpo train my.toml"),
        (["train", "-c", "my.toml"], "g2rpo train my.toml"),
        (["plan", "--recipe", "tiny_gpu"], "g2rpo plan tiny_gpu"),
        (["compare", "--recipe", "tiny"], "g2rpo compare tiny"),
        (["embed", "--config"], "g2rpo embed FILE"),
        (["compare", "tiny", "--seed", "1"], "did you mean --seeds?"),
        (["plan", "--process", "2"], "did you mean --processes?"),
    ],
)
def test_an_option_that_is_none_is_answered_with_what_to_type(words, advice):
    output = said(*words, code=2)
    option = next(word for word in words if word.startswith("-")).partition("=")[0]
    assert output.startswith(f"error: g2rpo {words[0]} has no option {option}; ")
    assert output.endswith(f"{advice}\n") and output.count("\n") == 1


def test_options_of_the_command_and_words_after_two_dashes_stay():
    assert "--measure" in said("plan", "--help") and "-h" in said("train", "-h")
    assert "no such option" in said("plan", "--xyzzyxyzzy", code=2).lower()
    assert "override '--lr' is not key=value" in said("plan", "tiny", "--", "--lr", code=2)
    assert "seconds_per_forward" not in said("plan", "--seconds-per-forward", "0.5", "tiny")


def test_the_help_of_train_lists_every_recipe_with_its_first_line():
    output = said("train", "--help")
    listed = output.split("Recipes:\n")[1]
    rows = [line for line in listed.splitlines() if line.startswith("  ") and line[2] != " "]
    assert [row.split()[0] for row in rows] == shipped_recipes()
    plain = "".join(listed.split())  # lines also end at a hyphen
    for name in shipped_recipes():
        assert name + recipe_summary(name).replace(" ", "") in plain
        assert recipe_summary(name).endswith(".") and "docs/" not in recipe_summary(name)


def test_the_summary_is_the_first_line_of_the_file(request):
    text = (request.config.rootpath / "g2rpo" / "recipes" / "qwen_image_lora_1gpu.toml").read_text()
    assert text.startswith(f"# {recipe_summary('qwen_image_lora_1gpu')}  ")
