"""Commands that take a recipe and settings: errors for settings given as options, and recipes in --help."""

from __future__ import annotations

import difflib
import shlex
from typing import Any

from typer.core import TyperCommand

RECIPE_OPTIONS = ("config", "config_file", "recipe", "recipe_file", "settings", "cfg", "file", "c", "f")
"""Options by which other programs get the file of their settings."""


class RunCommand(TyperCommand):
    """A command whose settings are words, `lr=1e-5`; says so to someone who gives them as options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the words of the command line.

        Raises:
            ValueError: an option that the command does not have, but a setting or a recipe is meant.
        """
        if not ctx.resilient_parsing:
            self._check_options(f"g2rpo {ctx.info_name}", args)
        return super().parse_args(ctx, args)

    def _check_options(self, command: str, words: list[str]) -> None:
        names = [name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)]
        own = {"-h", "--help", *(name for name in names if name.startswith("-"))}
        for index, word in enumerate(words):
            if word == "--":
                return
            option, equals, value = word.partition("=")
            if option.startswith("-") and option.strip("-")[:1].isalpha() and option not in own:
                following = words[index + 1] if index + 1 < len(words) else ""
                is_value = following and not following.startswith("--") and "=" not in following
                self._check_option(command, own, option, value if equals else following if is_value else "")

    def _check_option(self, command: str, own: set[str], option: str, value: str) -> None:
        key = option.lstrip("-").replace("-", "_")
        if near := difflib.get_close_matches(option, own, n=1, cutoff=0.8):
            raise ValueError(f"{command} has no option {option}; did you mean {near[0]}?")
        if key.lower() in RECIPE_OPTIONS:
            raise ValueError(
                f"{command} has no option {option}; give the recipe without an option: {command} "
                f"{shlex.quote(value or 'FILE')}"
            )
        from g2rpo.config.reference import find, setting_for

        if name := setting_for(key):
            entry = find(name)
            value = value or ("true" if entry and "true" in entry.choices else "VALUE")
            raise ValueError(
                f"{command} has no option {option}; give a setting as key=value: "
                f"{shlex.quote(f'{name}={value}')}"
            )


class TrainCommand(RunCommand):
    """`g2rpo train`, whose help lists the shipped recipes."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Writes the names of the recipes, each with its first line."""
        from g2rpo.config.recipe import recipe_summary, shipped_recipes

        with formatter.section("Recipes"):
            formatter.write_dl([(name, recipe_summary(name)) for name in shipped_recipes()])
