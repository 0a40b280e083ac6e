"""What is run in both checkouts: one small `g2rpo` command per case.

`BASE:NAME` in a word stands for the folder in which BASE ran the case NAME, so that both checkouts open the
same run. Every case runs in a folder of its own that holds RECIPE (as recipe.toml) and REWARDS (as
comparison_rewards.py).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

RECIPE = """\
model = "random:tiny"
max_sequence_length = 16
prompts = "world:demo"
prompts_per_iteration = 2
num_sample_prompts = 1
rewards = { colourfulness = 1.0 }
group_size = 4
num_steps = 5
eval_num_steps = 2
iterations = 2
checkpoint_every = 100
lr = 1e-3
tensorboard = false
out = "run"
cache = "cache"
"""

# Rewards that are equal within some groups (skip_flat, spread) and missing for some samples.
REWARDS = '''\
"""A user's rewards: constant for prompts of an even length; no score for about every third image."""


def often_flat(images, prompts, metadata=None):
    scores = images.mean((1, 2, 3))
    for row, prompt in enumerate(prompts):
        if len(prompt) % 2 == 0:
            scores[row] = 0.5
    return scores


def sometimes_missing(images, prompts, metadata=None):
    scores = images.amax((1, 2, 3)) - images.amin((1, 2, 3))
    scores[(images.double().sum((1, 2, 3)) * 1000).long() % 3 == 0] = float("nan")
    return scores
'''

DEMO = (
    "tiny", "out=run", "cache=cache", "iterations=3", "group_size=3", "num_steps=4", "train_steps=2",
    "eval_every=2", "num_eval_prompts=3", "eval_num_steps=2", "sample_every=2", "num_sample_prompts=2",
    "compare_images=2", "checkpoint_every=100", "warmup_iterations=1", "lr_schedule=cosine",
)  # fmt: skip
G2RPO = ("algorithm=g2rpo", "train_steps=2", "granularities=[1,2]")
PRESETS: dict[str, tuple[str, ...]] = {
    "g2rpo": G2RPO,
    "g2rpo_single": ("algorithm=g2rpo_single", "train_steps=2"),
    "flow_grpo": ("algorithm=flow_grpo",),
    "flow_grpo_fast": (
        "algorithm=flow_grpo", "window=2", "window_range=[0,3]", "diffusion=cps", "eta=0.8",
        "clip_range=1e-5",
    ),
    "dance_grpo": ("algorithm=dance_grpo", "train_fraction=0.6"),
    "mix_grpo": ("algorithm=mix_grpo", "window=2", "window_hold=1"),
    "mix_grpo_flash": ("algorithm=mix_grpo", "window=2", "window_hold=1", "num_steps=7", "flash=0.4"),
}  # fmt: skip
UPDATES = ("once", "per_step", "2")

# Settings of one run each; together with PRESETS they name every value of every choice in the settings.
VARIANTS: dict[str, tuple[str, ...]] = {
    "kl": (*G2RPO, "kl_beta=0.1"),
    "kl_ema_per_step": (*G2RPO, "kl_beta=0.05", "ema_decay=0.9", "update=per_step"),
    "ema_evaluated": (
        *G2RPO, "kl_beta=0", "ema_decay=0.8", "eval_every=1", "eval_prompts=world:heldout",
        "num_eval_prompts=2", 'eval_rewards=["verifier"]', "keep_best=colourfulness", "keep_last=1",
        "keep_every=2", "checkpoint_every=1", "sample_every=1", "lr_schedule=linear", "warmup_iterations=1",
        "iterations=4",
    ),
    "lora": (*G2RPO, "lora_rank=2"),
    "lora_kl_targets": (
        *G2RPO, "lora_rank=2", "lora_alpha=3", 'lora_targets=["attn.to_q","attn.to_v"]', "kl_beta=0.1",
        "ema_decay=0.9", "update=2",
    ),
    "lora_float8_base": (*G2RPO, "lora_rank=2", "base_dtype=float8"),
    "true_cfg_antithetic": (
        *G2RPO, "resolution=64", "true_cfg=2", "guidance=1.5", "max_sequence_length=8", "noise=antithetic",
        'rewards={colourfulness=1.0,tiny_preference=0.5}', 'eval_rewards=["tiny_clip","verifier_strict"]',
        "eval_every=1", "eval_prompts=world:heldout", "num_eval_prompts=2", "compare_images=2",
        "lr_schedule=constant",
    ),
    "orthogonal_paper_tails": (
        "algorithm=g2rpo", "train_steps=2", "granularities=[1,2]", "tail_rule=paper", "noise=orthogonal",
        "diffusion=dance", "eta=0.3", "advantage_std=batch", "advantage_clip=0.5", "shift=1.5",
        "sigma_rounding=released", "step_draw=even", "steps_per_iteration=1",
    ),
    "independent_released_tails": (
        *G2RPO, "tail_rule=released", "noise=independent", "diffusion=flow", "advantage_std=group",
        "sigma_rounding=exact", "base_dtype=compute", "tails_precision=compute", "precision=float32",
        "optimizer=adamw", "update=3", "seed=3", "device=auto", "resume=auto",
    ),
    "spread_skip_flat": (
        "algorithm=g2rpo", "train_steps=[0,2,3]", "granularities=[1,2]", "steps_per_iteration=1",
        "step_draw=spread", "skip_flat=true", "prompts=world:train", "iterations=4",
        'rewards={"comparison_rewards:often_flat"=1.0}',
    ),
    "missing_rewards": (
        *G2RPO, "max_invalid_fraction=1", "prompts=world:train",
        'rewards={colourfulness=1.0,"comparison_rewards:sometimes_missing"=0.5}',
    ),
    "mix_decay": (
        "algorithm=mix_grpo", "window=2", "window_hold=1", "window_order=decay", "window_stride=2",
        "roll_back=false", "advantage_std=batch", "rewards={colourfulness=1.0,verifier=-0.5}", "iterations=4",
    ),
    "mix_random": (
        "algorithm=mix_grpo", "window=2", "window_hold=1", "window_order=random", "roll_back=true",
        "lr_schedule=cosine", "weight_decay=0.1", "max_grad_norm=0.01", "adam_beta1=0.8", "adam_beta2=0.9",
        "adam_eps=1e-6", "iterations=3",
    ),
    "mix_progressive": (
        "algorithm=mix_grpo", "window=2", "window_hold=1", "window_order=progressive", "iterations=4",
    ),
    "float64_small_batches": (
        *G2RPO, "precision=float64", "gradient_checkpointing=true", "rollout_batch=3", "decode_batch=2",
        "update_batch=2", "deterministic=true",
    ),
    "tf32": (*G2RPO, "precision=tf32", "rollout_batch=auto", "tensorboard=true", "device=cpu",
             "resume=never", 'reward_options={verifier={}}', 'eval_rewards=["verifier"]'),
    "bfloat16_float8_tails": (*G2RPO, "precision=bfloat16", "tails_precision=float8"),
}  # fmt: skip

# The settings of runs that are stopped, killed or continued; all write a checkpoint after each iteration.
LONG: dict[str, tuple[str, ...]] = {
    "full_ema_kl": ("algorithm=dance_grpo", "ema_decay=0.9", "kl_beta=0.05"),
    "lora": ("algorithm=flow_grpo", "lora_rank=2", "lora_alpha=3", "update=per_step"),
    "lora_ema_kl": (*G2RPO, "lora_rank=2", "ema_decay=0.9", "kl_beta=0.05"),
    "spread": VARIANTS["spread_skip_flat"],
}
LONG_RUN = ("iterations=4", "checkpoint_every=1", "keep_last=2", "compare_images=2")
KILLED_RUN = ("iterations=12", "checkpoint_every=1", "keep_last=2")
TWO = (*G2RPO, "ema_decay=0.9", "kl_beta=0.05", "eval_every=2", "eval_prompts=world:demo", *LONG_RUN)
TINY_LORA = (*DEMO, "lora_rank=2", "lora_alpha=6", "compare_images=0", "iterations=2", "ema_decay=0")
COMPILED = (*G2RPO, "compile_blocks=true", "group_size=2", "iterations=1")
# Moments are in 8 bits from 4096 numbers on; each shape of a parameter is compiled, so there are two.
EIGHT_BITS = (*G2RPO, "optimizer=adamw8bit", "lora_rank=128", 'lora_targets=["attn.to_q"]',
              "checkpoint_every=1")  # fmt: skip

# Settings that no case changes, and why.
UNVARIED = {
    "out": "the run folder: each case has its own",
    "cache": "the embedding cache: each case has its own",
    "algorithm_options": "options of an algorithm; a recipe gives them as flat keys",
    "family": "a custom model family: its code is no part of either checkout",
    "negative_prompt": "a setting that BASE lacks; its default is the empty prompt of BASE",
    "on_nonfinite": "a setting that BASE lacks; its default is what BASE does",
    "max_skips": "a setting that BASE lacks; without on_nonfinite=skip it has no effect",
    "loggers": "the cases give its earlier form `tensorboard`, which BASE has and NEW reads",
    "on_warning": "a setting that BASE lacks; its default changes no number",
}
# Values that only lead to a refusal on a machine without a GPU.
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "foreign_option": (("algorithm=flow_grpo", "granularities=[2]"), "granularities"),
    "update_of_one": ((*G2RPO, "update=1"), "update"),
    "alpha_without_rank": ((*G2RPO, "lora_alpha=2"), "lora_alpha"),
    "no_gpu": ((*G2RPO, "device=cuda"), "device"),
}


class Copy(NamedTuple):
    """A folder that BASE wrote and a case starts from."""

    case: str
    folder: str


@dataclass(frozen=True)
class Case:
    """One command in both checkouts.

    Attributes:
        words: arguments of `g2rpo`.
        processes: more than one are started by torchrun.
        copies: folders of BASE's results that are copied into the case's folder before it starts.
        kill_at: the command is killed by SIGKILL after this iteration's checkpoint, then started again.
        equals: a case whose result in BASE this case's result must equal as well, in both checkouts.
        refusal: a word that the error message must contain: the command must fail in both checkouts.
        keeps: a copied folder in which no file may be written.
        compiles: needs a C++ compiler.
        fresh: starts an interpreter of its own; the others are forked from one that has imported torch.
    """

    name: str
    words: tuple[str, ...]
    processes: int = 1
    copies: tuple[Copy, ...] = ()
    kill_at: int | None = None
    equals: str | None = None
    refusal: str | None = None
    keeps: str | None = None
    compiles: bool = False
    fresh: bool = False

    def needs(self) -> list[str]:
        """Cases of which BASE's results are needed."""
        named = re.findall(r"BASE:(\w+)", " ".join(self.words))
        return [*named, *(copy.case for copy in self.copies), *([self.equals] if self.equals else [])]


def train(name: str, *settings: str, processes: int = 1) -> Case:
    """A training run by RECIPE with some settings changed."""
    return Case(name, ("train", "recipe.toml", *settings), processes)


def _long_runs() -> list[Case]:
    """Runs begun in BASE and continued in each checkout: equal to BASE's run without a stop."""
    cases = []
    for name, settings in LONG.items():
        whole, begun = f"{name}_whole", f"{name}_begun"
        cases += [
            train(whole, *settings, *LONG_RUN),
            train(begun, *settings, *LONG_RUN, "stop_after=2"),
            Case(
                f"{name}_resumed",
                ("train", "recipe.toml", *settings, *LONG_RUN, "resume=latest"),
                copies=(Copy(begun, "run"), Copy(begun, "cache")),
                equals=whole,
                keeps="cache",
            ),
        ]
    killed = ("train", "recipe.toml", *LONG["full_ema_kl"], *KILLED_RUN)
    return [*cases, Case("never_killed", killed), Case("killed", killed, kill_at=3, equals="never_killed")]


def _eight_bits() -> list[Case]:
    """Moments in 8 bits, whose checkpoints hold tensors of torchao's classes; begun in BASE and continued."""
    words = ("train", "recipe.toml", *EIGHT_BITS)
    begun = Copy("adam_8bit_begun", "run")
    return [
        Case("adam_8bit", words, compiles=True, fresh=True),
        Case(begun.case, (*words, "stop_after=1"), compiles=True, fresh=True),
        Case("adam_8bit_resumed", words, copies=(begun,), equals="adam_8bit", compiles=True, fresh=True),
    ]


def _two_processes() -> list[Case]:
    return [
        train("two_processes_whole", *TWO, processes=2),
        train("two_processes_begun", *TWO, "stop_after=2", processes=2),
        Case(
            "two_processes_resumed",
            ("train", "recipe.toml", *TWO),
            processes=2,
            copies=(Copy("two_processes_begun", "run"), Copy("two_processes_begun", "cache")),
            equals="two_processes_whole",
        ),
        train("two_processes_lora", *G2RPO, "lora_rank=2", "shard_size=1", "update=per_step", processes=2),
    ]


def _readers() -> list[Case]:
    """Commands that open what BASE wrote."""
    demo, lora = "BASE:demo/run", "BASE:tiny_lora/run"
    draw = ("--prompts", "world:demo", "--steps", "2")
    single = "BASE:export_single_file/export/model.safetensors"
    layouts = {
        "export_diffusers": (demo, "diffusers"), "export_single_file": (demo, "single_file"),
        "export_lora": (lora, "lora"), "export_comfyui": (lora, "comfyui"),
        "export_merged_lora": (lora, "diffusers"),
    }  # fmt: skip
    cases = [
        Case(name, ("export", run, "--out", "export", "--layout", layout))
        for name, (run, layout) in layouts.items()
    ]
    cases += [
        Case("export_bfloat16", ("export", lora, "--out", "export", "--layout", "single_file",
                                 "--dtype", "bfloat16")),
        Case("sample_run", ("sample", demo, "--compare", "tiny", "--num-images", "2", *draw)),
        Case("sample_lora_run", ("sample", lora, *draw)),
        Case("sample_ema_kl_run", ("sample", "BASE:lora_ema_kl_whole/run", *draw)),
        Case("sample_lora_export", ("sample", "BASE:export_lora/export", *draw)),
        Case("sample_comfyui_export", ("sample", "BASE:export_comfyui/export", *draw)),
        Case("sample_diffusers_export", ("sample", "BASE:export_diffusers/export", *draw)),
        Case("evaluate", ("evaluate", demo, lora, "tiny@g2rpo", "--labels", "full,lora,shipped",
                          "--rewards", "tiny_preference,verifier", *draw)),
        Case("score", ("score", "--images", "BASE:sample_run/samples", "--rewards", "tiny_clip,verifier")),
        Case("weights_of_an_export", ("train", *DEMO, f"weights={single}", "compare_images=0",
                                      "iterations=1")),
    ]  # fmt: skip
    return cases


def all_cases() -> list[Case]:
    """Every case; what a case needs stands before it."""
    grid = [
        train(f"{name}_{update}", *settings, f"update={update}")
        for name, settings in PRESETS.items()
        for update in UPDATES
    ]
    return [
        Case("demo", ("train", *DEMO), fresh=True),
        Case("tiny_lora", ("train", *TINY_LORA)),
        *grid,
        *(train(name, *settings) for name, settings in VARIANTS.items()),
        *_long_runs(),
        *_two_processes(),
        Case(
            "embeddings_of_base",
            ("train", "recipe.toml", *VARIANTS["true_cfg_antithetic"]),
            copies=(Copy("true_cfg_antithetic", "cache"),),
            equals="true_cfg_antithetic",
            keeps="cache",
        ),
        *_readers(),
        Case("compiled", ("train", "recipe.toml", *COMPILED), compiles=True, fresh=True),
        *_eight_bits(),
        *(
            Case(f"refused_{name}", ("train", "recipe.toml", *words), refusal=word)
            for name, (words, word) in REFUSED.items()
        ),
    ]


def selected(only: Iterable[str]) -> tuple[list[Case], list[Case]]:
    """The cases that are compared, all where `only` is empty, and those that BASE must run for them.

    A name selects the case itself, or all whose names start with it.

    Raises:
        ValueError: a name that no case has.
    """
    cases, only = all_cases(), list(only)
    for name in only:
        if not any(case.name.startswith(name) for case in cases):
            raise ValueError(f"no case {name!r}; there are {', '.join(case.name for case in cases)}")
    compared = [case for case in cases if not only or any(case.name.startswith(name) for name in only)]
    needed = {case.name for case in compared}
    for case in reversed(cases):  # what a case needs stands before it
        if case.name in needed:
            needed |= set(case.needs())
    return compared, [case for case in cases if case.name in needed]
