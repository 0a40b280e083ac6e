"""Loads validated Settings from a recipe and overrides, or from a run folder.

    recipe (TOML)  <  key=value overrides  ->  load_settings  ->  Settings
    settings.to_toml()  ->  RUN/config.toml  ->  read_settings(RUN) == settings.resolved()

An unknown key, a value out of range or an option without effect raises ValueError, which says what to write.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from g2rpo.algorithms.registry import PRESET_OPTIONS, OptionError, algorithm_defaults, is_custom
from g2rpo.config import checks
from g2rpo.config.hints import HINTS, suggestion, wrong_place
from g2rpo.config.identity import check_same_run
from g2rpo.config.loggers import with_loggers
from g2rpo.config.recipe import apply_overrides, parse_overrides, parse_recipe, recipe_text
from g2rpo.config.settings import Settings, text_names
from g2rpo.runtime.secrets import remember_secrets
from g2rpo.runtime.text import did_you_mean, shortened

__all__ = ["Settings", "load_settings", "read_settings", "check_same_run"]

ALIASES = {"steps": "iterations"}

OPTIONS = "options"
"""Table of a recipe with options for algorithms other than its own: [options.NAME]."""


def load_settings(
    recipe: str | Path | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    check_files: bool = True,
    prompts_may_be_absent: bool = False,
) -> Settings:
    """Loads the settings of a recipe and applies overrides.

    Args:
        recipe: path, or name of a shipped recipe; None = the recipe of the embedded model.
        overrides: `key=value` strings, or a mapping.
        check_files: also check that prompt files exist and the run folder can be written.
        prompts_may_be_absent: prompt files that the recipe names need not exist, as for `plan`; those of the
            overrides must.

    Returns:
        Validated settings.

    Raises:
        ValueError: an unreadable recipe, an unknown key (the message suggests the nearest one), or a value
            that is out of range or does not fit the others.
    """
    text, name = recipe_text(recipe)
    given = _unalias(parse_overrides(overrides, text_names()), "the overrides")
    written = _for_algorithm(_unalias(parse_recipe(text, name), name), given.get("algorithm"), name)
    values = _options_once(apply_overrides(written, given), given)
    settings = _validated(values, name, given)
    if check_files:
        try:
            checks.check_noise(settings)
        except ValueError as error:
            raise ValueError(f"{name}{' with overrides' if given else ''}: {error}") from error
        absent = {"prompts", "eval_prompts"} - given.keys() if prompts_may_be_absent else ()
        checks.check_files(settings, absent)
    return settings


def checked_settings(settings: Settings, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Applies overrides to settings, and checks that all values fit together.

    Args:
        settings: settings, also those whose values were replaced without a check.
        overrides: as for `load_settings`.

    Raises:
        ValueError: as `load_settings`.
    """
    given = _unalias(parse_overrides(overrides or {}, text_names()), "the overrides")
    values = {key: value for key, value in settings.model_dump().items() if value is not None}
    return _validated(_options_once(apply_overrides(values, given), given), "the settings", given)


def read_settings(run: str | Path) -> Settings:
    """Loads the settings of a run folder from its config.toml.

    Raises:
        ValueError: the folder has no config.toml, or the file is invalid.
    """
    path = Path(run).expanduser() / "config.toml"
    if not path.is_file():
        raise ValueError(f"{run} is not a run folder: it contains no config.toml")
    return load_settings(path, check_files=False)


def _unalias(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    for alias, name in ALIASES.items():
        if alias in values and name in values:
            raise ValueError(f"{where}: {alias} and {name} are the same setting; give one")
    return {ALIASES.get(key, key): value for key, value in with_loggers(values, where).items()}


def _for_algorithm(values: Mapping[str, Any], requested: Any, recipe: str) -> dict[str, Any]:
    """The values of a recipe for the algorithm of an override.

    A recipe that can also be run with another algorithm has a table [options.NAME] for it. Its entries apply
    only with that algorithm, and then options of the recipe that the algorithm does not have are left out.

    Args:
        values: of the recipe.
        requested: the algorithm of the overrides; None: there is none.
        recipe: name of the recipe, for messages.

    Raises:
        ValueError: a table of another kind, or of an unknown algorithm or the recipe's own.
    """
    kept = {key: value for key, value in values.items() if key != OPTIONS}
    tables = values.get(OPTIONS, {})
    if not isinstance(tables, Mapping) or not all(isinstance(table, Mapping) for table in tables.values()):
        raise ValueError(f"{recipe}: {OPTIONS} contains tables, such as [{OPTIONS}.NAME] for algorithm=NAME")
    own = kept.get("algorithm", Settings.model_fields["algorithm"].default)
    if not isinstance(requested, str | None) or not isinstance(own, str):
        return kept  # refused with all other values of a wrong type
    if own in tables:
        raise ValueError(
            f"{recipe}: [{OPTIONS}.{own}] is for the recipe's own algorithm; write its options above, "
            "outside the table"
        )
    # Reading a file imports no class of a user that nobody asked for.
    checked = {name: table for name, table in tables.items() if not is_custom(name) or name == requested}
    for algorithm, table in checked.items():
        try:
            known = algorithm_defaults(algorithm)
        except ValueError as error:
            raise ValueError(f"{recipe}: [{OPTIONS}.{algorithm}]: {error}") from error
        if unknown := [key for key in table if key not in known]:
            raise ValueError(
                f"{recipe}: [{OPTIONS}.{algorithm}] contains {unknown[0]!r}, which is not an option of "
                f"{algorithm}{_belongs(unknown[0], f'{OPTIONS}.{algorithm}', known)}; its options are "
                f"{', '.join(known)}"
            )
    if requested is None or requested not in tables:
        return kept
    options = algorithm_defaults(requested)
    shared = {key: v for key, v in kept.items() if key not in PRESET_OPTIONS or key in options}
    return shared | dict(tables[requested])


def _belongs(name: str, table: str, known: Iterable[str]) -> str:
    """Says where a name belongs that is no option of a table's algorithm."""
    place = wrong_place(name, Settings.model_fields, table)
    return f". {place}" if place else did_you_mean(name, known)


def _options_once(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values, where an override of an option replaces it in either place: as a key or in the table."""
    table = values.get("algorithm_options")
    if not isinstance(table, Mapping):
        return dict(values)
    overridden = {key.partition(".")[2] for key in given if key.startswith("algorithm_options.")}
    overridden |= set(given.get("algorithm_options") or ())
    kept = {key: value for key, value in values.items() if key in given or key not in overridden}
    return kept | {"algorithm_options": {key: v for key, v in table.items() if key not in given}}


def _validated(values: Mapping[str, Any], recipe: str, overrides: Mapping[str, Any]) -> Settings:
    given = {key.partition(".")[0] for key in overrides}
    remember_secrets(values.get("reward_options"))
    algorithm = str(values.get("algorithm", Settings.model_fields["algorithm"].default))

    def hint(key: str) -> str:
        return suggestion(key, Settings.model_fields, algorithm, values.get(key))

    try:
        # None in an override means "the default", which for some fields is not None.
        return Settings.model_validate({key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        lines: dict[str, str] = {}  # by key, because a value of a union type fails once per type
        for key, kind, message in _problems(error):
            source = "override" if key in given else recipe
            if kind == "extra_forbidden":
                lines[key] = f"{source}: there is no setting {key!r}{hint(key)}"
            elif key in lines:
                lines[key] = f"{lines[key]}, or: {message}"
            elif key:
                shown = shortened(repr(values.get(key)), 200)
                lines[key] = f"{source}: {key} = {shown}: {message}{HINTS.get(key, '')}"
            else:
                lines[key] = f"{recipe}{' with overrides' if given else ''}: {message}"
        raise ValueError("\n".join(lines.values())) from error


def _problems(error: ValidationError) -> Iterator[tuple[str, str, str]]:
    """Key ("" for several settings together), kind and message of each problem."""
    for problem in error.errors():
        key = str(problem["loc"][0]) if problem["loc"] else ""
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, OptionError):
            yield from ((option, "", message) for option, message in cause.problems)
        else:
            key = "" if key == "algorithm_options" and cause is not None else key
            yield key, problem["type"], problem["msg"].removeprefix("Value error, ")
