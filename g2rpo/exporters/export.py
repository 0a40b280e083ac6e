"""A trained policy as files that other programs load.

    diffusers   DiffusionPipeline.from_pretrained(FOLDER): the tuned network, the base's other parts
    lora        pipeline.load_lora_weights(FOLDER): only the adapters
    …           further layouts of a model family, such as one file with the key names of its own release

Each comes with README.md (a model card: settings, rewards, metrics, the base's licence) and g2rpo.json, from
which `g2rpo sample FOLDER` takes the base model and the conditions of the run (`models.options.CONDITIONS`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from g2rpo.config.load import read_settings
from g2rpo.config.settings import Settings
from g2rpo.exporters.card import Example, example_images, model_card
from g2rpo.inference.open import EXPORT_FILE, check_family, open_run, run_and_checkpoint
from g2rpo.models.family import ModelFamily
from g2rpo.models.policy import Policy, has_adapters
from g2rpo.models.registry import find_model
from g2rpo.run.folder import BEST
from g2rpo.run.metrics import read_metrics
from g2rpo.runtime.files import disk_errors, disk_full, write_atomic
from g2rpo.runtime.quiet import quiet_packages

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export_run(
    run: str | Path,
    out: str | Path | None = None,
    *,
    kind: str = "auto",
    dtype: str = "float32",
    family: str | None = None,
) -> Path:
    """Exports a run's newest checkpoint, RUN/best or another checkpoint of it.

    Args:
        run: the run folder, RUN/best or RUN/checkpoints/step_….
        out: the folder to write; None: RUN/export, or RUN/export_best.
        kind: a layout of the model family; "auto" is its first layout of adapters for runs that trained
            adapters, otherwise its first layout of all weights.
        dtype: of the written weights. bfloat16 halves the size, but its 8 significant bits can round away
            what a short training changed.
        family: the custom model family with which the run was trained.

    Returns:
        The written folder.

    Raises:
        ValueError: no checkpoint, an `out` that holds something else or cannot be written, a kind that the
            run cannot be exported as, or a base model without files. Nothing is written then.
    """
    path = Path(run).expanduser()
    folder = check_exportable(run, kind=kind, family=family)
    # Only the run stored its base in 8 bits; adapters are exported for, and merged into, the original base.
    policy, settings, state = open_run(
        run, device="cpu", family=family, changes={"precision": "float32", "base_dtype": "compute"}
    )
    metrics = read_metrics(file) if (file := folder / "metrics.jsonl").is_file() else []
    iteration = int(state["iteration"])
    return export_policy(
        policy,
        Path(out) if out is not None else folder / ("export_best" if path == folder / BEST else "export"),
        settings=settings,
        metrics=[line for line in metrics if line.get("step", 0) <= iteration],
        iteration=iteration,
        kind=kind,
        dtype=dtype,
        family=family,
        examples=example_images(folder, iteration),
    )


def untrained_warning(export: Path) -> str:
    """Returns a warning if a model was exported before its first iteration, else ""."""
    record = json.loads((export / EXPORT_FILE).read_text(encoding="utf-8"))
    if record["iteration"] > 0:
        return ""
    return (
        f"the run has done 0 iterations, so {export} has the weights of its base model "
        f"{record['base_model']}; train the run further before you use it"
    )


def check_exportable(run: str | Path, *, kind: str = "auto", family: str | None = None) -> Path:
    """Checks, before anything is loaded, that a run has a checkpoint and can be exported as `kind`.

    Args:
        run, kind, family: as in `export_run`.

    Returns:
        The run folder.

    Raises:
        ValueError: as `export_run`.
    """
    folder, _ = run_and_checkpoint(Path(run).expanduser())
    own_settings = read_settings(folder)
    check_family(own_settings.family, family, folder)
    _layout(find_model(own_settings.model, family)[0], kind, own_settings.lora_rank > 0)
    return folder


def export_policy(
    policy: Policy,
    out: Path,
    *,
    settings: Settings,
    metrics: Sequence[Mapping[str, Any]],
    iteration: int,
    kind: str = "auto",
    dtype: str = "float32",
    family: str | None = None,
    examples: Sequence[Example] = (),
) -> Path:
    """Writes `policy` to the folder `out`, completely or not at all, replacing an earlier export.

    Args:
        settings, metrics, iteration: for the model card; metrics are the lines of metrics.jsonl.
        kind, dtype, family: as in `export_run`.
        examples: images for the model card, which are copied.

    Returns:
        `out`.

    Raises:
        ValueError: as `export_run`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
    own_family, _ = find_model(settings.model, family)
    kind = _layout(own_family, kind, has_adapters(policy))
    writer = own_family.writers[kind]
    if out.exists() and not (out / EXPORT_FILE).is_file():
        raise ValueError(f"{out} exists and is not an export by g2rpo; choose another folder")
    unfinished = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        if full := disk_full(out, error):
            raise full from error
        raise ValueError(
            f"cannot write to {out.parent} ({error.strerror}); give another folder: --out FOLDER"
        ) from error
    try:
        with quiet_packages(), disk_errors(out):
            writer.write(policy, unfinished, DTYPES[dtype])
        record = {
            "base_model": settings.model,
            "guidance": policy.conditions.get("guidance"),
            "resolution": policy.conditions.get("resolution"),
            "iteration": iteration,
            "settings": settings.resolved().model_dump(mode="json"),
        }
        write_atomic(unfinished / EXPORT_FILE, json.dumps(record, indent=1, ensure_ascii=False))
        for example in examples:
            shutil.copyfile(example.file, unfinished / example.name)
        card = model_card(
            settings, metrics, iteration, policy=policy, family=own_family, kind=kind, examples=examples
        )
        write_atomic(unfinished / "README.md", card)
        for licence in policy.folder.glob("LICENSE*") if policy.folder is not None else ():
            shutil.copyfile(licence, unfinished / licence.name)
        if out.exists():
            shutil.rmtree(out)
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return out


def _layout(family: ModelFamily, kind: str, adapters: bool) -> str:
    """Returns the layout that a policy is exported as.

    Raises:
        ValueError: the family has no such layout, or it holds only adapters and there are none.
    """
    if kind == "auto":
        fitting = [name for name, writer in family.writers.items() if writer.adapters == adapters]
        if not fitting:
            trained = "adapters" if adapters else "all weights"
            raise ValueError(
                f"this run trained {trained}, but the model family {family.name} has no layout for them"
            )
        kind = fitting[0]
    if kind not in family.writers:
        raise ValueError(f"layout={kind!r}: choose one of {', '.join(('auto', *family.writers))}")
    if family.writers[kind].adapters and not adapters:
        others = " or ".join(name for name, writer in family.writers.items() if not writer.adapters)
        raise ValueError(
            f"this run trained all weights (lora_rank=0), so there is no LoRA; use the layout {others}"
        )
    return kind
