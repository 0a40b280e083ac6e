"""Arms of a comparison from arguments: `NAME=RECIPE KEY=VALUE ...`, times `--vary KEY=V1,V2`."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g2rpo.config.load import Settings, load_settings, read_settings
from g2rpo.config.recipe import DEFAULT_RECIPE, parse_value, toml_value

NAME = re.compile(r"\w[\w.+-]*")
# Settings that `compare` itself decides: the seed, the folder, and that every run is trained to its end.
OWN = {"seed": "--seeds", "out": "--out", "resume": "", "stop_after": ""}


@dataclass(frozen=True)
class Arm:
    """One method of a comparison.

    Attributes:
        name: unique in the comparison.
        recipe: name or path.
        overrides: `key=value`; later ones take precedence.
    """

    name: str
    recipe: str
    overrides: tuple[str, ...]

    @property
    def folder(self) -> str:
        """The arm's name as a valid folder name."""
        return re.sub(r"[^\w.=,+-]+", "_", self.name)

    def words(self, seed: int, out: Path) -> list[str]:
        """Returns the arm's overrides for one seed and run folder."""
        return [*self.overrides, f"seed={seed}", f"out={_quoted(out)}"]

    def settings(self, seed: int, out: Path) -> Settings:
        """Returns the validated settings of one run.

        Raises:
            ValueError: as `load_settings`; the message begins with the arm's name.
        """
        try:
            settings = load_settings(self.recipe, self.words(seed, out))
            settings.make_algorithm()  # a user's own: imported and validated before anything runs
            return settings
        except ValueError as error:
            raise ValueError(f"arm {self.name}: {error}") from error


def arm_of(name: str, recipe: str, overrides: Mapping[str, Any]) -> Arm:
    """Returns an arm from values instead of text.

    Args:
        name: name of the arm.
        recipe: name or path.
        overrides: setting -> value; None is the setting's default.
    """
    words = []
    for key, value in overrides.items():
        text = str(value) if isinstance(value, Path) else value
        words.append(f"{key}={'none' if text is None else toml_value(text)}")
    return Arm(name, recipe, tuple(words))


def _quoted(path: Path) -> str:
    """Quotes a path that TOML would read as another type, such as `1e5`."""
    text = str(path)
    return text if parse_value(text) == text else f"'{text}'"


def split_outside(text: str, separator: str) -> list[str]:
    """Splits text at separators outside brackets, braces and quotes; " " means any white space.

    Quotes are kept, because they belong to TOML. With white space, empty parts are left out.
    """
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif depth == 0 and (letter == separator or (separator == " " and letter.isspace())):
            parts.append("")
            continue
        parts[-1] += letter
    return [part for part in parts if part] if separator == " " else parts


def read_arm(text: str) -> Arm:
    """Parses `NAME=RECIPE KEY=VALUE ...`.

    Raises:
        ValueError: the text does not have this form.
    """
    words = split_outside(text, " ")
    name, equals, recipe = (words[0] if words else "").partition("=")
    if not equals or not recipe or not NAME.fullmatch(name):
        raise ValueError(
            f"--arm {text!r} is not NAME=RECIPE KEY=VALUE ..., such as 'calm=tiny eta=0.3'; a name consists "
            "of letters, digits and, after the first character, . + - _"
        )
    return Arm(name, str(parse_value(recipe)), tuple(_bare(word) for word in words[1:]))


def _bare(word: str) -> str:
    """Removes the quotes around `'key=value'`, which a shell may need."""
    inner = word[1:-1]
    return inner if word[0] in "\"'" and word == word[0] + inner + word[0] and word[0] not in inner else word


def read_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates recipes from `key=value` overrides; a path with `=` after a slash is a recipe."""
    recipes = [word for word in words if "=" not in word or "/" in word.partition("=")[0]]
    return recipes, [word for word in words if word not in recipes]


def read_vary(texts: Sequence[str]) -> list[list[str]]:
    """Expands each text, such as `lr=1e-5,3e-5` into ["lr=1e-5", "lr=3e-5"].

    Raises:
        ValueError: no key, a repeated key, or fewer than two different values.
    """
    choices: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        parts = [value.strip() for value in split_outside(values, ",")]
        if not equals or not key.strip() or len(parts) < 2 or not all(parts) or len(set(parts)) < len(parts):
            raise ValueError(f"--vary {text!r} is not KEY=V1,V2 with two or more different values")
        if key.strip() in choices:
            raise ValueError(f"--vary {key.strip()} is given twice; list all its values in one --vary")
        choices[key.strip()] = [f"{key.strip()}={value}" for value in parts]
    return list(choices.values())


def read_seeds(text: str) -> list[int]:
    """Parses seeds such as `0,1,2`.

    Raises:
        ValueError: no seeds, a repeated seed, or anything but integers >= 0.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]+", part) for part in parts):
        raise ValueError(f"--seeds {text!r}: give whole numbers >= 0, separated by commas, such as 0,1,2")
    seeds = [int(part) for part in parts]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds {text}: give each seed once; the same seed gives the same run")
    return seeds


def read_arms(arms: Sequence[str], words: Sequence[str], vary: Sequence[str]) -> list[Arm]:
    """Returns all arms: those of --arm and the recipes among `words`, each times the values of --vary.

    Overrides among `words` apply to every arm; an arm's own overrides take precedence over them, and those of
    --vary over both.

    Args:
        arms: texts as in `read_arm`.
        words: recipes, named after their files, and `key=value` overrides.
        vary: texts as in `read_vary`.

    Raises:
        ValueError: an invalid argument, a repeated name, or a setting that `compare` decides itself.
    """
    recipes, common = read_words(words)
    base = [read_arm(text) for text in arms]
    base += [Arm(re.sub(r"[^\w.+-]", "_", Path(recipe).stem), recipe, ()) for recipe in recipes]
    choices = list(itertools.product(*read_vary(vary)))
    if not base and any(choices):
        base = [Arm(DEFAULT_RECIPE, DEFAULT_RECIPE, ())]
    expanded = [
        Arm(" ".join([arm.name, *choice]), arm.recipe, (*common, *arm.overrides, *choice))
        for arm in base
        for choice in choices
    ]
    for arm in expanded:
        for word in arm.overrides:
            key = word.partition("=")[0].strip()
            if key in OWN:
                instead = (
                    f"; {OWN[key]} sets it for all arms" if OWN[key] else "; every run is trained to its end"
                )
                raise ValueError(f"arm {arm.name}: {key} cannot be set per arm{instead}")
    check_names([arm.name for arm in expanded], [arm.folder for arm in expanded])
    return expanded


def check_names(*kinds: Sequence[str]) -> None:
    """Checks that names are unique.

    Raises:
        ValueError: a name is repeated within one of the sequences.
    """
    for names in kinds:
        for name, count in Counter(names).items():
            if count > 1:
                raise ValueError(f"{count} arms are called {name!r}; give each a different name")


def read_runs(texts: Sequence[str]) -> dict[str, dict[int, Path]]:
    """Parses texts `NAME=FOLDER` into name -> seed -> run folder.

    Raises:
        ValueError: a text of another form, no run folder, or a repeated seed in an arm.
    """
    folders: dict[str, dict[int, Path]] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not equals or not folder or not NAME.fullmatch(name):
            raise ValueError(f"--run {text!r} is not NAME=FOLDER, such as g2rpo=runs/first")
        path = Path(folder).expanduser()
        seed = read_settings(path).seed
        if not (path / "metrics.jsonl").is_file():
            raise ValueError(
                f"--run {text}: {path} contains no metrics.jsonl; give the folder of a trained run"
            )
        seeds = folders.setdefault(name, {})
        if seed in seeds:
            raise ValueError(
                f"--run {text}: {seeds[seed]} is already seed {seed} of {name}; give each seed once"
            )
        seeds[seed] = path
    return folders
