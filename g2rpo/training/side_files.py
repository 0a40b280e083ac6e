"""Writes records of the untrained model again that were damaged or lost since a run began.

The scores before training are read at every evaluation and at the end of a run. They can be made again only
while the policy has its first weights, which is before the checkpoint of a resumed run is loaded.
"""

from __future__ import annotations

from pathlib import Path

from g2rpo.evaluation.before_after import Comparison
from g2rpo.evaluation.monitor import EvaluationPlan, Evaluator, first_evaluation_problem
from g2rpo.run.folder import read_state
from g2rpo.runtime.processes import gathered, rank


def rebuild_untrained(
    out: Path, checkpoint: Path | None, comparison: Comparison, plan: EvaluationPlan, evaluator: Evaluator
) -> list[str]:
    """Evaluates and draws with the untrained model again where its records are damaged.

    Every process must call this.

    Args:
        out: run folder.
        checkpoint: the checkpoint that will be resumed; None, or one of iteration 0: the run makes the
            records itself.
        comparison, plan: what the run compares and evaluates.
        evaluator: of the policy with the weights with which the run began.

    Returns:
        A note per record that was written again.
    """
    if checkpoint is None or read_state(checkpoint)["iteration"] == 0:
        return []
    problems = (
        (first_evaluation_problem(out) if plan.evaluated is not None else "", comparison.problem(out))
        if rank() == 0
        else ("", "")
    )
    evaluation, images = gathered(problems)[0]
    if evaluation and plan.evaluated is not None:
        evaluator.evaluate(plan.evaluated, out, 0)
    if images:
        comparison.draw_before(evaluator, out)
    return [
        f"{problem}; it was written again with the untrained model"
        for problem in (evaluation, images)
        if problem
    ]
