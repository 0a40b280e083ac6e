"""What a comparison shows, in a sentence: evaluations at equal cost, differences paired by seed, intervals.

Equal cost is that of `COST`, forwards + update: the largest that all runs with the metric reached. A
difference is called clear if its 95 % interval over seeds (Student's) does not contain 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from g2rpo.comparison.curves import COST, Stat, common_end, paired, stat
from g2rpo.comparison.tables import (
    NOTHING,
    Compared,
    Table,
    amount,
    differing_evaluations,
    format_stat,
    title_of,
)
from g2rpo.evaluation.stats import student_interval

NAMED = 3
"""Up to this number of other arms, the verdict gives each one's difference; of more, their names."""
LISTED = 5
"""More arms than this are counted instead of named."""


@dataclass(frozen=True)
class Gap:
    """Difference of two arms at equal cost, paired by seed.

    Attributes:
        difference: mean over the common seeds, with its standard error.
        low, high: 95 % interval, NaN for fewer than two common seeds.
    """

    difference: Stat
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    def interval(self) -> str:
        """The interval as text; a dash if there is none."""
        return f"[{self.low:+.4f}, {self.high:+.4f}]" if math.isfinite(self.low) else NOTHING

    def result(self) -> str:
        """The result in words."""
        if not self.difference.n:
            return "no common seed"
        if self.difference.n == 1:
            return "one common seed: no interval"
        if not math.isfinite(self.difference.mean):
            return "no value at this cost"
        return ("higher" if self.low > 0 else "lower") if self.is_clear else "no clear difference"


def at_equal_cost(compared: Compared, metric: str) -> tuple[float, dict[str, dict[int, float]]]:
    """The common cost, and arm -> seed -> the value there (NaN where it was not measured so early)."""
    curves = compared.curves(metric)
    end = common_end([list(runs.values()) for runs in curves.values()], COST)
    values = {arm: {seed: c.at(COST, end) for seed, c in runs.items()} for arm, runs in curves.items()}
    return end, values


def gap(values: Mapping[int, float], others: Mapping[int, float]) -> Gap:
    """Computes the difference of two arms, seed -> value each."""
    difference = paired(values, others)
    return Gap(difference, *student_interval(difference.mean, difference.se, difference.n))


def difference_table(compared: Compared, metric: str) -> Table:
    """Makes the table of values at equal cost, with the differences to the first arm and their intervals."""
    end, values = at_equal_cost(compared, metric)
    first = next(iter(compared.arms))
    rows = []
    for arm in compared.arms:
        if arm not in values:
            rows.append([arm, "0", "not measured", *[NOTHING] * 3])
            continue
        cells = [arm, str(len(values[arm])), format_stat(stat(list(values[arm].values())))]
        if arm == first:
            rows.append([*cells, *[NOTHING] * 3])
            continue
        found = gap(values[arm], values.get(first, {}))
        rows.append([*cells, format_stat(found.difference, "+"), found.interval(), found.result()])
    heads = ["arm", "seeds", f"at {amount(COST, end)}", f"− {first}", "95 % interval", "result"]
    return Table(f"{title_of(metric)}, at equal cost", heads, rows)


def verdict(compared: Compared) -> str:
    """Says which arm is best by evaluations: of a trained reward and of a held-out one, if there are both."""
    metrics = [name for name in compared.metrics() if name.startswith("eval/")]
    if not metrics:
        return (
            "No verdict: no run was evaluated, and training rewards do not compare methods. Train with "
            "eval_every=N and eval_prompts=FILE, or use g2rpo evaluate on the finished runs."
        )
    if differ := differing_evaluations(compared):
        return f"No verdict: the arms were evaluated in different ways ({', '.join(differ)})."
    trained = {name for arm in compared.settings.values() for name in arm.get("rewards", {})}
    groups = {
        "trained": [name for name in metrics if name.removeprefix("eval/") in trained],
        "held out": [name for name in metrics if name.removeprefix("eval/") not in trained],
    }
    chosen = {kind: names[0] for kind, names in groups.items() if names}
    costs = {metric: amount(COST, at_equal_cost(compared, metric)[0]) for metric in chosen.values()}
    sentences = [_sentence(compared, metric, kind) for kind, metric in chosen.items()]
    # Runs of an older version of a recipe may lack a metric, and the others then go further.
    if len(set(costs.values())) > 1:
        sentences = [f"At {costs[m]}, {text}" for m, text in zip(costs, sentences, strict=True)]
        return f"At equal cost: {' '.join(sentences)}"
    return f"At equal cost ({costs[next(iter(costs))]}): {' '.join(sentences)}"


def _sentence(compared: Compared, metric: str, kind: str) -> str:
    _, values = at_equal_cost(compared, metric)
    means = {arm: stat(list(of_arm.values())).mean for arm, of_arm in values.items()}
    means = {arm: mean for arm, mean in means.items() if math.isfinite(mean)}
    name = f"{metric.removeprefix('eval/')} ({kind})"
    if not means:
        return f"no arm has a value of {name} at this cost."
    leader = max(means, key=lambda arm: means[arm])
    gaps = {arm: gap(values[leader], values[arm]) for arm in means if arm != leader}
    unmeasured = [arm for arm in compared.arms if arm not in means]
    missing = f" Not measured: {', '.join(unmeasured)}." if unmeasured else ""
    if not gaps:
        return f"{name} of {leader} is {means[leader]:.4f}.{missing}"
    clear = [arm for arm, found in gaps.items() if found.is_clear]
    unclear = [arm for arm in gaps if arm not in clear]
    parts = []
    for words, arms in (("clearly above", clear), ("not clearly above", unclear)):
        if arms:
            named = [_named(arm, gaps[arm]) if len(gaps) <= NAMED else arm for arm in arms]
            parts.append(f"{words} {_listed(named)}")
    return f"{name} is highest for {leader} with {means[leader]:.4f}, {'; '.join(parts)}.{missing}"


def _named(arm: str, found: Gap) -> str:
    if not found.difference.n:
        return f"{arm} (no common seed)"
    interval = "one common seed" if found.difference.n == 1 else found.interval()
    return f"{arm} ({found.difference.mean:+.4f}, {interval})"


def _listed(names: list[str]) -> str:
    """`a, b and c`; more than `LISTED` names are counted."""
    if len(names) > LISTED:
        return f"{len(names)} others"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
