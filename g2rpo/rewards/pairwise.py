"""Win rates: a groupwise reward from pairwise comparisons, as in Pref-GRPO (arXiv:2508.20751).

A judge compares two images of a group for their prompt; an image's score is the share of its comparisons that
it wins, a tie counting half. A comparison without a readable answer is left out, never counted as a tie (the
released code of Pref-GRPO counts it as one).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

Judge = Callable[[Tensor, Tensor, str], float | None]
"""Compares two images [3, H, W] in [0, 1] for a prompt: 1 = the first is better, 0 = the second, 0.5 = tie;
None or NaN = no readable answer."""


class PairwiseWinRate:
    """Scores each image of a group by its win rate over the others, in [0, 1].

    Attributes:
        judge: compares two images.
        both_orders: whether each pair is compared twice, with either image first, so that a judge's
            preference for one place cancels; it doubles the number of comparisons.
        last_error: why an image of the last call has no score, or None.
    """

    groupwise = True

    def __init__(self, judge: Judge, *, both_orders: bool = True) -> None:
        self.judge, self.both_orders = judge, both_orders
        self.last_error: str | None = None

    def comparisons(self, n: int) -> int:
        """Returns the number of comparisons among n images."""
        return n * (n - 1) // (1 if self.both_orders else 2)

    def __call__(self, images: Tensor, prompt: str, metadata: dict[str, Any] | None = None) -> Tensor:
        """Scores the images as `GroupReward.__call__` does; NaN for an image without a readable comparison.

        Raises:
            ValueError: an answer of the judge is outside [0, 1].
        """
        outcomes = torch.full((len(images), len(images)), torch.nan)
        for i, j in permutations(range(len(images)), 2):
            if self.both_orders or i < j:
                answer = self.judge(images[i], images[j], prompt)
                outcomes[i, j] = torch.nan if answer is None else answer
        rates = win_rates(outcomes)
        unread = int(rates.isnan().sum())
        self.last_error = f"{unread} of {len(images)} images have no readable comparison" if unread else None
        return rates


def win_rates(outcomes: Tensor) -> Tensor:
    """Returns each image's mean outcome over all comparisons that it was in.

    Args:
        outcomes: [n, n]; entry (i, j) is the result of the comparison with i first and j second, from i's
            point of view: 1 = i wins, 0.5 = tie, 0 = j wins; NaN = not compared, or no readable answer. The
            diagonal is ignored.

    Returns:
        [n], float32, in [0, 1]; NaN for an image without any outcome.

    Raises:
        ValueError: outcomes is not square, or an entry is outside [0, 1].
    """
    if outcomes.ndim != 2 or outcomes.shape[0] != outcomes.shape[1]:
        raise ValueError(f"outcomes must be [n, n], got shape {tuple(outcomes.shape)}")
    results = outcomes.double().clone().fill_diagonal_(math.nan)
    if bool(((results < 0) | (results > 1)).any()):
        raise ValueError("an outcome must be in [0, 1]: 1 = the first wins, 0.5 = tie, 0 = the second wins")
    return torch.cat([results, 1 - results.T], 1).nanmean(1).float()
