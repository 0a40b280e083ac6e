"""Health of a run in words: what the checks before the first update measured, and what never changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from g2rpo.report.charts import Series, number


def preflight_rows(record: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the checks of preflight.json that a reader compares: (check, measured, limit)."""
    limits = record.get("limits", {})
    rows = []
    if "ratio_noise" in record:
        rows.append(
            _row(
                "|ratio \N{MINUS SIGN} 1| of update against rollout, before any update",
                record,
                limits,
                "ratio_noise",
            )
        )
    if record.get("clip_range") is not None and "clip_range_over_noise" in limits:
        least = float(limits["clip_range_over_noise"]) * float(record.get("ratio_noise") or 0.0)
        rows.append(("clip range", number(float(record["clip_range"])), f"at least {number(least)}"))
    if "flat_group_share" in record:
        groups = f"groups without reward spread, share of {record.get('num_groups', '?')}"
        rows.append(_row(groups, record, limits, "flat_group_share"))
    for name, reward in record.get("rewards", {}).items():
        spread = ", ".join(
            f"{label} {number(float(reward[key]))}"
            for key, label in (("mean", "mean"), ("spread", "spread within a group"))
            if reward.get(key) is not None
        )
        rows.append((name, spread, ""))
        if reward.get("noise_over_spread") is not None:
            rows.append(
                _row(f"{name}: noise of scoring again, over its spread", reward, limits, "noise_over_spread")
            )
    memory = record.get("memory_gb", {})
    if memory.get("headroom") is not None:
        left = f"{number(float(memory['headroom']), 3)} of {number(float(memory['total']), 3)} GB"
        least = limits.get("headroom_share")
        limit = "" if least is None else f"at least {number(100 * float(least))} %"
        rows.append((f"memory left on {memory.get('device', 'the device')}", left, limit))
    return rows


def _row(title: str, values: Mapping[str, Any], limits: Mapping[str, Any], key: str) -> tuple[str, str, str]:
    value, limit = values[key], limits.get(key)
    measured = "not measured" if value is None else number(float(value))
    return title, measured, "" if limit is None else f"at most {number(float(limit))}"


def is_constant(series: Series) -> bool:
    """Whether a series has one value at all of several points."""
    return len(series.points) > 1 and len({y for _, y, _ in series.points}) == 1


def constant_note(charts: Mapping[str, Sequence[Series]]) -> str:
    """Returns a sentence on charts that are not drawn, because their lines are constant; "" without any."""
    texts = [
        f"{title}: " + ", ".join(number(series.points[0][1]) for series in several)
        for title, several in charts.items()
    ]
    return f"Unchanged during the run: {'; '.join(texts)}." if texts else ""
