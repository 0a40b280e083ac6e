"""Settings: everything that determines a run, in one flat frozen model.

An option of the algorithm is None if the preset's default applies; an option that the preset does not have is
an error. Mathematical functions never receive this model: the trainer passes plain arguments to them.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from g2rpo.algorithms.registry import algorithm_defaults
from g2rpo.config import checks
from g2rpo.config.recipe import to_toml
from g2rpo.models.options import (
    OPTION_NAMES,
    BaseDtype,
    PolicyOptions,
    Precision,
    SigmaRounding,
    TailsPrecision,
    as_resolution,
    plain_resolution,
)
from g2rpo.runtime.text import did_you_mean

Count = Annotated[int, Field(ge=1)]
CountOrOff = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]


class Settings(BaseModel):
    """All settings of a run. Options of the algorithm are None if the preset's default applies."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        use_attribute_docstrings=True,
    )

    # The policy.
    model: Text = "tiny"
    """Base model: `tiny` (embedded), `tiny@NAME` (a shipped variant of it), a diffusers folder, a hub name,
    or `random:NAME` (a model of full size with random weights and without a download, for trials)."""
    family: Text | None = None
    """A model family of your own, as module:attribute, which is imported. None = found from the model."""
    weights: Text | None = None
    """A .safetensors file of transformer weights, with diffusers' or the original names, that replace the
    base's before training. None = the base's own weights."""
    lora_rank: CountOrOff = 0
    """Rank of the trained adapters. 0 trains all weights, which needs about 7 times the memory."""
    lora_alpha: Positive | None = None
    """Adapters are scaled by lora_alpha / lora_rank. None = twice the rank."""
    lora_targets: list[str] | None = None
    """Suffixes of the names of layers that get adapters ("attn.to_q"). None = all linear layers of attention
    and MLPs."""
    base_dtype: BaseDtype = "compute"
    """Storage of the frozen base under adapters: in the compute dtype, or in 8 bits, which takes half the
    memory of bfloat16."""
    gradient_checkpointing: bool = False
    """Recompute the blocks in the backward pass: saves most activation memory and costs one more forward per
    update."""
    compile_blocks: bool = False
    """Compile the rollout's forwards block by block, and on a GPU the VAE's decoder. Compilation takes about
    a minute at the start; forwards then take about two thirds of the time on an H100 or H200."""
    shard_size: Count | None = None
    """Number of processes that share one copy of the trained weights, for example those of one node.
    None = all of them."""
    guidance: NotNegative = 3.5
    """Guidance value given to a guidance-distilled model, in training and in evaluation images."""
    true_cfg: Positive = 1.0
    """Scale of classifier-free guidance against the negative prompt. 1 = none; otherwise every velocity costs
    two forwards."""
    negative_prompt: str | None = None
    """Negative prompt of classifier-free guidance, with true_cfg other than 1. None = the model family's
    own."""
    resolution: Count | Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None
    """Side of the square images in pixels, or [height, width]. None = the model's own. The cost grows at
    least with the number of pixels."""
    max_sequence_length: Count | None = None
    """Maximum number of text tokens of the long prompt encoder. None = the model's own limit."""
    precision: Precision = "float32"
    """Precision of the policy's forwards. tf32 is float32 with products rounded on the GPU. With these three,
    states, log-probabilities and trained weights are float32. float64 is for checks."""
    tails_precision: TailsPrecision = "compute"
    """`float8` multiplies in 8 bits in forwards whose result only a reward uses. It needs torchao, bfloat16
    and a GPU of compute capability 8.9; an H200 is 1.4 times as fast. docs/performance.md states the
    effect."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the run. auto = cuda if available."""
    sigma_rounding: SigmaRounding = "exact"
    """`released` gives the policy int(1000 sigma) / 1000, as the released code does."""

    # The algorithm; None = the preset's default. An option that the preset does not have is an error.
    algorithm: Text = "g2rpo"
    """Preset: g2rpo, g2rpo_single, flow_grpo, dance_grpo or mix_grpo."""
    num_steps: Count | None = None
    """T: denoising steps of a training image. All costs except decoding grow with it."""
    shift: Positive | None = None
    """Shift s of the sigmas, sigma = s t / (1 + (s - 1) t). 1 = even steps."""
    train_steps: Count | list[CountOrOff] | None = None
    """Noise steps that are explored and trained: the first n, or a list of indices in 0..num_steps - 2."""
    steps_per_iteration: Count | None = None
    """Number of train_steps that are explored per iteration, drawn anew each time. None = all. The cost falls
    with it."""
    step_draw: Literal["even", "spread"] | None = None
    """Probabilities of that draw: even, or in proportion to the running spread of the rewards at a step
    divided by the forwards that the step costs."""
    granularities: list[Count] | None = None
    """Strides of the tails by which each explored state is scored: one image per noise step, member and
    stride."""
    tail_rule: Literal["released", "paper"] | None = None
    """End from which strides are counted: the noise end (released code) or the image end (the paper's
    Eq. 10)."""
    eta: NotNegative | None = None
    """Strength of the noise in an SDE step, > 0, because nothing is explored without noise."""
    diffusion: Literal["flow", "dance", "cps"] | None = None
    """Step rule: flow, s(sigma) = eta sqrt(sigma / (1 - sigma)); dance, s = eta; or cps, the
    coefficient-preserving step."""
    clip_range: Positive | None = None
    """Ratios are clipped to 1 +- clip_range. A value does not transfer between models, because
    log-probabilities are means over latent dimensions."""
    advantage_clip: Positive | None = None
    """Bound on the absolute value of the summed advantages."""
    advantage_std: Literal["group", "batch"] | None = None
    """Standard deviation that scales an advantage: of the group, or of all rewards of the iteration."""
    kl_beta: NotNegative | None = None
    """Weight of the KL divergence to the base model. Above 0 each row of the update costs a second
    forward."""
    update: Literal["once", "per_step"] | Annotated[int, Field(ge=2)] | None = None
    """'once', 'per_step', or the number of minibatches per group: one optimizer step per iteration, one per
    noise step, or one per minibatch of members."""
    train_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a path's noise steps that is trained, drawn anew for each member."""
    window: Count | None = None
    """Width of the window of noise steps that moves over the denoising steps. flow_grpo has none by
    default."""
    window_range: list[CountOrOff] | None = None
    """[first, end] of the steps within which a random window lies. None = the first half of the steps."""
    window_hold: Count | None = None
    """Number of iterations for which the window stays before it moves."""
    window_stride: CountOrOff | None = None
    """Number of steps by which the window moves. 0 = it stays at the noise end."""
    window_order: Literal["progressive", "decay", "random"] | None = None
    """Movement of the window: at an even pace, faster and faster, or to a random position each iteration."""
    roll_back: bool | None = None
    """Whether the window returns to the start after the last step, or stays there."""
    flash: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the steps after the window that a second-order solver keeps (MixGRPO-Flash: 0.4)."""

    # Groups, prompts and rewards.
    group_size: Annotated[int, Field(ge=2)] = 12
    """G: number of images of one prompt that are compared with each other. The cost grows with it."""
    noise: Literal["independent", "antithetic", "orthogonal"] = "independent"
    """Dependence between the noise of a group's members. The noise of each member is standard normal in any
    case."""
    prompts: Text = "world:train"
    """Training prompts: a txt, json, jsonl, csv or parquet file, or world:NAME of the embedded world."""
    prompts_per_iteration: Count = 4
    """Number of groups per iteration, over all processes. Forwards per iteration are this times those of a
    group."""
    skip_flat: bool = False
    """Skip the next visit of a prompt if all rewards of its group were equal, because such a group has no
    gradient."""
    rewards: dict[str, float] = {"tiny_preference": 1.0}
    """Reward name (or module:function) -> weight of its advantages. Each reward is standardised separately
    first."""
    reward_options: dict[str, dict[str, Any]] = {}
    """Reward name -> options of that reward, such as the path of its model (docs/rewards.md)."""
    max_invalid_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The run stops with a checkpoint if more than this share of an iteration's samples has no reward."""

    # Evaluation.
    eval_every: CountOrOff = 0
    """Iterations between evaluations. 0 = none. Each costs num_eval_prompts x eval_num_steps forwards."""
    eval_prompts: Text | None = None
    """Prompts of the evaluation, from the same kinds of source as `prompts`."""
    num_eval_prompts: Count = 64
    """Number of evaluation prompts, taken from the start of the source."""
    eval_rewards: list[str] = []
    """Rewards that are evaluated in addition to the trained ones and are not trained."""
    eval_num_steps: Count = 16
    """Number of denoising steps of evaluation images and sample grids."""
    sample_every: CountOrOff = 0
    """Iterations between sample grids, which all use the same seeds. 0 = only at the start and the end."""
    num_sample_prompts: Count = 8
    """Number of prompts in a sample grid."""

    compare_images: CountOrOff = 0
    """Number of images of training prompts, and of unseen prompts, that are made before and after training
    with equal seeds. 0 = no comparison."""

    # The optimizer (AdamW).
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit` (torchao) stores the moments in 8 bits, which takes a quarter of their memory."""
    lr: Positive = 2e-6
    """Learning rate after the warm-up."""
    weight_decay: NotNegative = 1e-4
    """Decoupled weight decay, multiplied by lr in each optimizer step."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the running mean of the gradient."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the running mean of the squared gradient."""
    adam_eps: Positive = 1e-8
    """Added to the square root of the mean squared gradient."""
    max_grad_norm: Positive = 1.0
    """Gradients with a larger norm are scaled down to this norm."""
    warmup_iterations: CountOrOff = 0
    """Number of iterations over which lr grows linearly from 0."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or decaying to 0 at `iterations` (a longer run decays
    later)."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of the moving average of the weights that is used for evaluation and export. 0 = off. Costs one
    float32 copy of the trained weights."""

    # The run.
    out: Text = "runs/g2rpo"
    """Run folder."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    """Seed of the order of prompts, the noise and all other random draws."""
    iterations: Count = 300
    """Length of the run in iterations (`steps` is accepted as well)."""
    stop_after: Count | None = None
    """Stop with a checkpoint after this iteration, as if interrupted; the same command without it resumes the
    run."""
    resume: Literal["auto", "never", "latest"] = "auto"
    """auto: resume the run in `out` if there is one; latest: require a checkpoint; never: reject a folder
    that contains a run."""
    checkpoint_every: Count = 50
    """Iterations between checkpoints. The last iteration always writes one."""
    keep_last: Count = 2
    """Number of newest checkpoints that are kept."""
    keep_every: CountOrOff = 0
    """Checkpoints at multiples of this number are kept permanently. 0 = none."""
    keep_best: Text | None = None
    """Evaluated reward by which the best checkpoint is selected. It is written and kept, and OUT/best names
    it."""
    rollout_batch: Count | Literal["auto"] = 24
    """Samples per rollout forward and process. Memory grows with it; results change only by rounding.
    auto = the most that fit on every process, chosen at the start and stored with the run."""
    decode_batch: Count = 24
    """Images that are decoded and scored at once, per process."""
    update_batch: Count = 16
    """Rows per forward and backward of the update, per process; a row is a state that its group shares."""
    cache: Text = "~/.cache/g2rpo/embeddings"
    """Folder of prompt embeddings, which runs may share."""
    deterministic: bool = False
    """Bit-exact repeats on a GPU as well, with slower kernels. On a CPU they are always bit-exact."""
    tensorboard: bool = True
    """Write TensorBoard event files in addition to metrics.jsonl."""

    @field_validator("train_steps", "granularities")
    @classmethod
    def _ascending(cls, value: Any) -> Any:
        if isinstance(value, list) and (not value or value != sorted(set(value))):
            raise ValueError(f"give a list of at least one entry, ascending and without repeats, not {value}")
        return value

    @field_validator("resolution", mode="before")
    @classmethod
    def _plain_resolution(cls, value: Any) -> Any:
        if not isinstance(value, str) and not (isinstance(value, list) and len(set(value)) == 1):
            return value
        size = as_resolution(value)
        return None if size is None else plain_resolution(size)

    @field_validator("rewards")
    @classmethod
    def _at_least_one_reward(cls, value: dict[str, float]) -> dict[str, float]:
        if not value:
            raise ValueError("a run needs at least one reward, such as rewards.tiny_clip=1.0")
        if zero := [name for name, weight in value.items() if weight == 0]:
            raise ValueError(
                f"weight 0 trains nothing; to only evaluate {zero[0]!r}, list it in eval_rewards"
            )
        return value

    @field_validator("rewards", "eval_rewards")
    @classmethod
    def _known_rewards(cls, value: Any) -> Any:
        from g2rpo.rewards.registry import REWARDS

        for name in value:
            if name not in REWARDS and ":" not in name:
                hint = did_you_mean(name, REWARDS)
                raise ValueError(
                    f"no reward {name!r}; there are {', '.join(REWARDS)} and module:attribute{hint}"
                )
        return value

    @model_validator(mode="after")
    def _settings_fit_together(self) -> "Settings":
        for check in (
            checks.check_noise_steps,
            checks.check_algorithm,
            checks.check_rewards,
            checks.check_evaluation,
            checks.check_adapters,
            checks.check_precision,
            Settings.policy_options,
            checks.check_length,
        ):
            check(self)
        return self

    def policy_options(self) -> PolicyOptions:
        """The options with which the run's policy is loaded."""
        values = {name: getattr(self, name) for name in OPTION_NAMES}
        weights = () if self.weights is None else (Path(self.weights),)
        return PolicyOptions(**{**values, "weights": weights})

    def algorithm_options(self) -> dict[str, Any]:
        """The algorithm's options that are not None, as keyword arguments of its preset."""
        return {name: getattr(self, name) for name in ALGORITHM_OPTIONS if getattr(self, name) is not None}

    def option(self, name: str) -> Any:
        """The given value of an algorithm option, else the preset's default, else None."""
        given = getattr(self, name)
        return algorithm_defaults(self.algorithm).get(name) if given is None else given

    def resolved(self) -> "Settings":
        """A copy with the preset's defaults filled in, so that later versions' defaults do not matter."""
        values = self.model_dump()
        for name, default in algorithm_defaults(self.algorithm).items():
            if name in ALGORITHM_OPTIONS and values[name] is None:
                values[name] = list(default) if isinstance(default, tuple) else default
        return Settings.model_validate(values)

    def to_toml(self) -> str:
        """The resolved settings as a recipe."""
        return to_toml(self.resolved().model_dump())


ALGORITHM_OPTIONS = (
    "num_steps",
    "shift",
    "train_steps",
    "steps_per_iteration",
    "step_draw",
    "granularities",
    "tail_rule",
    "eta",
    "diffusion",
    "clip_range",
    "advantage_clip",
    "advantage_std",
    "kl_beta",
    "update",
    "train_fraction",
    "window",
    "window_hold",
    "window_range",
    "window_stride",
    "window_order",
    "roll_back",
    "flash",
)
"""Fields that are keyword arguments of a preset."""
