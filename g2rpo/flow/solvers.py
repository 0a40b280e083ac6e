"""Higher-order ODE steps: DPM-Solver++ 2M (arXiv:2211.01095), which MixGRPO-Flash uses."""

from __future__ import annotations

import torch
from torch import Tensor

from g2rpo.flow.sde import expand_leading


def dpm2m_step(
    x: Tensor,
    x0: Tensor,
    sigma: Tensor | float,
    sigma_next: Tensor | float,
    x0_previous: Tensor | None = None,
    sigma_previous: Tensor | float | None = None,
) -> Tensor:
    """Returns the state after one DPM-Solver++ 2M (midpoint) ODE step (arXiv:2211.01095).

    lambda = ln((1 - sigma)/sigma), h = lambda' - lambda, r = (lambda - lambda_previous) / h
    x' = (sigma'/sigma) x + (1 - sigma') (1 - exp(-h)) (x0 + (x0 - x0_previous) / (2 r))

    The step is of first order (without the difference of predictions) if there is no previous prediction, and
    on the last step, where h is infinite and x' equals x0.

    Args:
        x: state at sigma, [N, L, C].
        x0: image prediction x - sigma v at sigma, [N, L, C].
        sigma, sigma_next: scalars or [N]; 0 <= sigma_next < sigma <= 1.
        x0_previous, sigma_previous: image prediction of the previous step and its sigma; None: there is none.

    Returns:
        The state at sigma_next, [N, L, C].
    """
    sigma, sigma_next = expand_leading(sigma, x), expand_leading(sigma_next, x)
    decay = sigma_next * (1 - sigma) / (sigma * (1 - sigma_next))  # exp(-h), 0 at both ends
    target = x0
    if x0_previous is not None and sigma_previous is not None:
        h = _log_snr(sigma_next) - _log_snr(sigma)
        r = (_log_snr(sigma) - _log_snr(expand_leading(sigma_previous, x))) / h
        second_order = sigma_next > 0
        # where() on the divisor too, because 0/0 in the unselected branch would still produce NaN.
        target = x0 + torch.where(second_order, 0.5 / torch.where(second_order, r, 1), 0) * (x0 - x0_previous)
    return (sigma_next / sigma) * x + (1 - sigma_next) * (1 - decay) * target


def _log_snr(sigma: Tensor) -> Tensor:
    return torch.log((1 - sigma) / sigma)
