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
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from g2rpo.config.settings import Settings
from g2rpo.inference.open import EXPORT_FILE, open_run, run_of
from g2rpo.models.flux.layout import to_original
from g2rpo.models.flux.lora_layout import lora_to_comfyui
from g2rpo.models.flux.lora_strength import adapters_at_strength_1, metadata_at_strength_1
from g2rpo.models.flux.policy import FluxPolicy
from g2rpo.models.flux.weights import COMFYUI_LORA_FILE, LORA_FILE, SINGLE_FILE
from g2rpo.models.loading.files import PARTS
from g2rpo.models.tiny import is_tiny
from g2rpo.run.folder import BEST
from g2rpo.run.metrics import read_metrics

Kind = Literal["auto", "diffusers", "lora", "single_file", "comfyui"]
ADAPTERS = ("lora", "comfyui")
"""Kinds that hold adapters alone."""

FLUX_WIDTH = 3072
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
    _WRITERS[kind](policy, unfinished, DTYPES[dtype])
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


def merged_state(module: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The transformer's weights under their plain names, on the CPU, adapters added in.

    Added in float32; each is `dtype` before the next is taken up.
    """
    layers = {name: layer for name, layer in module.named_modules() if hasattr(layer, "get_delta_weight")}
    merged: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        if ".lora_" in name:
            continue
        weight = value.detach().cpu()
        owner, is_base, rest = name.partition(".base_layer.")
        if is_base and rest == "weight":
            weight = weight.float()
            for adapter in layers[owner].active_adapters:
                weight = weight + layers[owner].get_delta_weight(adapter).detach().float().cpu()
        merged[name.replace(".base_layer.", ".")] = weight.to(dtype)
    return merged


def _write_pipeline(policy: FluxPolicy, out: Path, dtype: torch.dtype) -> None:
    from diffusers import FluxTransformer2DModel

    # Without storage of its own: the weights assigned below are the only copy.
    with torch.device("meta"):
        transformer = FluxTransformer2DModel.from_config(policy.module.config)
    transformer.load_state_dict(merged_state(policy.module, dtype), assign=True)
    transformer.save_pretrained(out / "transformer")
    # copytree follows the hub cache's links, so the export stands alone.
    for part in PARTS:
        if part != "transformer":
            shutil.copytree(policy.folder / part, out / part)
    shutil.copyfile(policy.folder / "model_index.json", out / "model_index.json")
    for path in [out, *out.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200)  # a base that is read-only must not make an export so


def _write_lora(policy: FluxPolicy, out: Path, dtype: torch.dtype) -> None:
    from diffusers.loaders import FluxLoraLoaderMixin

    FluxLoraLoaderMixin.save_lora_weights(
        out,
        transformer_lora_layers={
            name: value.to(dtype) for name, value in adapters_at_strength_1(policy.module).items()
        },
        transformer_lora_adapter_metadata=metadata_at_strength_1(
            policy.module.peft_config["default"].to_dict()
        ),
        weight_name=LORA_FILE,
    )


def _write_single_file(policy: FluxPolicy, out: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    state = to_original(merged_state(policy.module, dtype), policy.module.config)
    # Contiguous: of what is swapped or sliced, safetensors takes no views.
    save_file({key: value.contiguous() for key, value in state.items()}, out / SINGLE_FILE, {"format": "pt"})


def _write_comfyui_lora(policy: FluxPolicy, out: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    layers = lora_to_comfyui(adapters_at_strength_1(policy.module), policy.module.config)
    # alpha stays float32: bfloat16 has no 257.
    state = {key: v if key.endswith(".alpha") else v.to(dtype).contiguous() for key, v in layers.items()}
    save_file(state, out / COMFYUI_LORA_FILE, {"format": "pt"})


_WRITERS = {
    "diffusers": _write_pipeline,
    "lora": _write_lora,
    "single_file": _write_single_file,
    "comfyui": _write_comfyui_lora,
}


def model_card(
    settings: Settings,
    metrics: Sequence[Mapping[str, Any]],
    iteration: int,
    *,
    policy: FluxPolicy,
    kind: Kind,
) -> str:
    """README.md of an export: what it is, how to load it, how it was trained, what it scores, its licence."""
    licence = base_licence(policy.folder)
    embedded = is_tiny(settings.model)
    base = "the embedded model of g2rpo" if embedded else settings.model
    given = Path(settings.weights or "").name
    origin = f"{base} with the weights of {given}" if given else base
    head = ["library_name: diffusers", "pipeline_tag: text-to-image"]
    head += [] if embedded or Path(settings.model).exists() else [f"base_model: {settings.model}"]
    head += [f"{key}: {value}" for key, value in licence.items()]
    head += ["tags:", "- g2rpo", "- reinforcement-learning", *(["- lora"] if kind in ADAPTERS else [])]
    rewards = ", ".join(f"{name} (weight {weight:g})" for name, weight in settings.rewards.items())
    terms = licence.get("license_name") or licence.get("license")
    lines = [
        "---",
        *head,
        "---",
        "",
        f"# {Path(settings.out).name}",
        "",
        f"{origin}, trained for {iteration} iterations with {settings.algorithm} (g2rpo) on: {rewards}.",
        "",
        *_loading(settings, policy, kind),
        "",
        "## Metrics",
        "",
        *_metrics_table(metrics),
        "",
        "A reward that was trained on rises more easily than the pictures get better; judge by the others.",
        "",
        "## Licence",
        "",
        f"These weights derive from {base} and stay under its terms"
        + (f": {terms}." if terms else "; its files state none, so ask its owner before using them.")
        + (f" {given} may have terms of its own." if given else ""),
        "",
        "## Settings",
        "",
        "```toml",
        settings.to_toml().rstrip(),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _loading(settings: Settings, policy: FluxPolicy, kind: Kind) -> list[str]:
    """How other programs load this export, as Markdown."""
    embedded, config = is_tiny(settings.model), policy.module.config
    width = config.num_attention_heads * config.attention_head_dim
    file = COMFYUI_LORA_FILE if kind == "comfyui" else SINGLE_FILE
    if kind in ADAPTERS and settings.weights:
        place = f"{settings.model} with the weights of {settings.weights}"
        sample = ["```sh", 'g2rpo sample "THIS FOLDER" --prompt "…"', "```"]
        other = "For other programs, `g2rpo export RUN --layout diffusers` makes one model of all three."
        return [f"These adapters belong onto {place}; this puts them there:", "", *sample, "", other]
    if kind in ("comfyui", "single_file") and width != FLUX_WIDTH:
        return [
            f"ComfyUI and diffusers' single-file loaders expect FLUX.1's width {FLUX_WIDTH}; this model's is "
            f"{width}, so this reads it:",
            "",
            "```sh",
            f'g2rpo sample "THIS FOLDER/{file}" --base {settings.model} --prompt "…"',
            "```",
        ]
    base = "tiny_folder()[0]" if embedded else f'"{settings.model}"'
    imports = ["from diffusers import FluxPipeline"]
    if embedded and kind == "lora":
        imports.append("from g2rpo.models.tiny import tiny_folder")
    if kind == "diffusers":
        load = ['pipeline = FluxPipeline.from_pretrained("THIS FOLDER")']
    elif kind == "single_file":
        imports = ["from diffusers import FluxPipeline, FluxTransformer2DModel"]
        load = [
            "transformer = FluxTransformer2DModel.from_single_file(",
            f'    "THIS FOLDER/{file}", config={base}, subfolder="transformer"',
            ")",
            f"pipeline = FluxPipeline.from_pretrained({base}, transformer=transformer)",
        ]
    else:
        name = f', weight_name="{file}"' if kind == "comfyui" else ""
        load = [
            f"pipeline = FluxPipeline.from_pretrained({base})",
            f'pipeline.load_lora_weights("THIS FOLDER"{name})',
        ]
    side, tokens = policy.resolution, policy.text.max_sequence_length
    call = f"guidance_scale={policy.guidance:g}, height={side}, width={side}, max_sequence_length={tokens}"
    if policy.true_cfg != 1:
        call += f', true_cfg_scale={policy.true_cfg:g}, negative_prompt=""'
    lines = ["```python", *imports, "", *load, f'image = pipeline("…", {call}).images[0]', "```"]
    if kind == "single_file":
        lines += [
            "",
            f"ComfyUI: {file} goes into models/diffusion_models, for the node Load Diffusion Model.",
        ]
    if kind == "comfyui":
        lines += ["", f"ComfyUI: {file} goes into models/loras, for the node Load LoRA (Model Only)."]
    return lines


def base_licence(folder: Path) -> dict[str, str]:
    """`license`, `license_name`, `license_link` of the base model's card, those that it has."""
    card = folder / "README.md"
    head = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8"), re.S) if card.is_file() else None
    if head is None:
        return {}
    found = re.findall(r"^(license(?:_name|_link)?):[ \t]*(.+?)[ \t]*$", head[1], re.M)
    return {key: value for key, value in found}


def _metrics_table(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """First and last value of every reward and evaluation, as Markdown."""
    series: dict[str, list[float]] = {}
    for line in metrics:
        for key, value in line.items():
            if (
                key.startswith(("reward/", "eval/"))
                and isinstance(value, int | float)
                and math.isfinite(value)
            ):
                series.setdefault(key, []).append(float(value))
    if not series:
        return ["None were recorded."]
    rows = [f"| {key} | {values[0]:.4f} | {values[-1]:.4f} |" for key, values in sorted(series.items())]
    return ["| metric | first | last |", "| --- | --- | --- |", *rows]
