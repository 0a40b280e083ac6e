"""G2RPO: alignment of flow-matching image models by reinforcement learning.

    import g2rpo
    print(g2rpo.plan("my.toml", gpu="H200").seconds)
    run = g2rpo.train("tiny", iterations=20, out="runs/first")
    print(g2rpo.evaluate(["tiny", run.out], "world:heldout", ["verifier"], limit=64).means)

Importing the package loads none of its subpackages; torch and diffusers are imported when first needed.
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
    """Trains a model, as `g2rpo train RECIPE key=value ...` does.

    Args:
        recipe: path of a recipe, or the name of a shipped one; None is `tiny`, for the embedded model.
        overrides: settings that replace those of the recipe (g2rpo.config.settings.Settings lists them).

    Returns:
        The finished run: its folder, metrics and changes of the rewards.

    Raises:
        ValueError: settings are invalid or contradict each other; raised before any model is loaded.
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
    """Computes the forwards, images, memory, disk and time of a run, as `g2rpo plan` does.

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
    resolution: int | Sequence[int] | None = None,
    precision: str | None = None,
    options: Sequence[str] = (),
    labels: Sequence[str] | None = None,
    out: "str | Path" = "evaluation",
    **sampling: Any,
) -> "Evaluated":
    """Scores models on the same prompts and seeds, as `g2rpo evaluate` does.

    Args:
        models: anything that `g2rpo sample` accepts; the others are compared with the first one.
        prompts: path of a file, world:NAME, or the prompts themselves.
        rewards: names, or module:function.
        steps: numbers of denoising steps, each evaluated separately.
        limit: largest number of prompts; None is all of them.
        guidance, precision: conditions of all models; None is those of the first one.
        resolution: side of square images in pixels, or [height, width]; None is that of the first model.
        options: options of rewards, as NAME.KEY=VALUE.
        labels: names of the models in the tables.
        out: folder of the tables and images.
        sampling: num_images, seed, shift, base, family, device and batch of
            `g2rpo.inference.sample.SampleRequest`.

    Raises:
        ValueError: an argument is wrong; raised before a model is loaded.
    """
    from g2rpo.data.prompts import as_prompts, read_prompts
    from g2rpo.evaluation.evaluate import evaluate as evaluate_models
    from g2rpo.inference.sample import SampleRequest

    prompt_list = read_prompts(prompts)[0] if isinstance(prompts, str) else as_prompts(prompts)
    conditions = {"guidance": guidance, "resolution": resolution, "precision": precision}
    request = SampleRequest(tuple(prompt_list[:limit]), tuple(steps), conditions=conditions, **sampling)
    names = [str(model) for model in models]
    return evaluate_models(names, request, list(rewards), options=options, labels=labels, out=out)
