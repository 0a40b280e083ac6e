"""Samples that a server did not judge: why, and how often."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failed:
    """No answer. reason: the same words for all of a kind. example: what came instead, if anything."""

    reason: str
    example: str = ""


class Tally:
    """Why samples have no score: counted by reason; each reason is logged when it first comes."""

    def __init__(self, reward: str) -> None:
        self.reward = reward
        self.counts: Counter[str] = Counter()

    def take(self, outcomes: Sequence[Failed | None]) -> str | None:
        """One call's samples, None for each that has a score. Returns what failed in words, or None."""
        failures = [failed for failed in outcomes if failed is not None]
        for failed in failures:
            if not self.counts[failed.reason]:
                LOG.warning(
                    "reward %s: a sample without a score: %s%s. More of the same is counted, not printed",
                    self.reward,
                    failed.reason,
                    f" ({_short(failed.example)})" if failed.example else "",
                )
            self.counts[failed.reason] += 1
        if not failures:
            return None
        parts = [f"{n} x {reason}" for reason, n in Counter(f.reason for f in failures).most_common(3)]
        return f"of {len(outcomes)} samples {', '.join(parts)}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 120 else f"{text[:117]}..."
