"""G2RPO: training flow models on preferences, with granular rewards at every noise step.

    import g2rpo
    print(g2rpo.plan("flux_lora_1gpu", prompts="world:train", gpu="H200").seconds)
    run = g2rpo.train("tiny", iterations=20, out="runs/first")
    print(g2rpo.evaluate(["tiny", run.out], "world:heldout", ["verifier"], limit=64).means)

Importing the package imports none of its parts: torch and diffusers load where they are first needed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from g2rpo.runtime.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

    from g2rpo.costs.costs import Costs
    from g2rpo.evaluation.evaluate import Evaluated
    from g2rpo.training.result import Run

__all__ = ["__version__", "evaluate", "plan", "train"]


def train(recipe: "str | Path | None" = None, **overrides: Any) -> "Run":
    """Trains as `g2rpo train RECIPE key=value ...` does.

    Args:
        recipe: path of a recipe or name of a shipped one; None = the embedded model's.
        overrides: settings on top of the recipe (g2rpo.config.load.Settings lists them).

    Raises:
        ValueError: settings that do not fit, before any model is loaded.
    """
    from g2rpo.config.load import load_settings
    from g2rpo.training.trainer import train

    return train(load_settings(recipe, overrides))


def plan(
    recipe: "str | Path | None" = None,
    *,
    num_processes: int = 1,
    gpu: str | None = None,
    memory_gb: float | None = None,
    measured: bool = False,
    seconds_per_forward: float | None = None,
    **overrides: Any,
) -> "Costs":
    """What `g2rpo plan RECIPE key=value ...` tells: forwards, images, memory, disk and times of a run.

    Args:
        recipe, overrides: as of `train`.
        gpu: a kind of GPU in the table of measured times; None: this machine's. memory_gb: of one.
        measured: load the model and time a few forwards here.

    Raises:
        ValueError: settings that do not fit, or a GPU that the table does not hold.
    """
    from g2rpo.config.load import load_settings
    from g2rpo.costs.estimate import plan_here

    return plan_here(
        load_settings(recipe, overrides),
        num_processes=num_processes,
        gpu=gpu,
        memory_gb=memory_gb,
        measured=measured,
        seconds_per_forward=seconds_per_forward,
    )


def evaluate(
    models: "Sequence[str | Path]",
    prompts: "str | Sequence[str]",
    rewards: Sequence[str],
    steps: Sequence[int] = (16,),
    *,
    limit: int | None = None,
    guidance: float | None = None,
    resolution: int | None = None,
    precision: str | None = None,
    options: Sequence[str] = (),
    labels: Sequence[str] | None = None,
    out: "str | Path" = "evaluation",
    **sampling: Any,
) -> "Evaluated":
    """Scores models on the same prompts and seeds, as `g2rpo evaluate` does.

    Args:
        models: whatever `g2rpo sample` draws with; the first is what the others are compared with.
        prompts: a file, world:NAME, or the prompts themselves. limit: at most so many of them.
        rewards: names, or module:function. options: of rewards, NAME.KEY=VALUE.
        steps: numbers of denoising steps, each an evaluation of its own.
        guidance, resolution, precision: of all models; None: the first one's.
        labels: names of the models in tables. out: folder of tables and pictures.
        sampling: num_images, seed, shift, base, device and batch of `g2rpo.inference.sample.SampleRequest`.

    Raises:
        ValueError: anything wrong with the arguments, before a model is loaded.
    """
    from g2rpo.data.prompts import as_prompts, read_prompts
    from g2rpo.evaluation.evaluate import evaluate as evaluate_models
    from g2rpo.inference.sample import SampleRequest

    found = read_prompts(prompts)[0] if isinstance(prompts, str) else as_prompts(prompts)
    conditions = {"guidance": guidance, "resolution": resolution, "precision": precision}
    request = SampleRequest(tuple(found[:limit]), tuple(steps), conditions=conditions, **sampling)
    names = [str(model) for model in models]
    return evaluate_models(names, request, list(rewards), options=options, labels=labels, out=out)
