"""Lagged policies: how much of the behaviour weights is kept after each iteration.

    behaviour <- d(n) behaviour + (1 - d(n)) current,    n = iterations done, 1 after the first
    d(n) = min(rate max(n - flat, 0), most)

d = 0 is a plain copy of the current weights. DiffusionNFT (arXiv:2509.16117) calls the schedules of LAGS its
types 0, 1 and 2, and counts n in optimizer steps; with one optimizer step per iteration both are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Lag:
    """A schedule of d.

    Attributes:
        most: largest d, in [0, 1).
        rate: increase of d per iteration, > 0.
        flat: iterations during which d is 0.
    """

    most: float
    rate: float = math.inf
    flat: int = 0

    def __call__(self, n: int) -> float:
        """Returns d(n), n >= 0."""
        if self.rate == math.inf:
            return self.most if n >= self.flat else 0.0
        return min(self.rate * max(n - self.flat, 0), self.most)


LAGS = {
    "off": Lag(0.0),
    "linear": Lag(0.5, rate=0.001),
    "delayed": Lag(0.999, rate=0.0075, flat=75),
}
"""Name -> published schedule."""
