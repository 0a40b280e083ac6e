"""DiffusionNFT against its own code: loss, gradient, advantages, r and lag schedules (files i1, i2, i3)."""

from types import SimpleNamespace

import pytest
import torch
from support.golden_files import DTYPES, assert_close, cases, tensor

from g2rpo.objectives.advantages import advantages_of
from g2rpo.objectives.lag import LAGS, Lag
from g2rpo.objectives.nft import NftObjective, NftRows, optimality
from g2rpo.training.ema import follow

VALUES = {torch.float32: 1e-5, torch.float64: 1e-9}
GRADIENTS = {torch.float32: 1e-4, torch.float64: 1e-9}
MODES = ("all", "positive_only", "negative_only", "one_only", "binary")


def rows_of(inputs, result, dtype):
    given = {name: tensor(value, dtype) for name, value in inputs.items()}
    t = given["timestep"] / 1000
    time, index = t[:, None, None, None], torch.arange(len(t))
    x = (1 - time) * given["x0"] + time * given["noise"]
    r = optimality(given["advantages"], result["adv_clip_max"], result["adv_mode"])
    flat = {name: value.flatten(2) for name, value in given.items() if value.ndim == 4}  # [7, 2, 16]
    ones = torch.ones(len(t), dtype=dtype)
    rows = NftRows(x.flatten(2), t, index, index, index, flat["x0"], r, ones, index)
    return rows, flat


@pytest.mark.parametrize("case", cases("i1_nft_loss"), ids=lambda c: c["kind"])
def test_loss_and_gradient(case):
    for result in case["results"]:
        dtype = DTYPES[result["dtype"]]
        rows, given = rows_of(case["inputs"], result, dtype)
        options = {"beta": result["beta"], "clip": result["adv_clip_max"], "kl_beta": result["kl_beta"]}
        objective = NftObjective(tuple(range(7)), 6, LAGS["off"], **options)
        v = given["v"].clone().requires_grad_()
        loss = objective.loss(rows, v, reference=given["v_ref"], behaviour=given["v_old"])
        loss.value.backward()

        def wanted(name, result=result, dtype=dtype):
            return torch.tensor(result[name], dtype=dtype)

        assert_close(rows.optimality, wanted("r"), VALUES[dtype])
        assert_close(loss.mean["policy_loss"], wanted("policy_loss"), VALUES[dtype])
        assert_close(loss.value.detach(), wanted("loss"), VALUES[dtype])
        if result["kl_beta"]:
            assert_close(loss.mean["kl"], wanted("kl"), VALUES[dtype])
        else:
            assert "kl" not in loss.mean
        expected = tensor(result["grad_v"], dtype, tuple(v.shape))
        assert_close(v.grad, expected, GRADIENTS[dtype])
        # relative to the gradient itself, too: gradients are about 1e-2, and 1e-4 (1 + |x|) would hide much
        assert (v.grad - expected).abs().max() <= GRADIENTS[dtype] * 10 * expected.abs().max()
        assert loss.mean["optimality"] == rows.optimality.mean()


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_at_the_behaviours_velocity_the_gradient_is_the_known_one(beta):
    """-2 C t (2r - 1) / (B N w) (x_t - t v - x0), whatever beta; r = 1/2 gives none."""
    case = next(case for case in cases("i1_nft_loss") if case["kind"] == "on-policy")
    result = next(r for r in case["results"] if r["dtype"] == "float64")
    rows, given = rows_of(case["inputs"], result, torch.float64)
    v = given["v"].clone().requires_grad_()
    clip = result["adv_clip_max"]
    objective = NftObjective(tuple(range(7)), 6, LAGS["off"], beta=beta, clip=clip)
    objective.loss(rows, v, behaviour=given["v"]).value.backward()
    t = rows.sigma[:, None, None]
    off = rows.x - t * given["v"] - rows.clean
    weight = off.abs().mean((1, 2), keepdim=True).clamp(min=1e-5)
    count = rows.x.numel()  # B N
    known = -2 * clip * t * (2 * rows.optimality[:, None, None] - 1) / (count * weight) * off
    torch.testing.assert_close(v.grad, known, rtol=1e-10, atol=1e-14)
    average = rows.optimality == 0.5
    assert average.any() and not v.grad[average].any() and v.grad[~average].abs().min() > 0


def test_a_row_that_does_not_count_gives_no_gradient():
    case = cases("i1_nft_loss")[0]
    rows, given = rows_of(case["inputs"], case["results"][5], torch.float64)
    some = NftRows(*(getattr(rows, name) for name in ("x", "sigma", "cond_row", "group", "member", "clean")),
                   rows.optimality, torch.tensor([1.0, 0, 1, 1, 1, 0, 1]), rows.level)  # fmt: skip
    objective = NftObjective(tuple(range(7)), 6, LAGS["off"], kl_beta=0.1)
    v = given["v"].clone().requires_grad_()
    objective.loss(some, v, reference=given["v_ref"], behaviour=given["v_old"]).value.backward()
    moved = v.grad.abs().amax((1, 2)) > 0
    assert moved.tolist() == [True, False, True, True, True, False, True]


@pytest.mark.parametrize("case", cases("i2_nft_advantages"), ids=lambda c: c["kind"])
def test_advantages_and_optimality(case):
    rewards = tensor(case["inputs"]["rewards"], torch.float64)
    group = torch.tensor(case["inputs"]["group"])
    members = [(group == g).nonzero().flatten() for g in group.unique()]
    checked = 0
    for result in case["results"]:
        if "project" in result:  # verl-omni divides by n - 1
            continue
        rollouts = [
            SimpleNamespace(rewards=rewards[m][None, None, None], valid=torch.ones(1, len(m)).bool())
            for m in members
        ]
        if result["global_std"]:  # groups of different sizes: NaN fills up, and counts as invalid
            most = max(map(len, members))
            for rollout in rollouts:
                missing = most - rollout.rewards.shape[-1]
                rollout.rewards = torch.nn.functional.pad(rollout.rewards, (0, missing), value=torch.nan)
                rollout.valid = rollout.rewards[0, 0].isfinite()
        std = "batch" if result["global_std"] else "group"
        per_group = advantages_of(rollouts, [1.0], clip=None, std=std, eps=1e-4, ddof=0)
        given = torch.zeros_like(rewards)
        for m, advantages in zip(members, per_group, strict=True):
            given[m] = advantages[0, : len(m)]
        assert_close(given, tensor(result["advantages"], torch.float64), 1e-9)
        for mode in MODES:
            wanted = tensor(result[f"r_{mode}_clip5"], torch.float64)
            assert_close(optimality(given, 5.0, mode), wanted, 1e-9)
        checked += 1
    assert checked == 2


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="use one of all, positive_only"):
        optimality(torch.zeros(2), 5.0, "none")


OURS = {
    "lagged policy, decay_type 0": LAGS["off"],
    "lagged policy, decay_type 1": LAGS["linear"],
    "lagged policy, decay_type 2": LAGS["delayed"],
    "linear_to_0_5": LAGS["linear"],
    "delayed_linear_to_0_999": LAGS["delayed"],
    "constant": Lag(0.9),
    "piecewise_linear": Lag(0.5, 0.001, 0),
    "warmup": Lag(0.999, 0.0075, 75),
    "ema_ref": Lag(0.3, 0.001),
}


def test_lag_schedules():
    found = [case for case in cases("i3_policy_lag") if case["schedule"] in OURS and "decay" in case]
    assert {case["schedule"] for case in found} == set(OURS)
    for case in found:
        given = [OURS[case["schedule"]](n) for n in case["steps"]]
        assert given == pytest.approx(case["decay"], abs=1e-12), case["schedule"]


@pytest.mark.parametrize(("kind", "lag"), [("1", "linear"), ("2", "delayed")])
def test_a_lagged_policy_follows_the_current_one(kind, lag):
    traces = [case for case in cases("i3_policy_lag") if "lagged" in case]
    case = next(case for case in traces if case["schedule"].endswith(f"decay_type {kind}"))
    lagged = {"w": torch.tensor(case["initial"], dtype=torch.float64)}
    for n, current, wanted in zip(case["steps"], case["current"], case["lagged"], strict=True):
        follow(lagged, {"w": torch.tensor(current, dtype=torch.float64)}, LAGS[lag](n))
        torch.testing.assert_close(lagged["w"], torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)


def test_a_copy_without_lag_is_exact():
    current, copies = {"w": torch.rand(1000)}, {"w": torch.rand(1000)}
    follow(copies, current, LAGS["off"](3))
    assert torch.equal(copies["w"], current["w"])
