"""Votes between two models: sides, results and their CSV, without a page.

    win rate    (wins + ties / 2) / n
    interval    Wilson's score interval at 95 % (Wilson, JASA 22, 1927), with the win rate as the proportion:
                (p + z^2/2n -+ z sqrt(p (1 - p)/n + z^2/4n^2)) / (1 + z^2/n), z = 1.95996

A tie counts half. A half varies less than a win or a loss, so the interval is then rather too wide than too
narrow. Votes count as independent: with several votes per prompt, or several voters on the same prompts, the
true uncertainty is larger.
"""

from __future__ import annotations

import csv
import io
import math
import random
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from g2rpo.inference.sample import image_seeds
from g2rpo.runtime.files import write_atomic

Z_95 = 1.959963984540054
"""Quantile of the normal distribution at 97.5 %."""

Choice = Literal["left", "right", "tie"]
CHOICES: tuple[Choice, ...] = get_args(Choice)

COLUMNS = (
    "time",
    "voter",
    "number",
    "prompt",
    "seed",
    "steps",
    "guidance",
    "shift",
    "left",
    "right",
    "choice",
    "winner",
)
"""Columns of the CSV; `left`, `right` and `winner` are names of models, `winner` is empty for a tie."""


def wilson_interval(successes: float, count: int, z: float = Z_95) -> tuple[float, float]:
    """Returns Wilson's score interval of a proportion (see the top of this file).

    Args:
        successes: between 0 and `count`; halves are allowed.
        count: number of trials, >= 1.
        z: quantile of the normal distribution; the default is that of 95 %.

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    if count < 1 or not 0 <= successes <= count:
        raise ValueError(f"need count >= 1 and 0 <= successes <= count, got {successes=}, {count=}")
    share = successes / count
    centre = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


@dataclass(frozen=True)
class WinRate:
    """How often a model was preferred to another.

    Attributes:
        wins, losses, ties: numbers of votes.
        rate: (wins + ties / 2) / n; NaN without votes.
        low, high: 95 % interval of `rate`; NaN without votes.
    """

    wins: int
    losses: int
    ties: int
    rate: float
    low: float
    high: float

    @property
    def votes(self) -> int:
        """Number of votes."""
        return self.wins + self.losses + self.ties

    @property
    def verdict(self) -> str:
        """What the interval says: "preferred", "not preferred" or "undecided"."""
        if self.votes and self.low > 0.5:
            return "preferred"
        return "not preferred" if self.votes and self.high < 0.5 else "undecided"


def win_rate(wins: int, losses: int, ties: int) -> WinRate:
    """Returns the win rate with its interval.

    Raises:
        ValueError: a number is negative.
    """
    if min(wins, losses, ties) < 0:
        raise ValueError(f"numbers of votes are not negative, got {wins=}, {losses=}, {ties=}")
    count = wins + losses + ties
    if not count:
        return WinRate(0, 0, 0, math.nan, math.nan, math.nan)
    score = wins + ties / 2
    return WinRate(wins, losses, ties, score / count, *wilson_interval(score, count))


@dataclass(frozen=True)
class Pair:
    """Two images to choose from; both models sample from the same seed.

    Attributes:
        prompt, seed: of both images.
        left, right: labels of the models.
    """

    prompt: str
    seed: int
    left: str
    right: str


@dataclass(frozen=True)
class Vote:
    """A choice between the images of a pair.

    Attributes:
        pair: what was shown.
        choice: the side, or "tie".
        time: when, in UTC, as ISO 8601.
    """

    pair: Pair
    choice: Choice
    time: str

    @property
    def winner(self) -> str | None:
        """Label of the preferred model; None: a tie."""
        return {"left": self.pair.left, "right": self.pair.right, "tie": None}[self.choice]


def pairs_of(
    prompts: Sequence[str], models: tuple[str, str], seed: int, images: int, coin: random.Random
) -> tuple[Pair, ...]:
    """Returns `images` pairs per prompt, each with its own seed and with the sides drawn at random.

    Args:
        prompts: the texts.
        models: labels of the two models.
        seed: pair i, counted prompt by prompt, has seed + i, as the images of `g2rpo sample`.
        images: pairs per prompt.
        coin: decides the sides.

    Raises:
        ValueError: the two models are the same.
    """
    if models[0] == models[1]:
        raise ValueError(f"both models are {models[0]}; choose two different ones")
    texts = [prompt for prompt in prompts for _ in range(images)]
    pairs = []
    for text, own_seed in zip(texts, image_seeds(seed, len(texts)), strict=True):
        left, right = models if coin.random() < 0.5 else models[::-1]
        pairs.append(Pair(text, own_seed, left, right))
    return tuple(pairs)


@dataclass
class Ballot:
    """The votes of one person on one list of pairs.

    Attributes:
        models: labels of the two models; results are stated for the second.
        pairs: what is voted on, in order.
        settings: steps, guidance and shift of all images.
        names: label -> what the model is on disk, for the CSV.
        voter: a random identifier.
        votes: the votes so far.
    """

    models: tuple[str, str]
    pairs: tuple[Pair, ...]
    settings: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)
    voter: str = field(default_factory=lambda: secrets.token_hex(4))
    votes: list[Vote] = field(default_factory=list)

    @property
    def pair(self) -> Pair | None:
        """The pair to vote on; None: all are done."""
        return self.pairs[len(self.votes)] if len(self.votes) < len(self.pairs) else None

    def vote(self, choice: Any) -> Vote:
        """Records a vote on the present pair.

        Raises:
            ValueError: no such choice, or all pairs are done.
        """
        if choice not in CHOICES:
            raise ValueError(f"no choice {choice!r}; there are: {', '.join(CHOICES)}")
        if self.pair is None:
            raise ValueError("All pairs have a vote")
        vote = Vote(self.pair, choice, datetime.now(UTC).isoformat(timespec="seconds"))
        self.votes.append(vote)
        return vote

    @property
    def result(self) -> WinRate:
        """Win rate of the second model."""
        return result_of(self.votes, self.models[1])

    def csv(self) -> str:
        """Returns the votes as CSV with a header (RFC 4180, UTF-8)."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(COLUMNS)
        name = {label: self.names.get(label, label) for label in self.models}
        for number, vote in enumerate(self.votes, 1):
            pair = vote.pair
            winner = "" if vote.winner is None else name[vote.winner]
            settings = [self.settings.get(key) for key in ("steps", "guidance", "shift")]
            outcome = [name[pair.left], name[pair.right], vote.choice, winner]
            writer.writerow([vote.time, self.voter, number, pair.prompt, pair.seed, *settings, *outcome])
        return text.getvalue()

    def save(self, folder: Path) -> Path:
        """Writes the votes to FOLDER/votes_VOTER.csv; an earlier state is replaced.

        Raises:
            DiskFull: there is no space; an earlier state is unchanged.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"votes_{self.voter}.csv"
        write_atomic(path, self.csv())
        return path


def result_of(votes: Iterable[Vote], model: str) -> WinRate:
    """Returns the win rate of a model, whichever side it was on."""
    winners = [vote.winner for vote in votes]
    ties = winners.count(None)
    wins = winners.count(model)
    return win_rate(wins, len(winners) - wins - ties, ties)
