"""The help of every command starts with a sentence, explains every option and has examples."""

from typer.main import get_command

from g2rpo.cli.app import app

COMMANDS = get_command(app).commands


def test_help_starts_with_a_sentence_and_has_examples():
    for name, command in COMMANDS.items():
        summary = command.help.split("\n\n")[0]
        assert summary[0].isupper() and summary.endswith("."), f"{name}: {summary}"
        assert f"g2rpo {name}" in command.help.split("Examples:")[1], name


def test_every_option_is_explained_in_a_sentence():
    for name, command in COMMANDS.items():
        for parameter in command.params:
            help_text = getattr(parameter, "help", None)
            assert help_text, f"{name} {parameter.name} has no help"
            assert help_text[0].isupper() and help_text.endswith("."), f"{name} {parameter.name}: {help_text}"
