"""DPM-Solver++ 2M (arXiv:2211.01095), the second-order ODE step of MixGRPO-Flash."""

from __future__ import annotations

import torch
from torch import Tensor

from g2rpo.flow.sde import _leading


def dpm2m_step(
    x: Tensor,
    x0: Tensor,
    sigma: Tensor | float,
    sigma_next: Tensor | float,
    x0_previous: Tensor | None = None,
    sigma_previous: Tensor | float | None = None,
) -> Tensor:
    """One DPM-Solver++ 2M (midpoint) ODE step on image predictions (arXiv:2211.01095).

    lambda = ln((1 - sigma)/sigma), h = lambda' - lambda, r = (lambda - lambda_previous) / h
    x' = (sigma'/sigma) x + (1 - sigma') (1 - exp(-h)) (x0 + (x0 - x0_previous) / (2 r))

    First order (no second bracket) without a previous prediction, and on the last step, where h is
    infinite and x' is x0.

    Args:
        x, x0: state and image prediction x - sigma v at sigma, [N, L, C].
        x0_previous, sigma_previous: the prediction one step earlier, and where it was made.
    """
    sigma, sigma_next = _leading(sigma, x), _leading(sigma_next, x)
    decay = sigma_next * (1 - sigma) / (sigma * (1 - sigma_next))  # exp(-h), 0 at both ends
    target = x0
    if x0_previous is not None and sigma_previous is not None:
        h = _log_snr(sigma_next) - _log_snr(sigma)
        r = (_log_snr(sigma) - _log_snr(_leading(sigma_previous, x))) / h
        second_order = sigma_next > 0
        # where() on the divisor too: 0/0 in the branch not taken would still be a NaN downstream
        target = x0 + torch.where(second_order, 0.5 / torch.where(second_order, r, 1), 0) * (x0 - x0_previous)
    return (sigma_next / sigma) * x + (1 - sigma_next) * (1 - decay) * target


def _log_snr(sigma: Tensor) -> Tensor:
    return torch.log((1 - sigma) / sigma)
