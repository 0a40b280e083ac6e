"""The help of every command: a sentence first, every option explained, examples last."""

import pytest
from typer.main import get_command

from g2rpo.cli.app import app

COMMANDS = get_command(app).commands


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_a_sentence_explained_options_and_examples(name):
    command = COMMANDS[name]
    summary = command.help.split("\n\n")[0].replace("\n", " ")
    assert summary[0].isupper() and summary.endswith("."), summary
    assert f"g2rpo {name}" in command.help.split("Examples:")[1]
    for parameter in command.params:
        help_text = getattr(parameter, "help", None)
        assert help_text, parameter.name
        assert help_text[0].isupper() or help_text[0].isdigit(), f"{parameter.name}: {help_text}"
        assert help_text.endswith("."), f"{parameter.name}: {help_text}"
        assert " a prompt." not in help_text and "so many" not in help_text, f"{parameter.name}: {help_text}"
