"""Acceptance checks: what was measured, what is expected and by which source, and whether it holds.

level    |ours - printed| <= half a unit of the last printed digit + c sqrt(se_ours^2 + se_printed^2)
reach    ours >= printed - the same; the trained model may be better
rise     the paired gain over the base is at least c of its standard errors
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from g2rpo.evaluation.stats import Mean
from g2rpo.reproduction.criteria import digits_error

Status = Literal["PASS", "FAIL", "NOT APPLICABLE"]


@dataclass(frozen=True)
class Check:
    """One acceptance check.

    Attributes:
        name: what is checked.
        measured: what was measured, as text.
        expected: what is expected, as text.
        source: where the expectation is from.
        status: "PASS", "FAIL" or "NOT APPLICABLE".
        remark: why it is not applicable, or what to do after a failure.
    """

    name: str
    measured: str
    expected: str
    source: str
    status: Status
    remark: str = ""

    def __str__(self) -> str:
        remark = f" ({self.remark})" if self.remark else ""
        return f"{self.status}: {self.name}: {self.measured}; expected: {self.expected}{remark}"


def check(name: str, holds: bool, measured: str, expected: str, source: str, remedy: str = "") -> Check:
    """A check that passes if `holds`; `remedy` is shown if it does not."""
    return Check(name, measured, expected, source, "PASS" if holds else "FAIL", "" if holds else remedy)


def not_applicable(name: str, expected: str, source: str, reason: str) -> Check:
    """A check that cannot be made here."""
    return Check(name, "not measured", expected, source, "NOT APPLICABLE", reason)


def failed(checks: Iterable[Check]) -> list[Check]:
    """Those checks that failed."""
    return [one for one in checks if one.status == "FAIL"]


def tolerance(mean: Mean, value: Decimal, error: Decimal | None, num_errors: float) -> float:
    """By how much a mean may differ from a printed one; NaN for a mean without standard error."""
    printed = mean.standard_error if error is None else float(error)
    return digits_error(value) + num_errors * math.hypot(mean.standard_error, printed)


def mean_text(mean: Mean, sign: str = "") -> str:
    """A mean with its standard error and the number of prompts."""
    if not math.isfinite(mean.mean):
        return "no finite score"
    invalid = f", {mean.invalid} images without a score" if mean.invalid else ""
    return f"{mean.mean:{sign}.4f} ± {mean.standard_error:.4f} (n={mean.prompts}{invalid})"


def level_check(
    name: str, mean: Mean, value: Decimal, error: Decimal | None, num_errors: float, source: str
) -> Check:
    """Whether a mean agrees with a printed one, in both directions."""
    allowed = tolerance(mean, value, error, num_errors)
    holds = abs(mean.mean - float(value)) <= allowed  # False for NaN
    remedy = "compare conditions, reward weights and prompts with the source before training"
    return check(name, holds, mean_text(mean), f"{value} ± {allowed:.4f}", source, remedy)


def reach_check(
    name: str,
    mean: Mean,
    value: Decimal,
    error: Decimal | None,
    num_errors: float,
    source: str,
    sign: str = "",
) -> Check:
    """Whether a mean is at least a printed one, less the tolerance."""
    allowed = tolerance(mean, value, error, num_errors)
    holds = mean.mean >= float(value) - allowed
    expected = f"at least {float(value) - allowed:{sign}.4f} ({value:{sign}} - {allowed:.4f})"
    return check(name, holds, mean_text(mean, sign), expected, source, "the published value is not reached")


def rise_check(name: str, gain: Mean, num_errors: float, source: str, *, must_rise: bool = True) -> Check:
    """Whether a paired gain is at least `num_errors` standard errors, or else not that much below 0."""
    limit = num_errors * gain.standard_error
    if must_rise:
        holds, expected = gain.mean >= limit and gain.mean > 0, f"at least +{limit:.4f} ({num_errors:g} SE)"
    else:
        holds, expected = (
            gain.mean > -limit or gain.mean >= 0,
            f"above -{limit:.4f} (no fall by {num_errors:g} SE)",
        )
    remedy = "look at the run's report: health, groups and warnings"
    return check(name, holds, mean_text(gain, "+"), expected, source, remedy)
