"""The settings reference is complete, and agrees with what loading settings accepts."""

import re
import shlex

import pytest
from pydantic import ValidationError

from g2rpo.algorithms.registry import PRESET_OPTIONS, PRESETS, algorithms_with
from g2rpo.config.load import load_settings
from g2rpo.config.recipe import parse_recipe, parse_value, recipe_text, shipped_recipes
from g2rpo.config.reference import ALSO, EXAMPLES, SECTIONS, entries, first_sentence, markdown
from g2rpo.config.settings import Settings

NAMES = [entry.name for entry in entries()]
BY_NAME = {entry.name: entry for entry in entries()}


def test_every_setting_and_option_is_in_the_reference_once():
    assert sorted(NAMES) == sorted({*Settings.model_fields, *PRESET_OPTIONS})
    assert set(SECTIONS) <= set(Settings.model_fields)
    assert [entry.section for entry in entries() if entry.name in SECTIONS] == list(SECTIONS.values())
    assert set(EXAMPLES) | set(ALSO) <= set(NAMES)


def test_every_entry_is_described_in_sentences():
    for entry in entries():
        for declared in entry.declarations:
            sentence = first_sentence(declared.description)
            assert len(sentence.split()) >= 2 and sentence.endswith("."), f"{entry.name}: {sentence!r}"
            assert declared.description.endswith("."), entry.name


def test_the_algorithms_of_an_option_are_those_that_have_it():
    for name in PRESET_OPTIONS:
        assert sorted(BY_NAME[name].algorithms) == sorted(algorithms_with(name))
        for declared in BY_NAME[name].declarations:
            listed = [algorithm for _, names in declared.defaults for algorithm in names]
            assert sorted(listed) == sorted(declared.algorithms)
    assert not BY_NAME["lr"].algorithms


@pytest.mark.parametrize(
    ("name", "values", "default"),
    [  # read off the declarations by hand
        ("lr", "number > 0", "2e-6"),
        ("adam_beta1", "number >= 0 and < 1", "0.9"),
        ("max_invalid_fraction", "number from 0 to 1", "0.1"),
        ("seed", "integer >= 0 and < 2^63", "42"),
        ("precision", "float32 or tf32 or bfloat16 or float64", '"float32"'),
        ("resolution", "integer >= 1 or list of 2 integers >= 1 or none", "none"),
        ("rollout_batch", "integer >= 1 or auto", "24"),
        ("skip_flat", "true or false", "false"),
        ("rewards", "table of name = number", '{"tiny_preference" = 1.0}'),
        ("granularities", "ascending list of integers >= 1", "[1, 2, 3]"),
        ("train_levels", "integer >= 1 or number > 0 and <= 1", "0.99"),
        ("window", "integer >= 1 or none", "none (flow_grpo), 4 (mix_grpo)"),
        ("clip_range", "number > 0", "1e-4"),
    ],
)
def test_values_and_defaults(name, values, default):
    assert (BY_NAME[name].values, BY_NAME[name].defaults()) == (values, default)


def test_the_stated_values_are_those_that_are_accepted():
    """For each number with a bound, the bound is refused or accepted as the text says."""
    checked = 0
    for entry in entries():
        declared = entry.declarations[0]
        if entry.algorithms or not (
            bound := re.match(r"(?:integer|number) (>=?|from) (\d+)", declared.values)
        ):
            continue
        symbol, number = bound[1], int(bound[2])
        inside, outside = (number + 1e-9, number) if symbol == ">" else (number, number - 1)
        for value, accepted in ((inside, True), (outside, False)):
            try:
                Settings.model_validate({entry.name: value})
                refused = False
            except ValidationError as error:  # other errors are about settings that do not fit together
                refused = any(problem["loc"][:1] == (entry.name,) for problem in error.errors())
            assert refused != accepted, f"{entry.name} = {value}: the reference says {declared.values}"
            checked += 1
    assert checked > 40


@pytest.mark.parametrize("entry", entries(), ids=NAMES)
def test_the_example_is_a_command_that_changes_the_setting(entry):
    program, command, recipe, *overrides = shlex.split(entry.example)
    assert (program, command) == ("g2rpo", "train") and overrides
    before, after = (
        load_settings(recipe, check_files=False),
        load_settings(recipe, overrides, check_files=False),
    )
    if entry.name == "algorithm_options":  # of a shipped algorithm: stored as the flat option
        assert after.option("eta") != before.option("eta")
    elif entry.name in PRESET_OPTIONS:
        assert after.option(entry.name) is not None
    else:
        assert getattr(after, entry.name) != getattr(before, entry.name)


def test_recipes_are_listed_with_their_values():
    """Each value that a recipe sets is in the reference, and the text reads as that value."""
    for recipe in shipped_recipes():
        values = parse_recipe(*recipe_text(recipe))
        for algorithm, table in values.pop("options", {}).items():
            for name, value in table.items():
                assert parse_value(dict(BY_NAME[name].recipes)[f"{recipe} algorithm={algorithm}"]) == value
        for name, value in values.items():
            assert parse_value(dict(BY_NAME[name].recipes)[recipe]) == value


def test_earlier_names_and_names_elsewhere():
    assert BY_NAME["iterations"].aliases == ("steps",) and BY_NAME["loggers"].aliases == ("tensorboard",)
    assert "learning_rate" in BY_NAME["lr"].elsewhere


def test_the_page_has_a_row_and_an_entry_for_every_setting():
    page = markdown()
    assert page.startswith("# Settings\n")
    for entry in entries():
        assert page.count(f"\n### `{entry.name}`\n") == 1
        (row,) = (
            line for line in page.splitlines() if line.startswith(f"| [`{entry.name}`](#{entry.name}) |")
        )
        assert len(re.split(r"(?<!\\)\|", row)) == 6, row  # four cells
    headings = [line[3:] for line in page.splitlines() if line.startswith("## ")]
    assert headings == list(SECTIONS.values())
    # A heading of a section must not take the anchor of a setting.
    assert not {heading.lower().replace(" ", "-") for heading in headings} & set(NAMES)
    lr = page.split("\n### `lr`\n")[1].split("\n### ")[0]
    assert "- Default: `2e-6`\n" in lr and "`1e-4` (flux_lora_1gpu, flux_lora_24gb)" in lr
    assert "- In other trainers: `learning_rate`\n" in lr and "- Example: `g2rpo train tiny lr=1e-5`" in lr
    assert "[guard](guard.md)" in page and "docs/guard.md" not in page


def test_the_page_names_every_algorithm_as_a_value():
    assert all(name in BY_NAME["algorithm"].values for name in PRESETS)


def test_first_sentence():
    assert first_sentence("One. Two.") == "One."
    assert first_sentence("Counted as in the paper's Eq. 10. More.") == "Counted as in the paper's Eq. 10."
    assert first_sentence("See docs/guard.md for more.") == "See docs/guard.md for more."
