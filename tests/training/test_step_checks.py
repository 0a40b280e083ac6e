"""What happens to optimizer steps that are not finite, and which gradients count as spikes."""

import math

import pytest
import torch
from support.gaussian_policy import GaussianPolicy
from test_update import parts_of, rollouts_of

from g2rpo.algorithms.registry import PRESETS
from g2rpo.run.warnings_file import read_warnings
from g2rpo.training.step_checks import (
    GRADIENT,
    LOSS,
    REWARD,
    SPIKE,
    SPIKE_FACTOR,
    SPIKE_HISTORY,
    SPIKE_WINDOW,
    NotFinite,
    StepChecks,
)
from g2rpo.training.update import update


def accepts(checks, loss=0.0, norm=1.0, number=0, num_steps=1):
    return checks.accepts(torch.tensor(loss), torch.tensor(norm), number, num_steps, number)


@pytest.mark.parametrize(
    ("loss", "norm", "what"),
    [
        (math.nan, 1.0, "the loss is nan at optimizer step 2 of 3"),
        (-math.inf, 1.0, "the loss is -inf at"),
        (0.0, math.inf, "the gradient's norm is inf at"),
        (math.nan, math.nan, "the loss is nan and the gradient's norm is nan at"),
    ],
)
def test_what_is_not_finite_stops_the_run_by_default(loss, norm, what):
    with pytest.raises(NotFinite, match=what) as caught:
        accepts(StepChecks(), loss, norm, 1, 3)
    assert caught.value.steps_done == 1


def test_skips_in_a_row_are_limited_and_a_good_step_begins_anew():
    checks = StepChecks("skip", 2)
    for _ in range(3):
        assert not accepts(checks, norm=math.nan) and not accepts(checks, loss=math.nan)
        assert accepts(checks)
    assert checks.counts == {GRADIENT: 3, LOSS: 3}
    assert checks.may_skip("no rewards", REWARD), "rewards count as well"
    assert not accepts(checks, norm=math.nan)
    with pytest.raises(NotFinite, match=r"norm is nan .*, after 2 skipped in a row \(max_skips=2\)"):
        accepts(checks, norm=math.nan)


def test_a_resumed_run_counts_on_from_its_last_complete_iteration():
    checks = StepChecks("skip", 2)
    assert not accepts(checks, norm=math.nan)
    checks.end_iteration()
    assert not accepts(checks, norm=math.nan)  # of an iteration that is cut off
    resumed = StepChecks("skip", 2)
    resumed.load_state_dict(checks.state_dict())
    assert not accepts(resumed, norm=math.nan)
    with pytest.raises(NotFinite, match="after 2 skipped in a row"):
        accepts(resumed, norm=math.nan)
    StepChecks().load_state_dict({})  # of a checkpoint of an earlier version


def test_a_spike_is_reported_with_the_prompts_of_its_step(tmp_path):
    checks, said = StepChecks(), []
    usual = [1.0, 0.5, 2.0, *[1.0] * (SPIKE_HISTORY - 3)]
    for norm in usual[:-1]:
        assert accepts(checks, norm=norm)
    assert accepts(checks, norm=100.0) and not checks.findings, "too few earlier norms"
    checks.begin_iteration(21, ["a red circle", "é"])
    for norm in (0.99 * SPIKE_FACTOR, 1.01 * SPIKE_FACTOR):
        assert accepts(checks, norm=norm), "a spike is reported; the step is taken"
    checks.report(tmp_path, said.append)
    (line,) = read_warnings(tmp_path)
    assert line["step"] == 21 and line["kind"] == SPIKE and line["prompts"] == ["a red circle", "é"]
    assert line["grad_norm"] == pytest.approx(1.01 * SPIKE_FACTOR) and line["median"] == 1
    assert len(said) == 1 and "10 times the median of the last 21 (1)" in said[0], said
    checks.end_iteration()
    assert not checks.findings


def test_the_median_is_that_of_the_same_optimizer_step_in_the_last_iterations():
    checks = StepChecks()
    for _ in range(SPIKE_HISTORY):
        assert accepts(checks, norm=1.0, number=0, num_steps=2)
        assert accepts(checks, norm=100.0, number=1, num_steps=2)
    assert not checks.findings
    resumed = StepChecks()
    checks.end_iteration()
    resumed.load_state_dict(checks.state_dict())
    for one in (checks, resumed):
        accepts(one, norm=100.0, number=0, num_steps=2)
        assert [finding.kind for finding in one.findings] == [SPIKE]
    for _ in range(SPIKE_WINDOW):
        accepts(checks, norm=0.0)
    checks.findings.clear()
    accepts(checks, norm=100.0)
    assert len(checks.findings) == 1, "norms of 0 do not lower the median to 0"


class Breaks(GaussianPolicy):
    """Its velocity has a NaN, or a gradient that is NaN, in the given forwards."""

    def __init__(self, forwards, what):
        super().__init__()
        self.forwards, self.what, self.count = forwards, what, 0

    def velocity(self, x, sigma, cond):
        velocity = super().velocity(x, sigma, cond)
        if torch.is_grad_enabled():
            self.count += 1
            if self.count in self.forwards and self.what == "velocity":
                return velocity * math.nan
            if self.count in self.forwards:
                velocity.register_hook(lambda gradient: gradient * math.nan)
        return velocity


@pytest.mark.parametrize("what", ["velocity", "gradient"])
@pytest.mark.parametrize("broken", [(), (1,), (2,), (1, 2)])
def test_a_skipped_step_changes_nothing_and_does_not_count_in_the_metrics(broken, what):
    algorithm = PRESETS["mix_grpo"](num_steps=10, update="once")
    whole = GaussianPolicy()
    rollouts = rollouts_of(algorithm, whole)
    rows = parts_of(algorithm, rollouts, algorithm.advantages(rollouts, [1.0]))[0]
    parts = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]

    class OneSnapshot(type(algorithm.objective())):
        def snapshot_at(self, optimizer_steps):
            return "never"

    objective = OneSnapshot(algorithm.diffusion, algorithm.eta, algorithm.clip_range)

    def trained(policy, parts, checks=None):
        optimizer = torch.optim.AdamW(policy.module.parameters(), lr=1e-3)
        cond = policy.encode(["0.5", "-0.25"])
        metrics = update(
            policy, objective, parts, cond, optimizer, max_grad_norm=1.0, update_batch=64, checks=checks
        )
        return metrics, next(policy.module.parameters()).item(), optimizer.state_dict()["state"]

    metrics, gain, moments = trained(Breaks(broken, what), parts, StepChecks("skip"))
    kept = [part for number, part in enumerate(parts, 1) if number not in broken]
    kinds = [GRADIENT] if what == "gradient" else [LOSS, GRADIENT]
    counted = {kind: float(len(broken)) for kind in kinds} if broken else {}
    assert {name: value for name, value in metrics.items() if name.startswith("nonfinite")} == counted
    if not kept:
        assert gain == 1 and not moments
        assert math.isnan(metrics["loss"]) and math.isnan(metrics["grad_norm"])
        assert metrics.keys() == {"loss", "grad_norm", *kinds}
        return
    wanted, wanted_gain, wanted_moments = trained(GaussianPolicy(), kept)
    assert {name: metrics[name] for name in wanted} == wanted and gain == wanted_gain
    assert str(moments) == str(wanted_moments)
