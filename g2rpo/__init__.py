"""G2RPO: alignment of flow-matching image models by reinforcement learning.

    import g2rpo
    print(g2rpo.plan("tiny_gpu", iterations=20, seconds_per_forward=0.01).seconds)
    run = g2rpo.train("tiny", iterations=20, out="runs/first")
    print(g2rpo.evaluate(["tiny", run.out], "world:heldout", ["verifier"], limit=64).means)

Functions do what the commands of the same name do. Components of your own are classes that follow a protocol
(`Policy`, `Reward`, `GroupReward`, `Objective`, `Algorithm`) or a `ModelFamily`; give them to `Trainer`, or
name them as "module:attribute" in a recipe (docs/extending.md).

Importing the package loads none of its subpackages; torch and diffusers are imported when first needed.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from g2rpo.runtime.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

    from g2rpo.algorithms.base import Algorithm as Algorithm
    from g2rpo.comparison.compare import Comparison
    from g2rpo.config.load import load_settings as load_settings
    from g2rpo.config.settings import Settings as Settings
    from g2rpo.costs.costs import Costs
    from g2rpo.evaluation.evaluate import Evaluated
    from g2rpo.models.family import ModelFamily as ModelFamily
    from g2rpo.models.family import ModelFiles as ModelFiles
    from g2rpo.models.family import ModelShape as ModelShape
    from g2rpo.models.family import TextEncoders as TextEncoders
    from g2rpo.models.family import Writer as Writer
    from g2rpo.models.options import PolicyOptions as PolicyOptions
    from g2rpo.models.policy import Conditioning as Conditioning
    from g2rpo.models.policy import Policy as Policy
    from g2rpo.models.registry import load_policy as load_policy
    from g2rpo.objectives.base import Context as Context
    from g2rpo.objectives.base import Loss as Loss
    from g2rpo.objectives.base import Objective as Objective
    from g2rpo.objectives.base import RowForwards as RowForwards
    from g2rpo.objectives.base import Rows as Rows
    from g2rpo.rewards.base import GroupReward as GroupReward
    from g2rpo.rewards.base import Metadata as Metadata
    from g2rpo.rewards.base import Reward as Reward
    from g2rpo.rewards.base import RewardSeconds as RewardSeconds
    from g2rpo.rewards.base import RewardSpec as RewardSpec
    from g2rpo.rewards.pairwise import PairwiseWinRate as PairwiseWinRate
    from g2rpo.rewards.registry import load_reward as load_reward
    from g2rpo.rollouts.plan import Branch as Branch
    from g2rpo.rollouts.plan import Plan as Plan
    from g2rpo.rollouts.score import Rollout as Rollout
    from g2rpo.training.result import Run as Run
    from g2rpo.training.trainer import Trainer as Trainer

__all__ = [
    "__version__",
    "train",
    "Trainer",
    "plan",
    "evaluate",
    "sample",
    "export",
    "compare",
    "load_settings",
    "Settings",
    "load_policy",
    "PolicyOptions",
    "load_reward",
    "Run",
    # To write components of your own.
    "Algorithm",
    "Plan",
    "Branch",
    "Rollout",
    "Objective",
    "Rows",
    "Loss",
    "Context",
    "RowForwards",
    "ModelFamily",
    "ModelFiles",
    "ModelShape",
    "TextEncoders",
    "Writer",
    "Policy",
    "Conditioning",
    "Reward",
    "RewardSpec",
    "RewardSeconds",
    "Metadata",
    "GroupReward",
    "PairwiseWinRate",
]

SettingValue: TypeAlias = (
    "str | int | float | bool | Path | Sequence[SettingValue] | Mapping[str, SettingValue] | None"
)
"""A value of a setting; None is the setting's default."""

_MODULES = {
    "Trainer": "training.trainer",
    "load_settings": "config.load",
    "Settings": "config.settings",
    "load_policy": "models.registry",
    "PolicyOptions": "models.options",
    "load_reward": "rewards.registry",
    "Run": "training.result",
    "Algorithm": "algorithms.base",
    "Plan": "rollouts.plan",
    "Branch": "rollouts.plan",
    "Rollout": "rollouts.score",
    "Objective": "objectives.base",
    "Rows": "objectives.base",
    "Loss": "objectives.base",
    "Context": "objectives.base",
    "RowForwards": "objectives.base",
    "ModelFamily": "models.family",
    "ModelFiles": "models.family",
    "ModelShape": "models.family",
    "TextEncoders": "models.family",
    "Writer": "models.family",
    "Policy": "models.policy",
    "Conditioning": "models.policy",
    "Reward": "rewards.base",
    "RewardSpec": "rewards.base",
    "RewardSeconds": "rewards.base",
    "Metadata": "rewards.base",
    "GroupReward": "rewards.base",
    "PairwiseWinRate": "rewards.pairwise",
}
"""Name -> the module that defines it, which is imported at the first use of the name."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"g2rpo.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'g2rpo' has no attribute {name!r}")


def train(recipe: "str | Path | Settings | None" = None, **overrides: SettingValue) -> "Run":
    """Trains a model, as `g2rpo train RECIPE key=value ...` does.

    Args:
        recipe: path of a recipe, the name of a shipped one, or settings; None is `tiny`, for the embedded
            model.
        overrides: settings that replace those of the recipe (g2rpo.config.settings.Settings lists them).

    Returns:
        The run: its folder, metrics and changes of the rewards.

    Raises:
        ValueError: settings are invalid or contradict each other; raised before any model is loaded.
        RunStopped: too many images without a reward, or a gradient that is not finite (a ValueError).
    """
    from g2rpo.training.trainer import train as train_settings

    return train_settings(_settings(recipe, overrides))


def plan(
    recipe: "str | Path | Settings | None" = None,
    *,
    num_processes: int = 1,
    gpu: str | None = None,
    memory_gb: float | None = None,
    measured: bool = False,
    seconds_per_forward: float | None = None,
    **overrides: SettingValue,
) -> "Costs":
    """Computes the forwards, images, memory, disk and time of a run, as `g2rpo plan` does.

    A prompt file that the recipe names may be absent.

    Args:
        recipe, overrides: as for `train`.
        num_processes: number of devices that share the groups of an iteration.
        gpu: GPU in the table of measured times, such as "H200"; None is the GPU of this machine.
        memory_gb: memory of a device in GB, to check what fits; None is that of this machine's GPU.
        measured: load the model and the rewards, and time a few forwards on this machine.
        seconds_per_forward: time per forward of one image on one device, instead of a measured one.

    Raises:
        ValueError: settings are invalid or contradict each other, or the table does not contain the GPU.
    """
    from g2rpo.costs.estimate import plan_here
    from g2rpo.training.run_prompts import planned_texts

    settings = _settings(recipe, overrides, prompts_may_be_absent=True)
    return plan_here(
        settings,
        num_processes=num_processes,
        gpu=gpu,
        memory_gb=memory_gb,
        measured=measured,
        seconds_per_forward=seconds_per_forward,
        num_texts=planned_texts(settings)[0],
    )


def sample(
    model: str | Path,
    prompts: str | Sequence[str],
    *,
    steps: int = 16,
    num_images: int = 1,
    seed: int = 0,
    shift: float | None = 3.0,
    guidance: float | None = None,
    true_cfg: float | None = None,
    negative_prompt: str | None = None,
    resolution: int | tuple[int, int] | None = None,
    precision: str | None = None,
    base: str | None = None,
    family: str | None = None,
    device: str = "auto",
    batch: int = 16,
    out: str | Path | None = None,
) -> "Tensor":
    """Samples images of a model.

    Args:
        model: anything that `g2rpo sample` accepts: `tiny`, a run, an export, a model folder, a hub name, a
            LoRA or weights.
        prompts: path of a file, world:NAME, or the prompts themselves.
        steps: number of denoising steps.
        num_images: images per prompt.
        seed: image i, counted prompt by prompt, has seed + i.
        shift: shift of the sigmas; None is the rule in the model's own files.
        guidance, true_cfg, negative_prompt, resolution, precision: conditions; None is what the run or export
            recorded, otherwise the default of `PolicyOptions`. resolution is a side or (height, width).
        base: model that a LoRA or bare weights belong to.
        family: a custom model family, as "module:attribute".
        device: "auto" selects a GPU if there is one.
        batch: images per forward.
        out: folder to which images are written as PNG with prompt, seed and conditions inside; None: none.

    Returns:
        [prompts * num_images, 3, H, W] in [0, 1], float32, on the CPU, prompt by prompt.

    Raises:
        ValueError: an argument is wrong; raised before a model is loaded.
    """
    from g2rpo.inference.sample import SampleRequest, sample_model

    conditions = _conditions(guidance, true_cfg, negative_prompt, resolution, precision)
    request = SampleRequest(
        _prompts(prompts),
        (steps,),
        num_images=num_images,
        seed=seed,
        shift=shift,
        conditions=conditions,
        base=base,
        family=family,
        device=device,
        batch=batch,
    )
    return sample_model(str(model), request, out)


def evaluate(
    models: Sequence[str | Path],
    prompts: str | Sequence[str],
    rewards: Sequence[str],
    steps: Sequence[int] = (16,),
    *,
    limit: int | None = None,
    num_images: int = 1,
    seed: int = 0,
    shift: float | None = 3.0,
    guidance: float | None = None,
    true_cfg: float | None = None,
    negative_prompt: str | None = None,
    resolution: int | tuple[int, int] | None = None,
    precision: str | None = None,
    base: str | None = None,
    family: str | None = None,
    device: str = "auto",
    batch: int = 16,
    options: Sequence[str] = (),
    labels: Sequence[str] | None = None,
    out: str | Path = "evaluation",
) -> "Evaluated":
    """Scores models on the same prompts and seeds, as `g2rpo evaluate` does.

    Args:
        models: anything that `g2rpo sample` accepts; the others are compared with the first one.
        prompts: path of a file, world:NAME, or the prompts themselves.
        rewards: names, or module:attribute.
        steps: numbers of denoising steps, each evaluated separately.
        limit: largest number of prompts; None is all of them.
        num_images: images per prompt, whose scores are averaged.
        seed, shift, base, family, device, batch: as for `sample`.
        guidance, true_cfg, negative_prompt, resolution, precision: conditions of all models; None is those of
            the first one.
        options: options of rewards, as NAME.KEY=VALUE.
        labels: names of the models in the tables.
        out: folder of the tables and images.

    Raises:
        ValueError: an argument is wrong; raised before a model is loaded.
    """
    from g2rpo.evaluation.evaluate import evaluate as evaluate_models
    from g2rpo.inference.sample import SampleRequest

    request = SampleRequest(
        _prompts(prompts)[:limit],
        tuple(steps),
        num_images=num_images,
        seed=seed,
        shift=shift,
        conditions=_conditions(guidance, true_cfg, negative_prompt, resolution, precision),
        base=base,
        family=family,
        device=device,
        batch=batch,
    )
    names = [str(model) for model in models]
    return evaluate_models(names, request, list(rewards), options=options, labels=labels, out=out)


def export(
    run: str | Path,
    out: str | Path | None = None,
    *,
    layout: str = "auto",
    dtype: str = "float32",
    family: str | None = None,
) -> Path:
    """Exports a run for other programs, as `g2rpo export` does.

    Args:
        run: the run folder, RUN/best, or a checkpoint in it.
        out: the folder to write; None is RUN/export.
        layout: "auto", "diffusers", "lora", or another layout of the model's family.
        dtype: "float32" or "bfloat16".
        family: the custom model family with which the run was trained, as "module:attribute".

    Returns:
        The written folder.

    Raises:
        ValueError: no checkpoint, or a layout in which the run cannot be exported; nothing is written.
    """
    from g2rpo.exporters.export import export_run

    return export_run(run, out, kind=layout, dtype=dtype, family=family)


def compare(
    arms: "Mapping[str, str | Path | tuple[str | Path, Mapping[str, SettingValue]]]",
    seeds: Sequence[int],
    out: str | Path = "comparison",
    *,
    jobs: int = 1,
) -> "Comparison":
    """Trains several methods with several seeds and compares them at equal cost, as `g2rpo compare` does.

    Args:
        arms: name -> recipe, or (recipe, overrides).
        seeds: each arm is trained with each seed.
        out: folder of runs, tables, curves and page; a repeated call continues what is missing.
        jobs: number of runs that are trained at the same time.

    Raises:
        ValueError: settings are invalid, or `out` holds other runs; raised before anything is trained.
    """
    from g2rpo.comparison.arms import arm_of
    from g2rpo.comparison.compare import compare as compare_arms

    listed = []
    for name, arm in arms.items():
        recipe, overrides = arm if isinstance(arm, tuple) else (arm, {})
        listed.append(arm_of(name, str(recipe), overrides))
    return compare_arms(Path(out), listed, seeds, jobs=jobs)


def _settings(
    recipe: "str | Path | Settings | None",
    overrides: "Mapping[str, SettingValue]",
    *,
    prompts_may_be_absent: bool = False,
) -> "Settings":
    from g2rpo.config.load import checked_settings, load_settings
    from g2rpo.config.settings import Settings

    given = {key: str(value) if isinstance(value, Path) else value for key, value in overrides.items()}
    if not isinstance(recipe, Settings):
        return load_settings(recipe, given, prompts_may_be_absent=prompts_may_be_absent)
    return checked_settings(recipe, given)


def _prompts(prompts: str | Sequence[str]) -> "tuple[Any, ...]":
    from g2rpo.data.prompts import as_prompts, read_prompts

    return tuple(read_prompts(prompts)[0] if isinstance(prompts, str) else as_prompts(prompts))


def _conditions(
    guidance: float | None,
    true_cfg: float | None,
    negative_prompt: str | None,
    resolution: int | tuple[int, int] | None,
    precision: str | None,
) -> dict[str, Any]:
    return {
        "guidance": guidance,
        "true_cfg": true_cfg,
        "negative_prompt": negative_prompt,
        "resolution": resolution,
        "precision": precision,
    }
