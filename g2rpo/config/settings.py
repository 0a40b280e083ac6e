"""Settings: everything that decides a run, in one flat frozen model.

An option of the algorithm is None where its preset's default holds; one that the preset does not take is an
error. Mathematics never sees this model: the trainer hands plain arguments on.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from g2rpo.algorithms.registry import algorithm_defaults
from g2rpo.config import checks
from g2rpo.config.recipe import to_toml
from g2rpo.runtime.text import did_you_mean

Count = Annotated[int, Field(ge=1)]
CountOrOff = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]


class Settings(BaseModel):
    """All settings of a run. Options of the algorithm are None where the preset's default holds."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        use_attribute_docstrings=True,
    )

    # The policy.
    model: Text = "tiny"
    """Base model: `tiny` (embedded), `tiny@NAME` (a shipped tuning), a diffusers folder or a hub name, or
    `random:flux-dev` (FLUX.1-dev's size, random weights, no download: a rehearsal)."""
    weights: Text | None = None
    """A .safetensors file of transformer weights, in diffusers' names or the original's, that take the place
    of the base's before training; None = the base's own."""
    lora_rank: CountOrOff = 0
    """Rank of the trained adapters; 0 trains every weight (for FLUX.1 about 7 times the memory)."""
    lora_alpha: Positive | None = None
    """Adapters are scaled by lora_alpha / lora_rank; None = twice the rank."""
    lora_targets: list[str] | None = None
    """Ends of the names of layers that get adapters ("attn.to_q"); None = attention and MLP linears."""
    base_dtype: Literal["compute", "float8"] = "compute"
    """How the frozen base of adapters is stored: as it computes, or in 8 bits (half of bfloat16)."""
    gradient_checkpointing: bool = False
    """Recompute the blocks in the backward pass: far less memory for a forward more of the update."""
    compile_blocks: bool = False
    """Compile the rollout's forwards, block by block, and on a GPU the VAE's decoder: about a minute at the
    start, then two thirds of the time on an H100 or H200."""
    shard_size: Count | None = None
    """Processes that share one copy of the trained weights, such as those of one node; None = all of them."""
    guidance: NotNegative = 3.5
    """Guidance fed to a guidance-distilled model, in training and in samples."""
    true_cfg: Positive = 1.0
    """Classifier-free guidance against the empty prompt; 1 = none, else every evaluation is two forwards."""
    resolution: Count | None = None
    """Side of the square images in pixels; None = the model's own. Cost grows at least with its square."""
    max_sequence_length: Count | None = None
    """Text tokens of the long prompt encoder; None = the model's own limit."""
    precision: Literal["float32", "tf32", "bfloat16", "float64"] = "float32"
    """Of the policy's forwards; tf32: float32 whose products are rounded on the GPU. States, log-probs and
    trained weights are float32 in these three. float64 is for checks."""
    tails_precision: Literal["compute", "float8"] = "compute"
    """`float8` multiplies in 8 bits where only a reward sees the result (torchao; needs bfloat16 and a GPU of
    compute capability 8.9): 1.4 times as fast on an H200; docs/performance.md says what it changes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto = cuda where there is one."""
    sigma_rounding: Literal["exact", "released"] = "exact"
    """`released` feeds the policy int(1000 sigma) / 1000 as the released code does."""

    # The algorithm; None = the preset's default. An option that the preset does not take is an error.
    algorithm: Text = "g2rpo"
    """Preset: g2rpo, g2rpo_single, flow_grpo, dance_grpo or mix_grpo."""
    num_steps: Count | None = None
    """T: denoising steps of a training image; every cost but the decoding grows with it."""
    shift: Positive | None = None
    """Schedule shift s in sigma = s t / (1 + (s - 1) t); 1 = even steps."""
    train_steps: Count | list[CountOrOff] | None = None
    """Noise steps that are explored and trained: the first n, or a list of indices in 0..num_steps - 2."""
    steps_per_iteration: Count | None = None
    """So many of train_steps, drawn anew each iteration, are explored; None = all. Cost falls with it."""
    step_draw: Literal["even", "spread"] | None = None
    """Chances of that draw: even, or by the rewards' running spread at a step over its forwards."""
    granularities: list[Count] | None = None
    """Strides of the tails that judge each explored state; one image per step, member and stride."""
    tail_rule: Literal["released", "paper"] | None = None
    """Where strides are counted from: the noise end (released code) or the image end (the paper, Eq. 10)."""
    eta: NotNegative | None = None
    """Strength of the noise in an SDE step, above 0: without noise nothing is explored."""
    diffusion: Literal["flow", "dance", "cps"] | None = None
    """Step rule: s(sigma) = eta sqrt(sigma / (1 - sigma)), s = eta, or the coefficient-preserving step."""
    clip_range: Positive | None = None
    """Ratios count within 1 +- this. It does not transfer between models: log-probs average D dimensions."""
    advantage_clip: Positive | None = None
    """Bound of the summed advantages."""
    advantage_std: Literal["group", "batch"] | None = None
    """Whose spread scales an advantage: the group's own, or that of all rewards of the iteration."""
    kl_beta: NotNegative | None = None
    """Weight of the KL to the base model; above 0 each update step costs a second forward."""
    update: Literal["once", "per_step"] | Annotated[int, Field(ge=2)] | None = None
    """One optimizer step an iteration, one after each noise step, or so many, over parts of the members."""
    train_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a path's noise steps that is trained, drawn anew for each member."""
    window: Count | None = None
    """Width of the window of noise steps that slides over the schedule; flow_grpo has none by default."""
    window_range: list[CountOrOff] | None = None
    """[first, end] of the steps that a random window lies within; None = the first half of the steps."""
    window_hold: Count | None = None
    """Iterations that the window stays before it moves on."""
    window_stride: CountOrOff | None = None
    """Steps by which the window moves; 0 = it stays at the noise end."""
    window_order: Literal["progressive", "decay", "random"] | None = None
    """How the window moves: evenly, faster and faster, or to a new place each iteration."""
    roll_back: bool | None = None
    """Whether the window starts over at the end of the schedule, or stays there."""
    flash: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the points after the window that a second-order solver keeps (MixGRPO-Flash: 0.4)."""

    # Groups, prompts and rewards.
    group_size: Annotated[int, Field(ge=2)] = 12
    """G: images of one prompt that are compared with each other; cost grows with it."""
    noise: Literal["independent", "antithetic", "orthogonal"] = "independent"
    """How the noise of a group's members depends on each other's; each is standard normal by itself."""
    prompts: Text = "world:train"
    """Training prompts: a txt, json, jsonl, csv or parquet file, or world:NAME of the embedded world."""
    prompts_per_iteration: Count = 4
    """Groups of one iteration, over all processes; forwards = this times those of a group."""
    skip_flat: bool = False
    """Pass a prompt over at its next visit if its group's rewards were all equal: it taught nothing."""
    rewards: dict[str, float] = {"tiny_preference": 1.0}
    """Reward name (or module:function) -> weight of its advantages. Each is normalised by itself first."""
    reward_options: dict[str, dict[str, Any]] = {}
    """Reward name -> its own options, such as where its model lies (docs/rewards.md)."""
    max_invalid_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The run stops, with a checkpoint, when more than this share of an iteration's samples has no reward."""

    # What is measured on the way.
    eval_every: CountOrOff = 0
    """Iterations between evaluations; 0 = none. Each costs num_eval_prompts x eval_num_steps forwards."""
    eval_prompts: Text | None = None
    """Prompts of the evaluation; same kinds of source as `prompts`."""
    num_eval_prompts: Count = 64
    """How many of them are used, from the start."""
    eval_rewards: list[str] = []
    """Rewards measured besides the trained ones: the held-out judges."""
    eval_num_steps: Count = 16
    """Denoising steps of evaluation images and samples."""
    sample_every: CountOrOff = 0
    """Iterations between sample grids with the same seeds; 0 = only at the start and the end."""
    num_sample_prompts: Count = 8
    """Prompts in a sample grid."""

    compare_images: CountOrOff = 0
    """Pictures of own and of unseen prompts, each, drawn before and after with equal seeds; 0 = no table."""

    # The optimizer (AdamW).
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit` (torchao) keeps the moments in 8 bits: a quarter of their memory."""
    lr: Positive = 2e-6
    """Learning rate after the warm-up."""
    weight_decay: NotNegative = 1e-4
    """Decoupled weight decay, times lr each update."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the gradient's mean."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the gradient's mean square."""
    adam_eps: Positive = 1e-8
    """Added to the root of the mean square."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""
    warmup_iterations: CountOrOff = 0
    """Iterations over which lr grows linearly from 0."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: keep lr, or let it fall to 0 at `iterations` (a longer run then falls later)."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Running mean of the weights, used for evaluation and export; 0 = off. Costs one float32 copy."""

    # The run.
    out: Text = "runs/g2rpo"
    """Run folder."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    """Seed of prompts order, noise and everything else that is drawn."""
    iterations: Count = 300
    """Length of the run (`steps` is accepted too)."""
    stop_after: Count | None = None
    """Stop after this iteration with a checkpoint, as if interrupted; a later call goes on."""
    resume: Literal["auto", "never", "latest"] = "auto"
    """auto: go on from what `out` holds, if anything; latest: insist on it; never: refuse such a folder."""
    checkpoint_every: Count = 50
    """Iterations between checkpoints; the last one is always written."""
    keep_last: Count = 2
    """Newest checkpoints that stay."""
    keep_every: CountOrOff = 0
    """Checkpoints at multiples of this stay for good; 0 = none."""
    keep_best: Text | None = None
    """Judge (a reward that is evaluated) whose best checkpoint is written and stays: OUT/best names it."""
    rollout_batch: Count | Literal["auto"] = 24
    """Samples of one rollout forward, per process; memory grows with it, results change by rounding only.
    auto = the most that fit on every process, chosen at the start and kept with the run."""
    decode_batch: Count = 24
    """Images decoded and scored at once, per process."""
    update_batch: Count = 16
    """Rows of one update forward and backward, per process: a row is a state that its group shares."""
    cache: Text = "~/.cache/g2rpo/embeddings"
    """Folder of prompt embeddings, shared by runs."""
    deterministic: bool = False
    """Bit-exact repeats on a GPU too (slower kernels); on a CPU they are exact anyway."""
    tensorboard: bool = True
    """Write TensorBoard event files besides metrics.jsonl."""

    @field_validator("train_steps", "granularities")
    @classmethod
    def _rising(cls, value: Any) -> Any:
        if isinstance(value, list) and (not value or value != sorted(set(value))):
            raise ValueError(f"give a list of at least one entry, rising and without repeats, not {value}")
        return value

    @field_validator("rewards")
    @classmethod
    def _some_reward(cls, value: dict[str, float]) -> dict[str, float]:
        if not value:
            raise ValueError("a run needs at least one reward, such as rewards.tiny_clip=1.0")
        if zero := [name for name, weight in value.items() if weight == 0]:
            raise ValueError(f"weight 0 trains nothing; to only measure {zero[0]!r}, name it in eval_rewards")
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
            checks.check_length,
        ):
            check(self)
        return self

    def algorithm_options(self) -> dict[str, Any]:
        """The algorithm's options that were given: keyword arguments for its preset."""
        return {name: getattr(self, name) for name in ALGORITHM_OPTIONS if getattr(self, name) is not None}

    def option(self, name: str) -> Any:
        """An algorithm option as given, else the preset's default, else (the preset has none such) None."""
        given = getattr(self, name)
        return algorithm_defaults(self.algorithm).get(name) if given is None else given

    def resolved(self) -> "Settings":
        """The same with the preset's defaults written out: a later version's defaults change nothing."""
        values = self.model_dump()
        for name, default in algorithm_defaults(self.algorithm).items():
            if name in ALGORITHM_OPTIONS and values[name] is None:
                values[name] = list(default) if isinstance(default, tuple) else default
        return Settings.model_validate(values)

    def to_toml(self) -> str:
        """The resolved settings as a recipe."""
        return to_toml(self.resolved().model_dump())


# Fields that are a preset's keywords.
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
