import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from g2rpo.flow.schedule import TAIL_RULES, compressed_sigmas, resolution_shift, shifted_sigmas, tail


def test_shifted_sigmas():
    # 3 t / (1 + 2 t) at t = 1, 1/2, 0
    assert shifted_sigmas(2, shift=3.0).tolist() == pytest.approx([1.0, 0.75, 0.0])
    assert shifted_sigmas(4, shift=1.0).tolist() == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert shifted_sigmas(4, dtype=torch.float64).dtype == torch.float64


def test_sigmas_stretched_to_a_terminal_one():
    # Even sigmas 1, 2/3, 1/3; (1 - 0.1) / (1 - 1/3) = 1.35; 1 - 1.35 / 3 = 0.55 and 1 - 1.35 * 2/3 = 0.1
    assert shifted_sigmas(3, (1.0, 0.1)).tolist() == pytest.approx([1.0, 0.55, 0.1, 0.0])
    assert shifted_sigmas(1, [3.0, 0.1]).tolist() == [1.0, 0.0]
    for terminal in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match="terminal sigma between 0 and 1"):
            shifted_sigmas(3, (1.0, terminal))


@settings(deadline=None)
@given(num_steps=st.integers(1, 200), shift=st.floats(0.1, 20))
def test_sigmas_fall_from_one_to_zero(num_steps, shift):
    sigmas = shifted_sigmas(num_steps, shift)
    assert len(sigmas) == num_steps + 1
    assert sigmas[0] == 1 and sigmas[-1] == 0
    assert (sigmas[1:] < sigmas[:-1]).all()


def test_resolution_shift_by_hand():
    # mu = 0.5 + (1.15 - 0.5) (L - 256) / 3840; 1024 px are 64 x 64 tokens, 720 px are 45 x 45
    assert resolution_shift(64 * 64) == pytest.approx(2.718281828**1.15)
    assert resolution_shift(45 * 45) == pytest.approx(2.718281828 ** (0.5 + 0.65 * 1769 / 3840))
    assert resolution_shift(10, base_shift=0, max_shift=1, base_tokens=0, max_tokens=10) == pytest.approx(
        2.718281828
    )


@pytest.mark.parametrize("side", [8, 16, 45, 64, 96])
@pytest.mark.parametrize("ends", [{}, {"base_shift": 0.2, "max_shift": 2.0}])
def test_resolution_shift_is_the_stock_schedulers(side, ends):
    import numpy as np
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    num_steps = 20
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    mu = calculate_shift(side * side, **ends)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / num_steps, num_steps), mu=mu)
    ours = shifted_sigmas(num_steps, resolution_shift(side * side, **ends))
    torch.testing.assert_close(ours, scheduler.sigmas, rtol=0, atol=1e-6)


def test_tails_of_the_two_rules():
    # released: 1, then 2, 6, 10, 14 of which the last is not evaluated
    assert tail(16, 1, 4) == [1, 2, 6, 10, 16]
    assert tail(16, 1, 1) == list(range(1, 17))
    # released, stride 3 from 9: 9, 10, 13, 16
    assert tail(16, 9, 3) == [9, 10, 13, 16]
    # paper: the start, then positions whose distance to 15 is divisible by 3
    assert tail(16, 1, 3, "paper") == [1, 3, 6, 9, 12, 15, 16]
    assert tail(16, 8, 2, "paper") == [8, 9, 11, 13, 15, 16]
    assert tail(16, 16, 2) == tail(16, 16, 2, "paper") == [16]
    assert tail(16, 15, 5) == tail(16, 15, 5, "paper") == [15, 16]


@settings(deadline=None)
@given(num_steps=st.integers(1, 40), granularity=st.integers(1, 50), data=st.data())
@pytest.mark.parametrize("rule", TAIL_RULES)
def test_tail_reaches_the_image(rule, num_steps, granularity, data):
    start = data.draw(st.integers(0, num_steps))
    positions = tail(num_steps, start, granularity, rule)
    assert positions[0] == start and positions[-1] == num_steps
    assert positions == sorted(set(positions))
    if granularity == 1:
        assert positions == list(range(start, num_steps + 1))


@settings(deadline=None)
@given(num_steps=st.integers(2, 40), ratio=st.floats(0.01, 1), data=st.data())
def test_compressed_sigmas_reach_the_image(num_steps, ratio, data):
    last = data.draw(st.integers(0, num_steps - 2))
    levels = compressed_sigmas(num_steps, last, ratio)
    assert len(levels) >= 2
    assert levels[-1] == 0
    assert levels[0] == pytest.approx(float(shifted_sigmas(num_steps)[last + 1]), abs=1e-6)
    assert (levels[1:] < levels[:-1]).all()


def test_compressed_sigmas_by_hand():
    # T = 4, noise up to step 0, ratio 0.75: int(4 * 0.75) = 3 points of t = 3/4, 3/8, 0, unshifted
    assert compressed_sigmas(4, 0, 0.75, shift=1.0).tolist() == pytest.approx([0.75, 0.375, 0.0])


@pytest.mark.parametrize(
    "call",
    [
        lambda: shifted_sigmas(0),
        lambda: shifted_sigmas(4, 0.0),
        lambda: resolution_shift(0),
        lambda: resolution_shift(4, base_tokens=4, max_tokens=4),
        lambda: tail(16, 17, 1),
        lambda: tail(16, 1, 0),
        lambda: tail(16, 1, 1, "official"),
        lambda: compressed_sigmas(16, 15, 0.4),
        lambda: compressed_sigmas(16, 3, 0.0),
    ],
)
def test_errors_name_what_is_allowed(call):
    with pytest.raises(ValueError, match=r"need|use one of"):
        call()
