"""Settings: everything that determines a run, in one frozen model that a recipe writes as flat keys.

A key that is no field belongs to the algorithm, which declares and validates its own options; an option that
it does not have is an error. Mathematical functions never receive this model: the trainer passes plain
arguments to them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from g2rpo.algorithms.options import (
    MAX_IMAGES,
    MAX_STEPS,
    Count,
    CountOrOff,
    NotNegative,
    Positive,
    Text,
)
from g2rpo.algorithms.registry import (
    PRESET_OPTIONS,
    PRESETS,
    algorithm_defaults,
    complete_options,
    is_custom,
    make_algorithm,
)
from g2rpo.config import checks
from g2rpo.config.hints import wrong_place
from g2rpo.config.loggers import known_loggers, with_loggers
from g2rpo.config.recipe import to_toml, toml_value
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
from g2rpo.runtime.secrets import without_secrets
from g2rpo.runtime.text import did_you_mean, shortened
from g2rpo.runtime.values import check_numbers, check_texts, is_text

if TYPE_CHECKING:
    from g2rpo.algorithms.base import Algorithm


def text_names() -> frozenset[str]:
    """Settings and options of shipped algorithms whose values are text."""
    names = {name for name, field in Settings.model_fields.items() if is_text(field.annotation)}
    options = {
        name
        for preset in PRESETS.values()
        for name, field in vars(preset)["__pydantic_fields__"].items()
        if is_text(field.annotation)
    }
    return frozenset(names | options)


class Settings(BaseModel):
    """All settings of a run."""

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
    """Your own model family, as module:attribute; the module is imported. None = detected from the model."""
    weights: Text | None = None
    """A .safetensors file whose transformer weights, with the tensor names of diffusers or of the original
    release, replace those of the base model before training. None = the weights of the base model."""
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
    """Precision of the policy's forwards. tf32 is float32 with products rounded on the GPU. With float32,
    tf32 and bfloat16, states, log-probabilities and trained weights are float32. float64 is for checks."""
    tails_precision: TailsPrecision = "compute"
    """`float8` multiplies in 8 bits in forwards whose result only a reward uses. It needs torchao, bfloat16
    and a GPU of compute capability 8.9 or higher, and makes a rollout on an H200 1.4 times as fast.
    docs/performance.md states its effect on the advantages."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the run. auto = cuda if available."""
    sigma_rounding: SigmaRounding = "exact"
    """`released` gives the policy int(1000 sigma) / 1000, as the released code does."""

    # The algorithm. Its options are declared in algorithms/, one file per method.
    algorithm: Text = "g2rpo"
    """Method: the name of a shipped one, or `module:attribute` for a class of your own."""
    algorithm_options: dict[str, Any] = Field({}, validate_default=True)
    """Options of the algorithm. A recipe gives them as flat keys, such as `eta = 0.7`. config.toml stores the
    options of a class of your own in this table, because only that class defines them."""

    # Groups, prompts and rewards.
    group_size: Annotated[int, Field(ge=2)] = 12
    """G: number of images of one prompt that are compared with each other. The cost grows with it."""
    noise: Literal["independent", "antithetic", "orthogonal"] = "independent"
    """Dependence between the noise of a group's members: independent; antithetic, in pairs of +e and -e; or
    orthogonal, in orthogonal directions. The noise of each member alone is standard normal in all cases."""
    prompts: Text = "world:train"
    """Training prompts: a txt, json, jsonl, csv or parquet file, or world:NAME of the embedded world."""
    prompts_per_iteration: Count = 4
    """Number of groups per iteration, over all processes. An iteration costs this number times the forwards
    of a group."""
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
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What happens if the loss or the gradient of an optimizer step is NaN or infinite on any process, or if
    an iteration exceeds max_invalid_fraction. stop: the run stops; skip: that optimizer step, or the update
    of that iteration, is skipped and counted."""
    max_skips: Count = 10
    """With on_nonfinite = "skip", the run stops after this many skips in a row."""

    # Evaluation.
    eval_every: CountOrOff = 0
    """Iterations between evaluations. 0 = none. Each costs num_eval_prompts x eval_num_steps forwards."""
    eval_prompts: Text | None = None
    """Prompts of the evaluation, from the same kinds of source as `prompts`."""
    num_eval_prompts: Count = 64
    """Number of evaluation prompts, taken from the start of the source."""
    eval_rewards: list[str] = []
    """Rewards that are evaluated in addition to the trained ones and are not trained."""
    eval_num_steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] = 16
    """Number of denoising steps of evaluation images and sample grids."""
    sample_every: CountOrOff = 0
    """Iterations between sample grids, which all use the same seeds. 0 = only at the start and the end."""
    num_sample_prompts: Annotated[int, Field(ge=1, le=MAX_IMAGES)] = 8
    """Number of prompts in a sample grid."""

    on_warning: Literal["warn", "stop", "rollback"] = "warn"
    """What follows when the guard finds that a reward is exploited or the policy collapses (docs/guard.md).
    warn: go on; stop: end with a checkpoint; rollback: end, and RUN/latest refers to the best checkpoint."""

    compare_images: Annotated[int, Field(ge=0, le=MAX_IMAGES)] = 0
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
    """Rows per forward and backward of the update, per process; a row is one state, of a member or shared by
    the group."""
    cache: Text = "~/.cache/g2rpo/embeddings"
    """Folder of prompt embeddings, which runs may share."""
    deterministic: bool = False
    """Bit-exact repeats on a GPU as well, with slower kernels. On a CPU they are always bit-exact."""
    loggers: list[str] = ["tensorboard"]
    """Services that get all metrics and images besides the run folder: any of `tensorboard` (event files in
    the run folder), `wandb`, `trackio`, `swanlab` and `mlflow` (docs/logging.md). [] = none. If one
    fails, the run prints a warning and continues without it."""

    @model_validator(mode="before")
    @classmethod
    def _options_go_to_the_algorithm(cls, values: Any) -> Any:
        """Moves flat options of the algorithm into `algorithm_options`; None means the default."""
        if not isinstance(values, Mapping):
            return values
        values = with_loggers(values)
        table = values.get("algorithm_options", {})
        if not isinstance(table, Mapping):
            raise ValueError(
                f"algorithm_options = {shortened(repr(table), 200)}: give a table of options, such as "
                "algorithm_options = {eta = 0.7}, or each option as a key of its own"
            )
        custom = is_custom(str(values.get("algorithm", "")))
        flat = {
            name: value
            for name, value in values.items()
            if name not in cls.model_fields and (custom or name in PRESET_OPTIONS)
        }
        if twice := [name for name in flat if flat[name] is not None and name in table]:
            raise ValueError(f"{twice[0]} is given as a key and in algorithm_options; give it once")
        given = {name: value for name, value in {**table, **flat}.items() if value is not None}
        kept = {key: value for key, value in values.items() if key not in flat}
        return kept | {"algorithm_options": given} if given or table else kept

    @field_validator("algorithm_options")
    @classmethod
    def _options_are_the_algorithms(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Validates the options of a shipped algorithm; a user's class validates its own where it is used."""
        algorithm = info.data.get("algorithm", "")
        if not algorithm or is_custom(algorithm):
            return value
        complete = complete_options(algorithm, value)
        return {name: entry for name, entry in complete.items() if name in value}

    @field_validator("*", mode="before")
    @classmethod
    def _of_its_type(cls, value: Any, info: ValidationInfo) -> Any:
        """Python counts true as 1, and pydantic writes 1e3 as "1000.0", which is not what was typed."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        check_numbers(annotation, value)
        check_texts(annotation, value)
        if isinstance(value, str):
            checks.check_text(info.field_name or "", value)
        return value

    @field_validator("resolution", mode="before")
    @classmethod
    def _plain_resolution(cls, value: Any) -> Any:
        if not isinstance(value, str) and not (isinstance(value, list) and len(set(value)) == 1):
            return value
        size = as_resolution(value)
        return None if size is None else plain_resolution(size)

    @field_validator("rewards", "reward_options", mode="before")
    @classmethod
    def _is_a_table(cls, value: Any, info: ValidationInfo) -> Any:
        """Names the notation to someone who gives a list of rewards, or writes a setting below [rewards]."""
        if isinstance(value, Mapping):
            for name in value:
                if message := wrong_place(str(name), cls.model_fields, info.field_name or ""):
                    raise ValueError(message)
            return value
        from g2rpo.rewards.registry import REWARDS

        names = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        names = [name for name in names if isinstance(name, str)]
        entry = "1.0" if info.field_name == "rewards" else "{...}"
        example = ", ".join(f"{toml_value(name)} = {entry}" for name in names) or f"verifier = {entry}"
        hints = (did_you_mean(name, REWARDS) for name in names if name not in REWARDS)
        raise ValueError(
            f"give a table of names and {'weights' if info.field_name == 'rewards' else 'options'}, such as "
            f"{info.field_name} = {{{example}}}, not {type(value).__name__}{next(filter(None, hints), '')}"
        )

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

    @field_validator("loggers", mode="before")
    @classmethod
    def _loggers_are_known(cls, value: Any) -> Any:
        return known_loggers(value)

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

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The values by key: options of a shipped algorithm are flat, as in a recipe."""
        values: dict[str, Any] = {}
        for key, value in handler(self).items():
            if key == "algorithm_options" and not is_custom(self.algorithm):
                values |= dict.fromkeys(PRESET_OPTIONS) | value  # None: it does not have that option
            else:
                values[key] = value
        return values

    def option(self, name: str) -> Any:
        """The given value of an algorithm option, else its default, else None; imports a user's class."""
        if name in self.algorithm_options:
            return self.algorithm_options[name]
        return algorithm_defaults(self.algorithm).get(name)

    def make_algorithm(self) -> "Algorithm":
        """The algorithm with its options; imports and validates a user's class.

        Raises:
            ValueError: there is no such class, or it refuses the options.
        """
        return make_algorithm(self.algorithm, self.algorithm_options, type(self).model_fields)

    def resolved(self, *, custom: bool = False) -> "Settings":
        """A copy with the algorithm's defaults filled in, so that later versions' defaults do not matter.

        Args:
            custom: also those of a user's class, which is imported for it; otherwise its options stay as
                they are.

        Raises:
            ValueError: as `make_algorithm`.
        """
        if is_custom(self.algorithm) and not custom:
            return self
        options = complete_options(self.algorithm, self.algorithm_options, type(self).model_fields)
        return self.model_copy(update={"algorithm_options": options})

    def to_toml(self) -> str:
        """The resolved settings as a recipe, without the secrets among the options of rewards."""
        values = self.resolved().model_dump()
        return to_toml(values | {"reward_options": without_secrets(values["reward_options"])})
