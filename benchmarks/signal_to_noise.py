"""Signal and noise of a random vector, such as a gradient, from inner products of n independent samples.

    signal^2 = |E g|^2            estimated by the mean of <g_i, g_j> over pairs i != j
    noise^2  = E |g - E g|^2      estimated by the mean of |g_i|^2 minus signal^2

Both are unbiased, and so is the mean of <g_i, h_j> for <E g, E h>; |mean g|^2 would be too large by
noise^2 / n. The mean of m such vectors has m times the signal-to-noise ratio.
Errors are jackknife standard errors (Efron and Stein, Annals of Statistics 9, 1981).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def moments(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Estimates (signal^2, noise^2) without bias from inner products [n, n] of n independent vectors."""
    n, diagonal = len(gram), gram.diagonal().sum()
    signal = (gram.sum() - diagonal) / (n * (n - 1))
    return signal, diagonal / n - signal


def snr(gram: Tensor) -> Tensor:
    """Estimates the signal-to-noise ratio, signal^2 / noise^2."""
    signal, noise = moments(gram)
    return signal / noise


def cosine(gram: Tensor, cross: Tensor, other: Tensor) -> Tensor:
    """Estimates the cosine of two means from inner products [n, n], [n, m], [m, m]; NaN without a signal."""
    return cross.mean() / (moments(gram)[0].sqrt() * moments(other)[0].sqrt())


def jackknife(estimate: Callable[[Tensor], Tensor], number: int) -> Tensor:
    """Computes the estimate without each of the indices: [number, ...]."""
    every = torch.arange(number)
    return torch.stack([estimate(every[every != i]) for i in range(number)]).double()


def error(*replicates: Tensor) -> Tensor:
    """Computes the jackknife standard error from the replicates of one or several independent samples."""
    return sum((r.var(0) * (len(r) - 1) ** 2 / len(r) for r in replicates), torch.zeros(())).sqrt()


def snr_without(gram: Tensor) -> Tensor:
    """Computes the SNR without each of the vectors: [n]."""
    return jackknife(lambda i: snr(gram[i][:, i]), len(gram))


def cosine_error(gram: Tensor, cross: Tensor, other: Tensor) -> Tensor:
    """Computes the standard error of `cosine` due to both samples."""
    return error(
        jackknife(lambda i: cosine(gram[i][:, i], cross[i], other), len(gram)),
        jackknife(lambda i: cosine(gram, cross[:, i], other[i][:, i]), len(other)),
    )


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Computes inner products [n, m] of rows, in float64 on the CPU."""
    parts = zip(a.split(2**20, 1), b.split(2**20, 1), strict=True)
    return torch.stack([x.double() @ y.double().T for x, y in parts]).sum(0).cpu()
