import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from g2rpo.objectives.advantages import group_advantages, pooled_std
from g2rpo.runtime.random import keyed_generator


def scores(*shape: int, key: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=keyed_generator(key), dtype=torch.float64)


shapes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(2, 12))


def test_by_hand():
    # 1, 2, 3: mean 2, unbiased std 1; biased sqrt(2/3)
    r = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 1, 1, 3)
    assert group_advantages(r).tolist() == [pytest.approx([-1, 0, 1], abs=1e-6)]
    biased = math.sqrt(3 / 2)
    assert group_advantages(r, ddof=0)[0].tolist() == pytest.approx([-biased, 0, biased])
    assert group_advantages(r, std=torch.tensor([4.0]))[0].tolist() == pytest.approx([-0.25, 0, 0.25])
    assert group_advantages(r, torch.tensor([2.0]), clip=1.5)[0].tolist() == pytest.approx([-1.5, 0, 1.5])
    # two rewards with opposite order cancel, weights decide
    both = torch.cat([r, -10 * r])
    assert group_advantages(both).abs().max() < 1e-6
    assert group_advantages(both, torch.tensor([1.0, 0.5]))[0].tolist() == pytest.approx(
        [-0.5, 0, 0.5], abs=1e-6
    )
    # two granularities add up
    assert group_advantages(r.repeat(1, 1, 2, 1))[0].tolist() == pytest.approx([-2, 0, 2], abs=1e-6)


@settings(deadline=None)
@given(shape=shapes, key=st.integers(0, 10_000), scale=st.floats(1e-3, 1e3), offset=st.floats(-10, 10))
def test_scale_and_offset_of_a_reward_drop_out(shape, key, scale, offset):
    r = scores(*shape, key=key)
    weights = torch.arange(1, shape[0] + 1, dtype=torch.float64)
    # spreads that rounding or eps could touch are another test's matter
    assume((r.amax(-1) - r.amin(-1)).min() > 0.1 and scale * 0.1 > 1e-4 * abs(offset))
    changed = r.clone()
    changed[0] = changed[0] * scale + offset
    torch.testing.assert_close(
        group_advantages(changed, weights, eps=0.0),
        group_advantages(r, weights, eps=0.0),
        rtol=1e-6,
        atol=1e-6,
    )


@settings(deadline=None)
@given(shape=shapes, key=st.integers(0, 10_000), invalid=st.floats(0, 0.6))
def test_rows_sum_to_zero_before_clipping(shape, key, invalid):
    r = scores(*shape, key=key)
    valid = torch.rand(shape[1], shape[3], generator=keyed_generator(key, "valid")) >= invalid
    advantages = group_advantages(r, clip=None, valid=valid)
    assert advantages.shape == (shape[1], shape[3])
    torch.testing.assert_close(
        advantages.sum(-1), torch.zeros(shape[1], dtype=torch.float64), atol=1e-9, rtol=0
    )
    assert not advantages[~valid].any()
    assert not advantages[valid.sum(-1) < 2].any()
    assert (group_advantages(r, clip=0.5, valid=valid).abs() <= 0.5).all()


@settings(deadline=None)
@given(shape=shapes, key=st.integers(0, 10_000), data=st.data())
def test_an_invalid_member_is_as_if_it_were_not_there(shape, key, data):
    r = scores(*shape, key=key)
    _, num_steps, _, group_size = shape
    member, step = data.draw(st.integers(0, group_size - 1)), data.draw(st.integers(0, num_steps - 1))
    others = [g for g in range(group_size) if g != member]
    alone = group_advantages(r[..., others])
    spoiled = r.clone()
    spoiled[-1, step, 0, member] = torch.nan  # one cell makes the member's whole step invalid
    given_nan = group_advantages(spoiled)
    valid = torch.ones(num_steps, group_size, dtype=torch.bool)
    valid[step, member] = False
    torch.testing.assert_close(given_nan, group_advantages(r, valid=valid))
    assert given_nan.isfinite().all() and given_nan[step, member] == 0
    torch.testing.assert_close(
        given_nan[step, others], alone[step] if group_size > 2 else torch.zeros(1).double()
    )
    for other in set(range(num_steps)) - {step}:
        torch.testing.assert_close(given_nan[other], group_advantages(r)[other])


@settings(deadline=None)
@given(value=st.floats(-1e4, 1e4, width=32), group_size=st.integers(2, 12), units=st.integers(0, 1))
def test_a_spread_of_one_rounding_unit_is_none(value, group_size, units):
    r = torch.full((1, 2, 2, group_size), value)
    assume(not units or abs(value) > 1e-30)  # next to 0 the units themselves vanish
    if units:
        r[..., 0] = torch.nextafter(r[..., 0], torch.tensor(torch.inf))
    assert not group_advantages(r).any()
    assert not group_advantages(r.double()).any()
    assert not group_advantages(r, std=torch.tensor([1e-9])).any()


def test_a_small_but_real_spread_counts():
    r = torch.tensor([0.3, 0.3 + 3e-6, 0.3 - 3e-6]).reshape(1, 1, 1, 3)  # ten times 8 units of 0.3
    assert group_advantages(r).abs().max() > 0.9


def test_one_counted_member_is_no_group():
    r = torch.tensor([1.0, 2.0]).reshape(1, 1, 1, 2)
    assert not group_advantages(r, trim=0.5).any()  # the lower one is trimmed, one is left
    assert not group_advantages(r, valid=torch.tensor([[True, False]])).any()


def test_rewards_of_one_image_broadcast_over_steps():
    r = scores(2, 1, 1, 5)
    valid = torch.ones(3, 5, dtype=torch.bool)
    assert torch.equal(group_advantages(r, valid=valid), group_advantages(r).expand(3, 5))
    valid[1, 2] = False
    assert group_advantages(r, valid=valid)[1, 2] == 0
    assert torch.equal(group_advantages(r, valid=valid)[0], group_advantages(r)[0])


def test_dtypes():
    r = scores(1, 1, 1, 4)
    assert group_advantages(r).dtype == torch.float64
    assert group_advantages(r.float()).dtype == group_advantages(r.half()).dtype == torch.float32


def test_pooled_std():
    # biased over both groups: 1, 2, 3, 6 has mean 3 and mean square deviation 14/4; the NaN is left out
    r = torch.tensor([[1.0, 2.0, 3.0, 6.0, torch.nan], [4.0] * 5]).reshape(2, 1, 1, 5)
    assert pooled_std(r).tolist() == pytest.approx([math.sqrt(3.5), 0])
    assert pooled_std(r, ddof=1).tolist() == pytest.approx([math.sqrt(14 / 3), 0])


@pytest.mark.parametrize(
    "call",
    [
        lambda r: group_advantages(r[0]),
        lambda r: group_advantages(r, torch.ones(3)),
        lambda r: group_advantages(r, std=torch.ones(1)),
        lambda r: group_advantages(r, trim=1.0),
    ],
)
def test_errors(call):
    with pytest.raises(ValueError, match=r"must be|in \[0, 1\)"):
        call(scores(2, 1, 1, 4))
