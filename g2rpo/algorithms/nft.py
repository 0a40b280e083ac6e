"""DiffusionNFT (arXiv:2509.16117): ODE rollouts by a lagged policy, trained on their noised clean latents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from g2rpo.algorithms.base import Algorithm
from g2rpo.algorithms.options import Count, CountOrOff, Fraction, NotNegative, Positive, options

if TYPE_CHECKING:
    from torch import Tensor

    from g2rpo.objectives.lag import Lag
    from g2rpo.objectives.nft import NftObjective
    from g2rpo.rollouts.plan import Plan
    from g2rpo.rollouts.score import Rollout

Share = Annotated[float, Field(ge=0, lt=1)]


@options(num_steps=10)
class DiffusionNFT(Algorithm):
    """DiffusionNFT (arXiv:2509.16117) with its settings for SD3.5-M.

    One departure: several rewards are each standardised and then added, as in the other methods; the released
    code adds them first.
    """

    title: ClassVar[str] = "DiffusionNFT"

    solver: Literal["euler", "dpm2m"] = "dpm2m"
    """ODE solver of the rollouts: Euler, or the second-order DPM-Solver++ 2M of the released code."""
    train_levels: Count | Fraction = 0.99
    """Number of noise levels at which each image is trained, drawn anew each time, or the share of all levels
    (rounded down, at least one). Each costs a row of the update. 0.99 is all but one, as released."""
    level_range: tuple[float, ...] = (0.0, 1.0)
    """[first, end] of the levels that can be trained, as shares of the denoising steps from the noise end:
    level k of num_steps is one of them if first <= k / num_steps < end."""
    nft_beta: Positive = 1.0
    """Share of the policy's velocity in the velocity that is pulled towards good images. Smaller values make
    larger steps; the paper uses 1, and 0.1 for several rewards."""
    advantage_clip: Positive = 5.0
    """C: the advantage at which an image counts as entirely good or entirely bad."""
    advantage_std: Literal["group", "batch"] = "batch"
    """Standard deviation that scales an advantage: of the group, or of all rewards of the iteration."""
    advantage_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    """What replaces an advantage A: all = A itself; positive_only = max(A, 0); negative_only = min(A, 0);
    one_only = 1 if A > 0, else 0; binary = the sign of A."""
    kl_beta: NotNegative = 1e-4
    """Weight of the squared distance to the base model's velocity. Above 0 each row of the update costs a
    second forward."""
    update: Literal["once", "per_step"] | Annotated[int, Field(ge=2)] = "once"
    """'once', 'per_step', or the number of minibatches per group: one optimizer step per iteration, one per
    noise level, or one per minibatch of members."""
    lag: Literal["off", "linear", "delayed", "constant", "ramp"] = "linear"
    """Share d of the behaviour weights, which make the rollouts, that is kept after iteration n. off: 0, so
    the current weights make the rollouts; linear: min(0.001 n, 0.5); delayed: 0 for 75 iterations, then
    rising by 0.0075 up to 0.999; constant: lag_max; ramp: min(lag_rate max(n - lag_flat, 0), lag_max). These
    are the released types 0, 1 and 2, and two general ones."""
    lag_max: Share | None = None
    """Largest d, for lag constant and ramp."""
    lag_rate: Positive | None = None
    """Increase of d per iteration, for lag ramp."""
    lag_flat: CountOrOff | None = None
    """Number of iterations at the start during which d is 0, for lag ramp. None = 0."""

    def __post_init__(self) -> None:
        self.lag_schedule()
        super().__post_init__()

    def plan(self, seed: int, iteration: int, spread: Mapping[int, float] | None = None) -> Plan:
        """Returns the ODE from the members' own initial noise."""
        from g2rpo.rollouts.rules import Ode

        return Ode(self.num_levels(), self.solver).plan(self.num_steps, seed, iteration)

    def advantages(self, rollouts: Sequence[Rollout], weights: Sequence[float]) -> list[Tensor]:
        """Returns (reward - mean of the group) / (biased spread + 1e-4), [1, G] of each group."""
        from g2rpo.objectives.advantages import advantages_of

        return advantages_of(
            rollouts, weights, clip=self.advantage_clip, std=self.advantage_std, eps=1e-4, ddof=0
        )

    def objective(self) -> NftObjective:
        """Returns DiffusionNFT's loss, with a KL if kl_beta is above 0."""
        from g2rpo.objectives.nft import NftObjective

        return NftObjective(
            levels=self.levels(),
            num_levels=self.num_levels(),
            schedule=self.lag_schedule(),
            beta=self.nft_beta,
            clip=self.advantage_clip,
            mode=self.advantage_mode,
            kl_beta=self.kl_beta,
        )

    def optimizer_steps(self, plan: Plan, group_size: int) -> int:
        """Returns the number of optimizer steps of an iteration."""
        return len(self.levels()) if self.update == "per_step" else self.chunks(group_size)

    def levels(self) -> tuple[int, ...]:
        """Returns the indices of the noise levels that can be trained.

        Raises:
            ValueError: level_range is not [first, end], or holds no level.
        """
        given = list(self.level_range)
        if len(given) != 2 or not 0 <= given[0] < given[1] <= 1:
            raise ValueError(f"level_range={given}: give [first, end] with 0 <= first < end <= 1")
        levels = [k for k in range(self.num_steps) if given[0] <= k / self.num_steps < given[1]]
        if not levels:
            raise ValueError(
                f"level_range={given} contains none of the {self.num_steps} levels; widen the range"
            )
        return tuple(levels)

    def num_levels(self) -> int:
        """Returns the number of noise levels at which each image is trained.

        Raises:
            ValueError: train_levels is more than there are in level_range.
        """
        available = len(self.levels())
        if isinstance(self.train_levels, int):
            if self.train_levels > available:
                raise ValueError(
                    f"train_levels={self.train_levels} is more than the {available} levels in level_range; "
                    "lower it or widen the range"
                )
            return self.train_levels
        return max(1, int(self.train_levels * available + 1e-9))  # 0.7 * 10 must not become 6 by rounding

    def lag_schedule(self) -> Lag:
        """Returns the schedule of the behaviour weights.

        Raises:
            ValueError: an option of the schedule is missing, or has no effect.
        """
        from g2rpo.objectives.lag import LAGS, Lag

        given = {"lag_max": self.lag_max, "lag_rate": self.lag_rate, "lag_flat": self.lag_flat}
        needed = {"constant": ["lag_max"], "ramp": ["lag_max", "lag_rate"]}.get(self.lag, [])
        allowed = [*needed, *(["lag_flat"] if self.lag == "ramp" else [])]
        if unused := [name for name, value in given.items() if value is not None and name not in allowed]:
            raise ValueError(f"{unused[0]} has no effect with lag={self.lag}; use lag=ramp, or remove it")
        if missing := [name for name in needed if given[name] is None]:
            raise ValueError(f"lag={self.lag} needs {missing[0]}; set it, or use lag=linear")
        if self.lag in LAGS:
            return LAGS[self.lag]
        assert self.lag_max is not None
        if self.lag_rate is None:
            return Lag(self.lag_max)
        return Lag(self.lag_max, self.lag_rate, self.lag_flat or 0)
