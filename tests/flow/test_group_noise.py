"""Noise of a group's members: each is standard normal, and their dependence is that of the kind."""

import pytest
import torch

from g2rpo.flow.group_noise import GROUP_NOISES, group_noise, orthogonal, start_noise
from g2rpo.runtime.random import keyed_noise

KEY = (7, 3, 1)


def test_independent_noise_has_one_key_per_member():
    noise = group_noise("independent", (4, 3), 3, KEY, 2)
    for member in range(3):
        assert torch.equal(noise[member], keyed_noise((4, 3), *KEY, "step", 2, member))


@pytest.mark.parametrize("group_size", [2, 5, 12])
def test_antithetic_members_are_mirrors(group_size):
    plain = group_noise("independent", (8, 16), group_size, KEY, 0)
    noise = group_noise("antithetic", (8, 16), group_size, KEY, 0)
    assert torch.equal(noise[::2], plain[::2])  # with an odd size the last member is unpaired
    assert torch.equal(noise[1::2], -plain[::2][: group_size // 2])


def test_orthogonal_directions_keep_their_lengths():
    plain = group_noise("independent", (8, 16), 12, KEY, 0)
    noise = group_noise("orthogonal", (8, 16), 12, KEY, 0)
    products = noise.flatten(1).double() @ noise.flatten(1).double().T
    torch.testing.assert_close(
        products, torch.diag(plain.flatten(1).double().square().sum(1)), atol=2e-4, rtol=1e-6
    )
    assert (plain - noise).abs().max() > 0.1


@pytest.mark.parametrize("kind", GROUP_NOISES)
def test_each_member_is_standard_normal(kind):
    draws = torch.stack([group_noise(kind, (2, 2), 4, (0, i, 0), 0) for i in range(4000)]).flatten(2)
    assert draws.mean(0).abs().max() < 4.5 / 4000**0.5
    covariance = torch.einsum("ngd,nge->gde", draws, draws) / len(draws)
    assert (covariance - torch.eye(4)).abs().max() < 4.5 * (2 / 4000) ** 0.5
    assert (draws.pow(4).mean(0) - 3).abs().max() < 4.5 * (96 / 4000) ** 0.5  # the kurtosis of a Gaussian


def test_errors_name_what_is_allowed():
    with pytest.raises(ValueError, match="unknown noise 'sobol': use one of independent"):
        group_noise("sobol", (2, 2), 4, KEY, 0)
    with pytest.raises(ValueError, match="5 members cannot be orthogonal in 4 dimensions"):
        orthogonal(torch.randn(5, 2, 2))


def test_starts_have_their_own_keys_and_may_be_coupled():
    starts = start_noise("independent", (4, 3), 3, KEY)
    for member in range(3):
        assert torch.equal(starts[member], keyed_noise((4, 3), *KEY, "start", member))
    pair = start_noise("antithetic", (4, 3), 2, KEY)
    assert torch.equal(pair[0], starts[0]) and torch.equal(pair[1], -pair[0])
