"""The commands: `g2rpo --help`.

Each one turns words into plain arguments, calls a function of the package and says where the result lies.
What a user can cause, a ValueError anywhere below, is printed in words (exit code 2); all else propagates.
Imports stand inside the commands: `--help` and a typing error answer before torch would be loaded.
"""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import g2rpo
from g2rpo.cli import commands
from g2rpo.cli import compare as commands_compare
from g2rpo.cli.console import (
    Commands,
    folder_to_write,
    positive_number,
    quiet_other_packages,
    recipe_and_overrides,
    show,
    texts_of,
)

if TYPE_CHECKING:
    from g2rpo.evaluation.before_after import Change

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["float32", "tf32", "bfloat16"]


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # square brackets in help and messages are lists, not styles
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

Recipe = Annotated[
    str | None,
    typer.Argument(metavar="RECIPE", help="Path or name of a recipe; none: the embedded model's, `tiny`."),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings on top (g2rpo/settings.py).")
]


def _version(wanted: bool) -> None:
    if wanted:
        print(g2rpo.__version__)
        raise typer.Exit


@app.callback()
def main(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error arose.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Trains flow models on what people prefer (G2RPO, arXiv:2510.01982, and its relatives)."""


@app.command()
def train(recipe: Recipe = None, overrides: Overrides = None) -> None:
    """Train a model, or go on where its run folder stopped.

    Ctrl-C stops with a checkpoint (exit code 130); the same command goes on from there.

    \b
    Examples:
      g2rpo train
      g2rpo train tiny lr=1e-5 out=runs/second
      g2rpo train my.toml rewards.tiny_clip=0.5 'granularities=[1,2]'
    """
    from g2rpo.config.load import load_settings

    settings = load_settings(*recipe_and_overrides(recipe, overrides))
    quiet_other_packages()
    sys.path.append(os.getcwd())  # as `python -m g2rpo` has it: rewards.my_file:score=1 finds ./my_file.py
    from g2rpo.run.best import kept_best
    from g2rpo.training.trainer import train as train_run

    run = train_run(settings)
    if run.interrupted:
        raise typer.Exit(130)
    if run.changes:
        heads = ("pictures", "reward (* trained)", "before", "after", "change", "± SE", "n")
        show(heads, [_scores(change) for change in run.changes])
    out, model = shlex.quote(str(run.out)), shlex.quote(settings.model)
    if settings.weights:
        model = f"{shlex.quote(settings.weights)} --base {model}"
    prompts = shlex.quote(settings.eval_prompts or settings.prompts)
    walk = f"--steps {settings.eval_num_steps} --shift {settings.option('shift'):g}"
    print(f"{run.out} holds the run. Draw with it beside its base, or take the model out of it:")
    print(f"  g2rpo sample {out} --compare {model} --prompts {prompts} --limit 8 {walk}")
    print(f"  g2rpo export {out}")
    if settings.keep_best and (kept := kept_best(run.out))[0]:
        print(f"  g2rpo export {out}/best    # {kept[0]}, the best by {kept[1]}")


@app.command()
def plan(
    recipe: Recipe = None,
    overrides: Overrides = None,
    seconds_per_forward: Annotated[
        float | None, typer.Option(help="Time of one image's forward on one device: adds times to the table.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Load the model and rewards and time a few forwards here.")
    ] = False,
    gpu: Annotated[
        str | None, typer.Option(help="Take times from the table of measured ones: H100 or H200.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="GB of a device, to see what fits. Default: this machine's GPU.")
    ] = None,
    processes: Annotated[int, typer.Option(help="Devices that share the groups of an iteration.")] = 1,
) -> None:
    """Show what a run will cost, before any weight is loaded.

    \b
    Examples:
      g2rpo plan
      g2rpo plan tiny_gpu group_size=24 --measure
      g2rpo plan flux_hps prompts=world:train --processes 16 --memory 80 --gpu H100
      g2rpo plan my.toml --processes 8 --memory 80 --seconds-per-forward 0.35
    """
    from g2rpo.config.load import load_settings

    if sum((measure, seconds_per_forward is not None, gpu is not None)) > 1:
        raise ValueError("--measure, --gpu and --seconds-per-forward all say how fast; give one of them")
    if memory is not None and not memory > 0:
        raise ValueError(f"--memory {memory:g}: a device has more than 0 GB")
    settings = load_settings(*recipe_and_overrides(recipe, overrides))
    quiet_other_packages()
    sys.path.append(os.getcwd())  # as for `train`: --measure loads the rewards
    from g2rpo.costs.costs import rows
    from g2rpo.costs.estimate import plan_here

    costs = plan_here(
        settings,
        num_processes=processes,
        seconds_per_forward=seconds_per_forward,
        measured=measure,
        gpu=gpu,
        memory_gb=memory,
    )
    show(("", "item", "value"), [row for row in rows(costs) if row[0] != "note"])
    for note in costs.notes:
        print(f"note: {note}")


@app.command()
def fetch(
    recipe: Recipe = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would be, download nothing.")
    ] = False,
) -> None:
    """Download what a run needs, after saying what that is.

    Sizes, licences and permissions come first. A model that is a folder is checked for completeness.

    \b
    Examples:
      g2rpo fetch my.toml --dry-run
      g2rpo fetch my.toml model=black-forest-labs/FLUX.1-dev
    """
    from g2rpo.config.load import load_settings

    settings = load_settings(*recipe_and_overrides(recipe, overrides), check_files=False)
    quiet_other_packages()
    from g2rpo.setup.fetch import fetch_needs, needs

    found = needs(settings.model, [*settings.rewards, *settings.eval_rewards], settings.reward_options)
    print(*found, sep="\n")
    if not dry_run:
        fetch_needs(found)


@app.command()
def embed(recipe: Recipe = None, overrides: Overrides = None) -> None:
    """Put a run's prompts through the text encoders ahead of it.

    Fills the cache with the prompts that the run will use; it then loads no text encoder. Ctrl-C keeps what
    is done (exit code 130); the same command goes on.

    \b
    Examples:
      g2rpo embed my.toml
      g2rpo embed my.toml iterations=1000 cache=/data/embeddings
      torchrun --nproc-per-node 8 -m g2rpo embed my.toml
    """
    from g2rpo.config.load import load_settings

    settings = load_settings(*recipe_and_overrides(recipe, overrides))
    quiet_other_packages()
    from g2rpo.training.embed import embed_run

    if embed_run(settings).interrupted:
        raise typer.Exit(130)


@app.command()
def sample(
    model: Annotated[str, typer.Argument(help="tiny, run, export, model folder, hub name, LoRA or weights.")],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given again.")] = None,
    prompts: Annotated[str | None, typer.Option(help="A file of prompts, or world:NAME.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many prompts.")] = None,
    out: Annotated[Path, typer.Option(help="Folder; files of the same name are replaced.")] = Path("samples"),
    compare: Annotated[str | None, typer.Option(help="A second model, drawn to the left of MODEL.")] = None,
    num_images: Annotated[int, typer.Option(min=1, help="Images a prompt.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 16,
    first_steps: Annotated[int | None, typer.Option(help="MODEL takes so many; --then the rest.")] = None,
    then: Annotated[str | None, typer.Option(help="A model that takes over after --first-steps.")] = None,
    shift: Annotated[
        str, typer.Option(help="Of the noise schedule; 1 = even steps, pipeline = as the model's files say.")
    ] = "3",
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Image i is drawn from seed + i.")] = 0,
    guidance: Annotated[
        float | None, typer.Option(min=0, help="Default: the run's or export's, else 3.5.")
    ] = None,
    resolution: Annotated[int | None, typer.Option(help="Side in pixels. Default: the model's.")] = None,
    base: Annotated[str | None, typer.Option(help="Model that a LoRA or bare weights belong to.")] = None,
    device: Annotated[Device, typer.Option(help="auto = a GPU where there is one.")] = "auto",
    precision: Annotated[Precision | None, typer.Option(help="Default: its own, else float32.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images a forward; memory grows with it.")] = 16,
) -> None:
    """Draw images with a model, or with two from the same seeds.

    \b
    Examples:
      g2rpo sample tiny@g2rpo --compare tiny
      g2rpo sample tiny --prompt "two red circles above a blue star"
      g2rpo sample runs/tiny --compare tiny --prompts world:demo --out before_after
      g2rpo sample runs/flux --steps 50 --first-steps 30 --then black-forest-labs/FLUX.1-dev \\
        --shift pipeline --prompt "a cat"
    """
    if not prompt and prompts is None and model.partition("@")[0] == "tiny":  # a look at once
        prompts, limit = "world:heldout", limit or 8
    texts = texts_of(prompt or [], prompts)[:limit]
    number = 3.0 if shift == "pipeline" else positive_number("--shift", shift, "pipeline")
    folder = folder_to_write(out, "--out")
    quiet_other_packages()
    from g2rpo.inference.sample import SampleRequest, draw

    asked: dict[str, Any] = {"precision": precision, "guidance": guidance, "resolution": resolution}
    draw(
        model,
        SampleRequest(tuple(texts), num_images, steps, number, seed, batch),
        folder,
        pipeline=shift == "pipeline",
        first_steps=first_steps,
        then=then,
        compare=compare,
        open_with={"base": base, "device": device, **asked},
    )


app.command()(commands.score)
app.command()(commands.evaluate)
app.command()(commands.gallery)
app.command()(commands_compare.compare)


@app.command()
def export(
    run: Annotated[
        Path, typer.Argument(help="Run folder (its newest checkpoint), RUN/best, or one checkpoint in it.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write. Default: RUN/export or RUN/export_best.")
    ] = None,
    layout: Annotated[
        Literal["auto", "diffusers", "lora", "single_file", "comfyui"],
        typer.Option(
            help="A whole FluxPipeline, or the adapters alone; auto = what the run trained. single_file and "
            "comfyui: the transformer, the adapters, in one file under the names of FLUX.1's own release."
        ),
    ] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="bfloat16 may round a short training away.")
    ] = "float32",
) -> None:
    """Write a run's model for other programs, with a model card.

    \b
    Examples:
      g2rpo export runs/tiny
      g2rpo export runs/tiny --out tuned --layout diffusers
    """
    out = None if out is None else folder_to_write(out, "--out")
    quiet_other_packages()
    from g2rpo.exporters.export import export_run

    print(export_run(run, out, kind=layout, dtype=dtype))


@app.command()
def doctor(
    out: Annotated[Path, typer.Option(help="Where runs will go; its disk is looked at.")] = Path("runs"),
    verify: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Instead: are this model's or LoRA's files right?"),
    ] = None,
    base: Annotated[str | None, typer.Option(help="Model that the weights of --verify belong to.")] = None,
) -> None:
    """Show what this machine has, and what is missing for which feature.

    Exit code 1 where something is missing that every run needs.

    \b
    Examples:
      g2rpo doctor
      g2rpo doctor --verify tuned/lora.safetensors --base black-forest-labs/FLUX.1-dev
    """
    if base is not None and verify is None:
        raise ValueError("--base says whose weights --verify PATH holds; give both, or neither")
    if verify is not None:
        quiet_other_packages()
        from g2rpo.setup.verify import verify as verify_weights

        findings = verify_weights(verify, base)
    else:
        from g2rpo.setup.doctor import report

        findings = report(out)
    found = [(r.name, r.status, r.found, r.advice) for r in findings]
    show(("", "status", "found", "advice"), found, fold=("found",))
    if any(row.status == "missing" for row in findings):
        raise typer.Exit(1)


def _scores(c: "Change") -> tuple[str, ...]:
    numbers = (f"{c.before:.4f}", f"{c.after:.4f}", f"{c.difference:+.4f}", f"{c.difference_se:.4f}")
    return (c.pictures, c.reward + " *" * c.trained, *numbers, str(c.num))
