"""Signal and noise of a random vector, such as a gradient, from the inner products of n independent ones.

    signal^2 = |E g|^2            estimated by the mean of <g_i, g_j> over pairs i != j
    noise^2  = E |g - E g|^2      estimated by the mean of |g_i|^2, less signal^2

Both are unbiased, and so is the mean of <g_i, h_j> for <E g, E h>; |mean g|^2 would be too large by
noise^2 / n. The mean of m such vectors has m times the signal-to-noise ratio.
Errors are jackknife standard errors (Efron and Stein, Annals of Statistics 9, 1981).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def moments(gram: Tensor) -> tuple[Tensor, Tensor]:
    """(signal^2, noise^2), unbiased, of n independent vectors with inner products [n, n]."""
    n, diagonal = len(gram), gram.diagonal().sum()
    signal = (gram.sum() - diagonal) / (n * (n - 1))
    return signal, diagonal / n - signal


def snr(gram: Tensor) -> Tensor:
    """signal^2 / noise^2."""
    signal, noise = moments(gram)
    return signal / noise


def cosine(gram: Tensor, cross: Tensor, other: Tensor) -> Tensor:
    """Between two means, from inner products [n, n], [n, m], [m, m]; not a number where one has no signal."""
    return cross.mean() / (moments(gram)[0].sqrt() * moments(other)[0].sqrt())


def jackknife(estimate: Callable[[Tensor], Tensor], number: int) -> Tensor:
    """[number, ...]: the estimate from all indices but one, for each of them."""
    every = torch.arange(number)
    return torch.stack([estimate(every[every != i]) for i in range(number)]).double()


def error(*replicates: Tensor) -> Tensor:
    """Jackknife standard error; of several independent samples, each with its own replicates."""
    return sum((r.var(0) * (len(r) - 1) ** 2 / len(r) for r in replicates), torch.zeros(())).sqrt()


def snr_without(gram: Tensor) -> Tensor:
    """[n], the SNR without each of the vectors."""
    return jackknife(lambda i: snr(gram[i][:, i]), len(gram))


def cosine_error(gram: Tensor, cross: Tensor, other: Tensor) -> Tensor:
    """Standard error of `cosine`, of both samples."""
    return error(
        jackknife(lambda i: cosine(gram[i][:, i], cross[i], other), len(gram)),
        jackknife(lambda i: cosine(gram, cross[:, i], other[i][:, i]), len(other)),
    )


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Inner products [n, m] of rows, float64 on the CPU."""
    parts = zip(a.split(2**20, 1), b.split(2**20, 1), strict=True)
    return torch.stack([x.double() @ y.double().T for x, y in parts]).sum(0).cpu()
