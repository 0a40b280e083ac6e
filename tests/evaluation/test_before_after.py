"""Changes between the images before and after training, and their table."""

import math
import warnings

import pytest
import torch

from g2rpo.evaluation.before_after import changes_of, markdown

NAN = math.nan


@pytest.mark.parametrize(
    "before, after, num, row",
    [
        # Differences 0.3 and 0.1: mean 0.2, SE 0.1414 / sqrt(2) = 0.1. Standard deviation before: 0.1414.
        ([0.2, 0.4], [0.5, 0.5], 2, "| 0.3000 | 0.5000 | +0.2000 ± 0.1000 | +1.41 |"),
        ([0.2, NAN], [0.5, 0.5], 1, "| 0.2000 | 0.5000 | +0.3000 ± – | – |"),
        ([NAN, 0.4], [0.5, NAN], 0, "| – | – | – ± – | – |"),  # no image has both scores
    ],
)
def test_missing_scores_are_dashes_and_no_warnings(before, after, num, row):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (change,) = changes_of("own", {"clip": torch.tensor(before)}, {"clip": torch.tensor(after)}, ["clip"])
    assert change.num == num
    assert markdown([change]).splitlines()[-1] == f"| own | **clip** (trained) | {num} {row}"
