"""A trained policy as files that other programs load.

    diffusers   FluxPipeline.from_pretrained(FOLDER): the tuned transformer, the base's other parts
    lora        pipeline.load_lora_weights(FOLDER): the adapters alone
    single_file the tuned transformer in one file, in the names of FLUX.1's own release
    comfyui     the adapters in one file, in those names

Each with README.md (a model card: settings, rewards, metrics, the base's licence) and g2rpo.json, from
which `g2rpo sample FOLDER` takes the base model and the conditions of the run (saved.CONDITIONS).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from g2rpo.config.settings import Settings
from g2rpo.exporters.card import ADAPTERS, Kind, model_card
from g2rpo.inference.open import EXPORT_FILE, open_run, run_of
from g2rpo.models.flux.export import WRITERS
from g2rpo.models.flux.policy import FluxPolicy
from g2rpo.run.folder import BEST
from g2rpo.run.metrics import read_metrics

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export_run(
    run: str | Path,
    out: str | Path | None = None,
    *,
    kind: Kind = "auto",
    dtype: str = "float32",
) -> Path:
    """Exports a run's newest checkpoint, or RUN/best, or one of it, to `out` (None: RUN/export[_best]).

    Args:
        kind: one of `Kind`; "auto" is lora for runs that trained adapters, else diffusers.
        dtype: of the written weights. bfloat16 halves the size; it rounds weights to 8 bits, which can be
            as much as a short training changed them.

    Raises:
        ValueError: no checkpoint, an `out` that holds something else or cannot be written, or a kind that the
            run does not have.
    """
    # A base stored in 8 bits was the run's; adapters and merged weights go out on the base itself.
    policy, settings, state = open_run(run, device="cpu", precision="float32", base_dtype="compute")
    opened = Path(run).expanduser()
    folder = run_of(opened) or opened
    metrics = read_metrics(file) if (file := folder / "metrics.jsonl").is_file() else []
    iteration = int(state["iteration"])
    return export_policy(
        policy,
        Path(out) if out is not None else folder / ("export_best" if opened == folder / BEST else "export"),
        settings=settings,
        metrics=[line for line in metrics if line.get("step", 0) <= iteration],
        iteration=iteration,
        kind=kind,
        dtype=dtype,
    )


def export_policy(
    policy: FluxPolicy,
    out: Path,
    *,
    settings: Settings,
    metrics: Sequence[Mapping[str, Any]],
    iteration: int,
    kind: Kind = "auto",
    dtype: str = "float32",
) -> Path:
    """Writes `policy` to the folder `out`, whole or not at all, replacing an earlier export; returns `out`.

    Args:
        settings, metrics, iteration: for the model card; metrics are the lines of metrics.jsonl.
        kind, dtype: as `export_run`.

    Raises:
        ValueError: as `export_run`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
    if kind not in get_args(Kind):
        raise ValueError(f"kind={kind!r}: choose one of {', '.join(get_args(Kind))}")
    adapters = bool(getattr(policy.module, "peft_config", None))
    if kind in ADAPTERS and not adapters:
        raise ValueError(
            "this run trained all weights (lora_rank=0), so there is no LoRA; take the layout diffusers or "
            "single_file"
        )
    if kind == "auto":
        kind = "lora" if adapters else "diffusers"
    if out.exists() and not (out / EXPORT_FILE).is_file():
        raise ValueError(f"{out} exists and is no export of g2rpo; choose another folder")
    unfinished = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise ValueError(
            f"cannot write to {out.parent} ({error.strerror}); give another folder: --out FOLDER"
        ) from error
    WRITERS[kind](policy, unfinished, DTYPES[dtype])
    record = {
        "base_model": settings.model,
        "guidance": policy.guidance,
        "resolution": policy.resolution,
        "iteration": iteration,
        "settings": settings.resolved().model_dump(mode="json"),
    }
    (unfinished / EXPORT_FILE).write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8")
    card = model_card(settings, metrics, iteration, policy=policy, kind=kind)
    (unfinished / "README.md").write_text(card, encoding="utf-8")
    for licence in policy.folder.glob("LICENSE*"):
        shutil.copyfile(licence, unfinished / licence.name)
    if out.exists():
        shutil.rmtree(out)
    unfinished.rename(out)
    return out
