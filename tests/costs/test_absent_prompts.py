"""`plan` before the prompt file is there: the run's number of prompts is assumed, and a note says so."""

import pytest
from typer.testing import CliRunner

import g2rpo
from g2rpo.cli.app import app
from g2rpo.config.load import load_settings
from g2rpo.config.recipe import shipped_recipes


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_every_shipped_recipe_is_planned_in_an_empty_folder():
    for recipe in shipped_recipes():
        assert g2rpo.plan(recipe, memory_gb=80).forwards["total"] > 0


def test_the_note_names_the_file_and_the_number_of_prompts():
    planned = CliRunner().invoke(app, ["plan", "flux_hps"], env={"COLUMNS": "200"})
    settings = load_settings("flux_hps", prompts_may_be_absent=True)
    used = settings.iterations * settings.prompts_per_iteration
    assert planned.exit_code == 0
    note = f"prompts={settings.prompts} does not exist: the estimate assumes that all {used:,} prompts"
    assert f"note: {note} of the run differ" in planned.output


def test_the_costs_are_those_of_a_file_with_as_many_prompts(tmp_path):
    absent = g2rpo.plan("flux_lora_24gb", memory_gb=24)
    (tmp_path / "hpsv2_train.json").write_text("[" + ",".join(f'"prompt {i}"' for i in range(700)) + "]")
    present = g2rpo.plan("flux_lora_24gb", memory_gb=24)
    assert (absent.forwards, absent.eval_forwards) == (present.forwards, present.eval_forwards)
    assert absent.seconds == present.seconds and absent.memory == present.memory


@pytest.mark.parametrize("key", ["prompts", "eval_prompts"])
def test_a_file_of_an_override_must_exist(key):
    with pytest.raises(ValueError, match=rf"{key}: no prompt file 'mine\.txt'"):
        g2rpo.plan("tiny", **{key: "mine.txt"})


def test_training_still_needs_the_file():
    with pytest.raises(ValueError, match=r"no prompt file 'hpsv2_train\.json'"):
        load_settings("flux_hps")


def test_a_damaged_file_is_still_an_error(tmp_path):
    (tmp_path / "hpsv2_train.json").write_text("[")
    with pytest.raises(ValueError, match=r"hpsv2_train\.json"):
        g2rpo.plan("flux_hps")
