"""Checks of an optimizer step after its backward and before it is taken: finite numbers, and gradient spikes.

    not finite   the loss on any process, or the norm of the gradient: all processes learn of it, and together
                 they stop the run or skip the step (setting `on_nonfinite`). At most `max_skips` steps in a
                 row are skipped, because weights or rewards that stay broken do not train.
    spike        the norm of the gradient before clipping is more than SPIKE_FACTOR times the median of those
                 of the same optimizer step of earlier iterations. It is reported, and the step is taken.

The state (steps skipped in a row, earlier norms) is kept in the checkpoints, so a resumed run finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from g2rpo.run.warnings_file import WARNINGS, append_warning
from g2rpo.runtime.processes import gathered

SPIKE_FACTOR = 10.0
"""A norm above so many medians is a spike. The largest of 333 recorded runs of the embedded model is 4.3."""

SPIKE_WINDOW = 50
"""Number of earlier norms, of the same optimizer step of an iteration, whose median is compared."""

SPIKE_HISTORY = 20
"""Number of earlier norms without which there is no median to compare."""

LOSS, GRADIENT, REWARD = "nonfinite_loss", "nonfinite_grad", "nonfinite_reward"
SPIKE = "gradient_spike"


class NotFinite(RuntimeError):
    """A loss or gradient is not finite, and the run stops; that optimizer step was not taken.

    Attributes:
        steps_done: optimizer steps of this update that were taken before. 0: the weights are as they were.
    """

    def __init__(self, what: str, steps_done: int) -> None:
        super().__init__(what)
        self.steps_done = steps_done


@dataclass(frozen=True)
class Finding:
    """What was found at an optimizer step.

    Attributes:
        kind: LOSS, GRADIENT, REWARD or SPIKE.
        message: one sentence about it.
        details: further plain values.
    """

    kind: str
    message: str
    details: Mapping[str, Any] = field(default_factory=dict)


class StepChecks:
    """Decides about each optimizer step, equally on all processes, and collects what was found.

    Attributes:
        findings: of the current iteration.
    """

    def __init__(self, on_nonfinite: str = "stop", max_skips: int = 10) -> None:
        """Starts without history.

        Args:
            on_nonfinite: "stop" or "skip".
            max_skips: number of steps in a row that may be skipped.
        """
        self.findings: list[Finding] = []
        self._skips, self._max_skips = on_nonfinite == "skip", max_skips
        self._skipped = 0  # in a row
        self._norms: list[list[float]] = []  # by number of the optimizer step in its iteration
        self._counts: dict[str, int] = {}
        self._iteration, self._prompts = 0, list[str]()
        self.end_iteration()

    def begin_iteration(self, iteration: int, prompts: Sequence[str]) -> None:
        """Begins an iteration, counted from 1, that trains on these prompts of all processes."""
        self._iteration, self._prompts = iteration, list(prompts)

    def accepts(self, loss: Tensor, norm: Tensor, number: int, num_steps: int, steps_done: int) -> bool:
        """Returns whether an optimizer step is taken; every process must call this.

        Args:
            loss: the loss of the step on this process, a scalar.
            norm: the norm of the gradient before clipping, a scalar.
            number: index of the optimizer step in its iteration.
            num_steps: optimizer steps of the iteration.
            steps_done: number of them that were taken.

        Raises:
            NotFinite: on every process, if a number is not finite and the step is not to be skipped.
        """
        own = torch.stack([loss.detach().double(), norm.detach().double()]).tolist()
        losses, norms = zip(*gathered(own), strict=True)
        broken = {LOSS: _not_finite(losses), GRADIENT: _not_finite(norms)}
        if all(value is None for value in broken.values()):
            self._skipped = 0
            self._check_spike(norms[0], number, num_steps)
            return True
        place = f"at optimizer step {number + 1} of {num_steps}"
        names = {LOSS: "the loss is", GRADIENT: "the gradient's norm is"}
        what = " and ".join(f"{names[kind]} {value}" for kind, value in broken.items() if value is not None)
        kinds = [kind for kind, value in broken.items() if value is not None]
        if not self.may_skip(f"{what} {place}", *kinds):
            raise NotFinite(f"{what} {place}{self._limit()}", steps_done)
        return False

    def may_skip(self, what: str, *kinds: str) -> bool:
        """Counts something that is not finite; returns whether it is skipped instead of ending the run.

        Every process must call this for the same reason.
        """
        self._skipped += 1
        for kind in kinds:
            self._counts[kind] = self._counts.get(kind, 0) + 1
        skipped = self._skips and self._skipped <= self._max_skips
        outcome = "skipped" if skipped else f"the run stops{self._limit()}"
        self.findings.append(Finding(kinds[0], f"{what}; {outcome}", {"in_a_row": self._skipped}))
        return skipped

    @property
    def counts(self) -> dict[str, float]:
        """Metrics of the current iteration: how often each kind was not finite; only those that occurred.

        Scores that are not finite are counted one by one with the rewards (objectives/stats.py).
        """
        return {kind: float(n) for kind, n in self._counts.items() if kind != REWARD}

    def report(self, out: Path, say: Callable[[str], None]) -> None:
        """Prints the findings of the iteration and appends them, with its prompts, to RUN/warnings.jsonl."""
        for finding in self.findings:
            say(f"warning: iteration {self._iteration}: {finding.message}; see {out / WARNINGS}")
            details = {**finding.details, "prompts": self._prompts}
            append_warning(out, self._iteration, finding.kind, finding.message, **details)

    def end_iteration(self) -> None:
        """Ends an iteration: its findings were reported, and its state is what `state_dict` returns."""
        self.findings, self._counts = [], {}
        self._state = {"skipped": self._skipped, "norms": [list(norms) for norms in self._norms]}

    def state_dict(self) -> dict[str, Any]:
        """The state after the last completed iteration as JSON values, for a checkpoint."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `state_dict`; checkpoints of earlier versions have none, {}."""
        self._skipped = state.get("skipped", 0)
        self._norms = [list(norms) for norms in state.get("norms", [])]
        self.end_iteration()

    def _limit(self) -> str:
        if not self._skips:
            return ""
        return f", after {self._skipped - 1} skipped in a row (max_skips={self._max_skips})"

    def _check_spike(self, norm: float, number: int, num_steps: int) -> None:
        self._norms += [[] for _ in range(number + 1 - len(self._norms))]
        earlier = self._norms[number]
        if len(earlier) >= SPIKE_HISTORY and norm > SPIKE_FACTOR * (usual := median(earlier)):
            message = (
                f"the gradient's norm is {norm:.3g} at optimizer step {number + 1} of {num_steps}, "
                f"{norm / usual:.0f} times the median of the last {len(earlier)} ({usual:.3g})"
            )
            details = {"grad_norm": norm, "median": usual, "optimizer_step": number + 1}
            self.findings.append(Finding(SPIKE, message, details))
        if norm > 0:  # groups without reward spread give a gradient of 0, which says nothing about others
            self._norms[number] = [*earlier, norm][-SPIKE_WINDOW:]


def _not_finite(values: tuple[float, ...]) -> float | None:
    """The first value that is not finite, or None."""
    return next((value for value in values if not math.isfinite(value)), None)
