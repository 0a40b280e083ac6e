"""The commands: `g2rpo --help`.

Each one turns words into plain arguments, calls a function of the package and says where the result lies.
What a user can cause, a ValueError anywhere below, is printed in words (exit code 2); all else propagates.
Imports stand inside the commands: `--help` and a typing error answer before torch would be loaded.
"""

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

import g2rpo

if TYPE_CHECKING:
    from g2rpo.before_after import Change
    from g2rpo.models.flux import FluxPolicy
    from g2rpo.sample import SampleRequest

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["float32", "tf32", "bfloat16"]


class Commands(TyperGroup):
    """Prints a ValueError as its message in red on stderr; `g2rpo --traceback COMMAND` shows its origin."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            if ctx.params["traceback"]:
                raise
            console = Console(stderr=True, soft_wrap=True, markup=False, emoji=False, highlight=False)
            console.print(f"error: {error}", style="red")
            raise typer.Exit(2) from error


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
    from g2rpo.config import load_settings

    settings = load_settings(*recipe_and_overrides(recipe, overrides))
    quiet_other_packages()
    sys.path.append(os.getcwd())  # as `python -m g2rpo` has it: rewards.my_file:score=1 finds ./my_file.py
    from g2rpo.trainer import train as train_run

    run = train_run(settings)
    if run.interrupted:
        raise typer.Exit(130)
    if run.changes:
        heads = ("pictures", "reward (* trained)", "before", "after", "change", "± SE", "n")
        show(heads, [_scores(change) for change in run.changes])
    out, model = shlex.quote(str(run.out)), shlex.quote(settings.model)
    prompts = shlex.quote(settings.eval_prompts or settings.prompts)
    walk = f"--steps {settings.eval_num_steps} --shift {settings.option('shift'):g}"
    print(f"{run.out} holds the run. Draw with it beside its base, or take the model out of it:")
    print(f"  g2rpo sample {out} --compare {model} --prompts {prompts} --limit 8 {walk}")
    print(f"  g2rpo export {out}")


@app.command()
def plan(
    recipe: Recipe = None,
    overrides: Overrides = None,
    seconds_per_forward: Annotated[
        float | None, typer.Option(help="Time of one image's forward on one device: adds times to the table.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Load the model and measure that time here.")
    ] = False,
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
      g2rpo plan my.toml --processes 8 --memory 80 --seconds-per-forward 0.35
    """
    from g2rpo.config import load_settings

    if measure and seconds_per_forward is not None:
        raise ValueError("--measure and --seconds-per-forward say the same; give one of them")
    if memory is not None and not memory > 0:
        raise ValueError(f"--memory {memory:g}: a device has more than 0 GB")
    settings = load_settings(*recipe_and_overrides(recipe, overrides))
    quiet_other_packages()
    import torch

    from g2rpo.costs import measure_forward, plan_costs, rows
    from g2rpo.prompts import read_prompts

    if measure:
        from g2rpo.saved import policy_of

        seconds_per_forward = measure_forward(policy_of(settings), batch=settings.rollout_batch)
        print(f"measured: {seconds_per_forward:.3g} s a forward, in batches of {settings.rollout_batch}")
    memory_bytes = None if memory is None else round(memory * 1e9)
    if memory is None and settings.device != "cpu" and torch.cuda.is_available():
        memory_bytes = torch.cuda.get_device_properties(0).total_memory
    costs = plan_costs(
        settings,
        num_processes=processes,
        seconds_per_forward=seconds_per_forward,
        memory_bytes=memory_bytes,
        num_prompts=len(read_prompts(settings.prompts)[0]),
    )
    show(("", "item", "value"), [row for row in rows(costs) if row[0] != "note"])
    for note in costs.notes:
        print(f"note: {note}")


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
    shift: Annotated[float, typer.Option(help="Shift of the noise schedule; 1 = even steps.")] = 3.0,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Image i is drawn from seed + i.")] = 0,
    guidance: Annotated[float | None, typer.Option(help="Default: the run's or export's, else 3.5.")] = None,
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
    """
    if not prompt and prompts is None and model.partition("@")[0] == "tiny":  # a look at once
        prompts, limit = "world:heldout", limit or 8
    texts = _texts(prompt or [], prompts)[:limit]
    folder = folder_to_write(out, "--out")
    quiet_other_packages()
    from g2rpo.sample import SampleRequest, write_comparison
    from g2rpo.saved import open_policy

    request = SampleRequest(tuple(texts), num_images, steps, shift, seed, batch)
    asked: dict[str, Any] = {"precision": precision, "guidance": guidance, "resolution": resolution}
    policy = open_policy(model, base=base, device=device, **asked)
    images = _drawn(policy, request, model, folder)
    if compare is not None:
        # A fair pair: what was not asked for is as in the first model, which makes room before.
        conditions = policy.conditions
        del policy
        policy = open_policy(compare, base=base, device=device, **conditions)
        before = _drawn(policy, request, compare, folder / "compare")
        print(write_comparison(folder, request, before, images, (compare, model)))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run folder (its newest checkpoint), or one checkpoint in it.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write. Default: RUN/export.")] = None,
    layout: Annotated[
        Literal["auto", "diffusers", "lora"],
        typer.Option(help="A whole FluxPipeline, or the adapters alone; auto = what the run trained."),
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
    from g2rpo.export import export_run

    print(export_run(run, out, kind=layout, dtype=dtype))


@app.command()
def doctor(
    out: Annotated[Path, typer.Option(help="Where runs will go; its disk is looked at.")] = Path("runs"),
) -> None:
    """Show what this machine has, and what is missing for which feature.

    Exit code 1 where something is missing that every run needs.  Example: g2rpo doctor
    """
    from g2rpo.doctor import report

    findings = report(out)
    show(("", "status", "found", "advice"), [(r.name, r.status, r.found, r.advice) for r in findings])
    if any(row.status == "missing" for row in findings):
        raise typer.Exit(1)


def recipe_and_overrides(recipe: str | None, overrides: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """The two as given, but for `train lr=1e-5`, where no recipe is named and the first word is an override.

    An override's name holds no slash: `runs/lr=1e-5/config.toml` is a path.
    """
    name, equals, _ = (recipe or "").partition("=")
    if recipe is not None and equals and "/" not in name:
        return None, [recipe, *(overrides or [])]
    return recipe, list(overrides or [])


def folder_to_write(folder: Path, option: str) -> Path:
    """`folder`, if it is one or can be made.

    Raises:
        ValueError: a file in its place or on its way, or no permission.
    """
    folder = folder.expanduser()
    absolute = folder.absolute()
    nearest = next(place for place in (absolute, *absolute.parents) if place.exists())
    if not nearest.is_dir():
        raise ValueError(f"{option} {folder}: {nearest} is a file; name a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {folder}: no permission to write in {nearest}; name another folder")
    return folder


def quiet_other_packages() -> None:
    """Turns off what transformers and diffusers print while they load; errors, and downloads' bars, stay."""
    # Read at their import; one that the user has set wins.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    import diffusers
    import transformers
    from huggingface_hub.utils import enable_progress_bars

    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.disable_progress_bar()
    enable_progress_bars()  # transformers turns the hub's off with its own; 24 GB should not come in silence


def show(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on stdout. A first cell that repeats the one above stays empty; no markup, no `:emoji:`."""
    table, above = Table(box=box.SIMPLE), ""
    for place, head in enumerate(heads):
        # Where it is narrow, the first and the last column wrap: names and numbers between stay whole.
        table.add_column(head, overflow="fold", no_wrap=0 < place < len(heads) - 1)
    for first, *others in rows:
        table.add_row("" if first == above else first, *others)
        above = first
    Console(markup=False, emoji=False).print(table)


def _texts(given: list[str], source: str | None) -> list[str]:
    """Prompts of the command line, then those of the file."""
    from g2rpo.prompts import MAX_CHARACTERS, read_prompts

    texts = [text.strip() for text in given]
    for text in texts:
        if not 1 <= len(text) <= MAX_CHARACTERS:
            raise ValueError(
                f"--prompt: a prompt has 1 to {MAX_CHARACTERS} characters, this one has {len(text)}"
                + (f": {text[:40]}…" if text else "")
            )
    if source is not None:
        prompts, report = read_prompts(source)
        print(report)
        texts += [prompt.text for prompt in prompts]
    if not texts:
        raise ValueError("no prompts: give --prompt TEXT, or --prompts with a file or world:NAME")
    return texts


def _drawn(policy: "FluxPolicy", request: "SampleRequest", model: str, folder: Path) -> Any:
    """Draws and writes the images of a request and says where they are."""
    from g2rpo.sample import write_samples

    images = request.images(policy)
    *_, grid = write_samples(folder, images, request, {"model": model, **policy.conditions})
    print(f"{len(images)} images by {model}: {folder / '0000.png'} …, together in {grid}")
    return images


def _scores(c: "Change") -> tuple[str, ...]:
    numbers = (f"{c.before:.4f}", f"{c.after:.4f}", f"{c.difference:+.4f}", f"{c.difference_se:.4f}")
    return (c.pictures, c.reward + " *" * c.trained, *numbers, str(c.num))


if __name__ == "__main__":
    app(prog_name="g2rpo")
