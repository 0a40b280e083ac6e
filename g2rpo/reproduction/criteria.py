"""What a reproduction is compared with: published numbers and rules, as data in TOML files.

    expected/NAME.toml     for the shipped recipe NAME; `g2rpo reproduce --criteria FILE` reads another

A printed number keeps its digits: 0.390 is known to half a unit of its last digit, 0.0005.
"""

from __future__ import annotations

import tomllib
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from g2rpo.config.toml_problems import toml_problem

Model = Literal["base", "trained"]
"""Label of a model in the evaluations: untrained, or trained by this reproduction."""

TRAINING = "training"
"""Source of prompts that stands for those that the run trains on."""

Count = Annotated[int, Field(ge=1)]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Row(_Data):
    """One row of a published table: means of one model.

    The model is compared with ours if `model` names one of them; otherwise the row is there to be read.
    """

    table: str
    method: str
    model: Model | None = None
    steps: Count
    values: dict[str, Decimal]
    """Reward name -> mean, in the digits of the table."""
    errors: dict[str, Decimal] = {}
    """Reward name -> standard error of the mean; without it, that of our mean is taken for both."""


class Gain(_Data):
    """Published paired gains of the trained model over the base."""

    source: str
    steps: Count
    values: dict[str, Decimal]
    errors: dict[str, Decimal] = {}


class Evaluation(_Data):
    """Conditions of the tables."""

    prompts: str
    """A prompt file, or world:NAME."""
    num_prompts: Count
    num_images: Count = 1
    seed: int = 0
    steps: list[Count]
    """Numbers of denoising steps; the base model is first evaluated with the first of them."""
    rewards: list[str]
    shift: float | Literal["pipeline"] = 3.0
    conditions: dict[str, Any] = {}
    """Conditions that replace those of the recipe, such as resolution."""
    batch: Count = 16
    rises: list[str] = []
    """Trained rewards that must rise on the benchmark prompts; the other trained ones must not fall."""

    @field_validator("conditions")
    @classmethod
    def _plain_numbers(cls, value: dict[str, Any]) -> dict[str, Any]:
        return {name: float(v) if isinstance(v, Decimal) else v for name, v in value.items()}


class Start(_Data):
    """The first iterations."""

    iterations: Count
    max_ratio_deviation: Annotated[float, Field(gt=0)]
    """Largest |ratio - 1| between the velocities of rollout and update before the first update."""
    ratio_source: str
    max_flat_group_share: Annotated[float, Field(ge=0, le=1)] = 0.5


class Curve(_Data):
    """The reward after a part of the training, against the base on the same prompts and seeds."""

    iterations: Count
    prompts: str
    """A prompt file, world:NAME, or "training"."""
    num_prompts: Count
    num_images: Count = 1
    steps: Count
    rises: list[str]
    """Rewards that must rise by `standard_errors`; the other trained ones must not fall by as much."""
    standard_errors: Annotated[float, Field(gt=0)] = 3.0
    source: str


class Criteria(_Data):
    """The content of a criteria file.

    Attributes:
        title: what is reproduced.
        source: where the expected values are from.
        licence: what must be said when results are published.
        open_questions: what the source leaves open, and what is done here.
        tolerance_errors: number of standard errors by which a mean may differ.
    """

    title: str
    source: str
    licence: str
    open_questions: list[str] = []
    tolerance_errors: Annotated[float, Field(gt=0)] = 3.0
    evaluation: Evaluation
    start: Start
    curve: Curve
    row: list[Row] = []
    gain: list[Gain] = []


def available() -> list[str]:
    """Names of the recipes that have criteria, sorted."""
    folder = resources.files("g2rpo.reproduction") / "expected"
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".toml"))


def criteria_text(recipe: str, file: Path | None = None) -> tuple[str, str]:
    """The text of the criteria of a recipe, and its name for messages.

    Args:
        recipe: name of a shipped recipe.
        file: a file of the user's, in place of the shipped one.

    Raises:
        ValueError: the file cannot be read, or the recipe has no criteria.
    """
    if file is not None:
        try:
            return file.expanduser().read_text(encoding="utf-8-sig"), str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--criteria {file} cannot be read: {error}; give a TOML file") from error
    if recipe not in available():
        raise ValueError(
            f"recipe {recipe!r} has no criteria; those with criteria are {', '.join(available())}. Give the "
            "values that you expect with --criteria FILE (docs/reproduce.md has the format)"
        )
    path = resources.files("g2rpo.reproduction") / "expected" / f"{recipe}.toml"
    return path.read_text("utf-8"), f"{recipe}.toml"


def parse_criteria(text: str, name: str) -> Criteria:
    """Parses a criteria file.

    Raises:
        ValueError: no TOML, an unknown or missing key, or a value out of range; the message names each.
    """
    try:
        values = tomllib.loads(text, parse_float=Decimal)
    except tomllib.TOMLDecodeError as error:
        message, _, position = str(error).partition(" (at ")
        line = position.removeprefix("line ").split(",")[0]
        number = int(line) if line.isdecimal() else text.count("\n") + 1
        raise ValueError(f"{name}:{number}: {toml_problem(text, number, message)}") from error
    try:
        criteria = Criteria.model_validate(values)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise ValueError(f"criteria {name}:\n" + "\n".join(lines)) from error
    known = set(criteria.evaluation.rewards)
    if unknown := sorted(set(criteria.evaluation.rises) - known):
        raise ValueError(f"criteria {name}: {unknown[0]!r} is not among evaluation.rewards: {sorted(known)}")
    compared: list[Row | Gain] = [*criteria.row, *criteria.gain]
    for row in compared:
        if unknown := sorted({*row.values, *row.errors} - known):
            raise ValueError(
                f"criteria {name}: {unknown[0]!r} is not among evaluation.rewards: {sorted(known)}"
            )
        is_ours = isinstance(row, Gain) or row.model is not None
        if is_ours and row.steps not in criteria.evaluation.steps:
            raise ValueError(f"criteria {name}: {row.steps} steps are not in evaluation.steps")
    return criteria


def digits_error(value: Decimal) -> float:
    """Half a unit of the last printed digit: 0.0005 for 0.390."""
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int), f"{value} is not finite"
    return float(Decimal(5).scaleb(exponent - 1))
