"""Commands that stand by themselves here so that no file grows too long; __main__ lists them all."""

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from g2rpo.cli.console import folder_to_write, positive_number, quiet_other_packages, show, texts_of

if TYPE_CHECKING:
    from g2rpo.evaluation.lineup import Drawing


def score(
    images: Annotated[Path, typer.Option(help="Folder of png, jpg or webp files; sizes may differ.")],
    rewards: Annotated[str, typer.Option(help="Names with commas between, or my_file:function.")],
    prompts: Annotated[
        str | None, typer.Option(help="A prompt a picture, in the order of the sorted files; or world:NAME.")
    ] = None,
    mapping: Annotated[
        str | None,
        typer.Option(
            "--map", help="jsonl, csv, …: columns file and prompt, and metadata if a reward wants it."
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME.KEY=VALUE", help="Of a reward; may be given again.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for scores.csv and scores.json.")] = Path("scores"),
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto = a GPU where there is one.")
    ] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Pictures judged at once; memory grows with it.")] = 16,
) -> None:
    """Score pictures of any origin by rewards.

    Without --prompts and --map, pictures of `g2rpo sample` are judged by the prompts that they carry. File
    names are sorted by characters; where img_10 would come before img_2, a mapping is asked for. Pictures
    without a score are counted, and left out of the means. Ctrl-C keeps what is scored (exit code 130); the
    same command goes on, and tries again what had no score. Exit code 1 where a reward has no score at all.

    \b
    Examples:
      g2rpo score --images samples --rewards tiny_clip,verifier
      g2rpo score --images drawn --prompts prompts.txt --rewards hps,clip --out scores/drawn
      g2rpo score --images drawn --map drawn.jsonl --rewards ocr,my_file:score --option ocr.exact=true
    """
    folder = folder_to_write(out, "--out")
    quiet_other_packages()
    sys.path.append(os.getcwd())  # as `python -m g2rpo` has it: my_file:score finds ./my_file.py
    from g2rpo.evaluation.score_folder import score as score_folder

    done = score_folder(
        images,
        [name for part in rewards.split(",") if (name := part.strip())],
        prompts=prompts,
        mapping=mapping,
        options=option or (),
        out=folder,
        device=device,
        batch=batch,
    )
    rows = [
        (name, _number(one.mean), _number(one.standard_error), str(one.n), str(one.invalid))
        for name, one in done.rewards.items()
    ]
    show(("reward", "mean", "± SE", "n", "invalid"), rows)
    print(f"{done.out / 'scores.csv'} has a row a picture, {done.out / 'scores.json'} the means")
    for name, one in done.rewards.items():
        if one.invalid:
            why = f": {done.why[name]}" if name in done.why else ""
            print(f"note: {one.invalid} of {one.n + one.invalid} pictures have no score by {name}{why}")
    if done.interrupted:
        raise typer.Exit(130)
    if any(one.n == 0 for one in done.rewards.values()):
        raise typer.Exit(1)


Models = Annotated[
    list[str],
    typer.Argument(metavar="MODEL...", help="tiny, run, export, model folder, hub name, LoRA or weights."),
]
Labels = Annotated[
    str | None, typer.Option(help="Names of the models, with commas between. Default: from the models.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many prompts.")]
Shift = Annotated[
    str,
    typer.Option(help="Of the noise schedule; 1 = even steps, pipeline = as the first model's files say."),
]
Seed = Annotated[int, typer.Option(min=0, max=2**62, help="Picture i is drawn from seed + i.")]
Guidance = Annotated[float | None, typer.Option(min=0, help="Of all models. Default: the first model's.")]
Resolution = Annotated[
    int | None, typer.Option(help="Side in pixels, of all models. Default: the first model's.")
]
Base = Annotated[str | None, typer.Option(help="Model that LoRAs and bare weights belong to.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto = a GPU where there is one.")]
Precision = Annotated[
    Literal["float32", "tf32", "bfloat16"] | None,
    typer.Option(help="Of all models. Default: the first model's."),
]
Batch = Annotated[int, typer.Option(min=1, help="Pictures drawn, or judged, at once.")]
Then = Annotated[str | None, typer.Option(help="A model that takes the last steps of all others.")]
FirstShare = Annotated[float, typer.Option(help="Of the steps, before --then takes over.")]


def evaluate(
    models: Models,
    rewards: Annotated[str, typer.Option(help="Names with commas between, or my_file:function.")],
    prompts: Annotated[str, typer.Option(help="A file of prompts, or world:NAME.")],
    steps: Annotated[str, typer.Option(help="Numbers of denoising steps, with commas between.")] = "16",
    limit: Limit = None,
    num_images: Annotated[int, typer.Option(min=1, help="Pictures a prompt; averaged first.")] = 1,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME.KEY=VALUE", help="Of a reward; may be given again.")
    ] = None,
    labels: Labels = None,
    out: Annotated[Path, typer.Option(help="Folder for tables and pictures.")] = Path("evaluation"),
    shift: Shift = "3",
    seed: Seed = 0,
    guidance: Guidance = None,
    resolution: Resolution = None,
    base: Base = None,
    device: Device = "auto",
    precision: Precision = None,
    batch: Batch = 16,
    then: Then = None,
    first_share: FirstShare = 0.6,
) -> None:
    """Compare models by rewards, on the same prompts and seeds.

    Every model draws under the first one's conditions. Tables have means ± standard errors over prompts, and
    paired differences to the first model with 95 % bootstrap intervals. Ctrl-C keeps what is done (exit code
    130); the same command goes on, and may name more models and steps. Exit code 1 where a reward has no
    score at all for a model. Under torchrun, processes share the pictures, with the same result.

    \b
    Examples:
      g2rpo evaluate tiny tiny@g2rpo --prompts world:heldout --limit 64 --rewards tiny_clip,verifier
      g2rpo evaluate black-forest-labs/FLUX.1-dev runs/flux --prompts prompts.txt --rewards hps,clip \\
        --steps 10,20,50 --labels FLUX.1-dev,G2RPO --out evaluations/flux
      torchrun --nproc-per-node 8 -m g2rpo evaluate runs/a runs/b --prompts prompts.txt --rewards hps
    """
    drawing = _drawing(
        out=out,
        prompts=prompts, prompt=None, limit=limit, steps=steps, shift=shift, num_images=num_images,
        seed=seed, base=base, device=device, batch=batch, then=then, first_share=first_share,
        asked={"guidance": guidance, "resolution": resolution, "precision": precision},
    )  # fmt: skip
    sys.path.append(os.getcwd())
    from g2rpo.evaluation.evaluate import evaluate as evaluate_models
    from g2rpo.evaluation.tables import notes, split

    done = evaluate_models(
        models,
        drawing,
        [name for part in rewards.split(",") if (name := part.strip())],
        options=option or (),
        labels=None if labels is None else labels.split(","),
        out=out,
        say=print,
    )
    if done.interrupted:
        raise typer.Exit(130)
    if _first_process():
        rows = [
            (label, str(n), name, str(mean.prompts), *split(mean, done.differences.get((n, label, name))))
            for (n, label, name), mean in done.means.items()
        ]
        show(("model", "steps", "reward", "n", "mean ± SE", "difference [95 %]"), rows)
        for note in notes(done.means, done.differences):
            print(f"note: {note}")
        for name, why in done.why.items():
            print(f"note: no score by {name}: {why}")
        print(f"{done.out / 'results.md'} has the tables, {done.out / 'scores.csv'} a row a picture")
    if any(mean.prompts == 0 for mean in done.means.values()):
        raise typer.Exit(1)


def gallery(
    models: Models,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given again.")] = None,
    prompts: Annotated[str | None, typer.Option(help="A file of prompts, or world:NAME.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 16,
    limit: Limit = None,
    labels: Labels = None,
    out: Annotated[Path, typer.Option(help="Folder for gallery.png and the pictures.")] = Path("gallery"),
    shift: Shift = "3",
    seed: Seed = 0,
    guidance: Guidance = None,
    resolution: Resolution = None,
    base: Base = None,
    device: Device = "auto",
    precision: Precision = None,
    batch: Batch = 16,
    then: Then = None,
    first_share: FirstShare = 0.6,
) -> None:
    """Draw a figure of models side by side: a row a prompt, the same seeds.

    Every model draws under the first one's conditions. The single pictures are kept; the same command draws
    what is missing, and may name more models.

    \b
    Examples:
      g2rpo gallery tiny tiny@g2rpo --prompts world:heldout --limit 6
      g2rpo gallery black-forest-labs/FLUX.1-dev runs/a runs/b --labels base,A,B \\
        --prompt "a cat" --prompt "a dog" --shift pipeline
    """
    drawing = _drawing(
        out=out,
        prompts=prompts, prompt=prompt, limit=limit, steps=str(steps), shift=shift, num_images=1,
        seed=seed, base=base, device=device, batch=batch, then=then, first_share=first_share,
        asked={"guidance": guidance, "resolution": resolution, "precision": precision},
    )  # fmt: skip
    from g2rpo.evaluation.gallery import gallery as draw_gallery

    done = draw_gallery(
        models, drawing, labels=None if labels is None else labels.split(","), out=out, say=print
    )
    if done.interrupted:
        raise typer.Exit(130)
    if _first_process():
        print(f"{done.file}: {', '.join(done.labels)}")


def _drawing(
    *,
    out: Path,
    prompts: str | None,
    prompt: list[str] | None,
    limit: int | None,
    steps: str,
    shift: str,
    **others: Any,
) -> "Drawing":
    """What the options ask for; everything that is wrong with them is told before a model is loaded."""
    try:
        numbers = tuple(int(part) for part in steps.split(","))
    except ValueError:
        raise ValueError(f"--steps {steps}: give whole numbers with commas between, such as 10,20") from None
    number = None if shift == "pipeline" else positive_number("--shift", shift, "pipeline")
    from g2rpo.data.prompts import Prompt, read_prompts

    found: list[Prompt] = []
    if prompt:
        found += [Prompt(text, {}, index) for index, text in enumerate(texts_of(prompt, None))]
    if prompts is not None:
        read, report = read_prompts(prompts)
        if _first_process():
            print(report)
        found += read
    if not found:
        raise ValueError("no prompts: give --prompt TEXT, or --prompts with a file or world:NAME")
    folder_to_write(out, "--out")
    quiet_other_packages()
    from g2rpo.evaluation.lineup import Drawing

    return Drawing(tuple(found[:limit]), numbers, shift=number, **others)


def _first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "–"
