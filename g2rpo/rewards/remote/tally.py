"""Failures of remote rewards, counted by reason."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from g2rpo.runtime.secrets import masked
from g2rpo.runtime.text import printable

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """A sample without a score.

    Attributes:
        reason: a text that is equal for all failures of a kind.
        example: the beginning of the unusable answer, if there was one.
    """

    reason: str
    example: str = ""


class Tally:
    """Counts the failures of a reward by reason, and logs the first failure of each reason."""

    def __init__(self, reward: str) -> None:
        self.reward = reward
        self.counts: Counter[str] = Counter()

    def add(self, outcomes: Sequence[float | Failure]) -> str | None:
        """Counts the failures among one call's outcomes.

        Returns:
            A summary of the failures, or None if there are none.
        """
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        for failure in failures:
            if not self.counts[failure.reason]:
                LOG.warning(
                    "reward %s: a sample has no score: %s%s. Further failures of this kind are counted but "
                    "not printed",
                    self.reward,
                    failure.reason,
                    f" ({_short(printable(masked(failure.example)))})" if failure.example else "",
                )
            self.counts[failure.reason] += 1
        if not failures:
            return None
        parts = [f"{n} x {reason}" for reason, n in Counter(f.reason for f in failures).most_common(3)]
        return f"of {len(outcomes)} samples {', '.join(parts)}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 120 else f"{text[:117]}..."
