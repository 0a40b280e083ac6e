"""Writes the report of a run: RUN/report.html, one page without external files.

The page's parts are in the order in which a reader asks: what came out, how it came about, whether the run
was healthy, what it cost, and how to repeat it. A part whose data were not recorded says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from g2rpo.algorithms.registry import is_custom
from g2rpo.config.load import read_settings
from g2rpo.costs.costs import Costs, plan_costs
from g2rpo.costs.memory import shape_of_run
from g2rpo.costs.speeds import tabulated_speeds
from g2rpo.inference.images import read_png_text
from g2rpo.report.charts import heat_map, line_chart, number, signed
from g2rpo.report.findings import (
    Difference,
    by_noise_step,
    cost_rows,
    differences,
    evaluated_names,
    evaluation_series,
    gains,
    largest_of,
    metric_series,
    reward_series,
)
from g2rpo.report.pictures import embedded, fitting_steps
from g2rpo.report.record import PairedSet, RunRecord, read_run
from g2rpo.runtime.files import write_atomic

SLIDER_BYTES, PAIR_BYTES = 8_000_000, 3_500_000
"""Budgets of the images, so that the page stays below 15 MB."""

NUM_PAIRS = 6
"""Pairs on the first screen, spread evenly over the prompts: they are not chosen by score."""

NUM_GAINS = 5
"""Prompts with the largest and with the smallest gain that are shown."""

HEALTH = (
    ("ratio_max_dev", "Largest |ratio − 1| in the update"),
    ("rollout_ratio_dev", "Largest |ratio − 1| of update against rollout"),
    ("clip_fraction", "Share of clipped elements"),
    ("grad_norm", "Gradient norm before clipping"),
    ("approx_kl", "Approximate KL of the update"),
    ("kl", "KL to the reference"),
    ("invalid_fraction", "Share of invalid samples"),
    ("flat_groups", "Share of groups without spread"),
    ("granularity_rank_correlation", "Rank correlation between granularities"),
    ("lr", "Learning rate"),
)
"""Metrics of the health charts, with their titles."""


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Writes the report of a run folder.

    Args:
        folder: the run folder; the run may be in progress.
        out: the file to write; None = FOLDER/report.html.

    Returns:
        The file.

    Raises:
        ValueError: no run folder, or its config.toml is damaged.
    """
    folder = Path(folder).expanduser()
    record = read_run(folder)
    path = folder / "report.html" if out is None else Path(out).expanduser()
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder; create it, or give another --out FILE")
    write_atomic(path, render(record))
    return path


def render(record: RunRecord) -> str:
    """Returns the page as HTML."""
    here = files("g2rpo.report")
    environment = jinja2.Environment(
        loader=jinja2.DictLoader({"page": (here / "page.html.jinja").read_text(encoding="utf-8")}),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    planned, no_plan = _planned(record)
    main, sets = _sets(record)
    return environment.get_template("page").render(
        style=(here / "page.css").read_text(encoding="utf-8"),
        script=(here / "page.js").read_text(encoding="utf-8"),
        title=record.folder.resolve().name,
        summary=_summary(record),
        state=_state(record),
        verdict=_verdict(main, sets),
        sets=[(pairs.title, rows) for pairs, rows in sets],
        pairs=_pairs(record),
        num_pairs=NUM_PAIRS,
        slider=_slider(record),
        reward_charts=_reward_charts(record),
        health=_health(record),
        preflight=_flat({k: v for k, v in record.preflight.items() if k not in ("settings", "limits")}),
        guard=_guard_charts(record),
        heat_maps=_heat_maps(record),
        gains=_gains(record),
        cost=cost_rows(record, planned),
        no_plan=no_plan,
        warnings=[_warning(line) for line in record.warnings],
        problems=record.problems,
        settings=[(key, _text(value)) for key, value in record.config.items()],
        config_text=record.config_text,
        starts=[_start(line) for line in record.starts],
        command=_command(record),
        number=number,
        signed=signed,
    )


# ---- the first screen


def _summary(record: RunRecord) -> str:
    config = record.config
    rewards = config.get("rewards", {})
    weighted = " + ".join(
        name if weight == 1 else f"{number(float(weight))} × {name}" for name, weight in rewards.items()
    )
    rank = config.get("lora_rank", 0)
    trained = f"adapters of rank {rank}" if rank else "all weights"
    return (
        f"{config.get('algorithm', 'an unknown algorithm')} on {config.get('model', 'an unknown model')}, "
        f"{trained}, for {weighted or 'no reward'}, prompts of {config.get('prompts', 'an unknown source')}"
    )


def _state(record: RunRecord) -> str:
    total = record.config.get("iterations", "?")
    if record.finished:
        return f"finished after {record.done} iterations"
    return f"{record.done} of {total} iterations so far: in progress, or interrupted"


def _sets(record: RunRecord) -> tuple[list[Difference], list[tuple[PairedSet, list[Difference]]]]:
    """The differences that the verdict is about, and those of every set of pairs."""
    sets = [(pairs, differences(pairs, record.trained)) for pairs in record.sets if pairs.after]
    if not sets and record.evaluated is not None:
        sets = [(record.evaluated, differences(record.evaluated, record.trained))]
    return (sets[-1][1] if sets else []), sets  # unseen prompts come last


def _verdict(main: Sequence[Difference], sets: Sequence[tuple[PairedSet, Any]]) -> list[str]:
    if not main:
        return [
            "No images of the same prompts and seeds were scored before and after, so there is no verdict."
        ]
    trained = [row.sentence for row in main if row.trained]
    held_out = [row.sentence for row in main if not row.trained]
    lines = [f"On {main[0].prompts} prompts ({sets[-1][0].title}), same seeds before and after."]
    if trained:
        lines.append("Trained: " + "; ".join(trained) + ".")
    lines.append("Held out: " + ("; ".join(held_out) + "." if held_out else "no reward was held out."))
    return lines


def _pairs(record: RunRecord) -> list[dict[str, Any]]:
    """Pairs of the last set, spread evenly over its prompts."""
    pairs = next((p for p in reversed(record.sets) if p.before_images and p.after_images), None)
    if pairs is None:
        return []
    count = len(pairs.prompts)
    chosen = sorted({round(i * (count - 1) / max(1, NUM_PAIRS - 1)) for i in range(min(NUM_PAIRS, count))})
    return _with_images(record, pairs, chosen, PAIR_BYTES // 2)


def _with_images(
    record: RunRecord, pairs: PairedSet, chosen: Sequence[int], budget: int
) -> list[dict[str, Any]]:
    images = [file for i in chosen for file in (pairs.before_images[i], pairs.after_images[i])]
    uris, _ = embedded(images, budget)
    names = sorted(set(pairs.before) & set(pairs.after), key=lambda name: name not in record.trained)
    return [
        {
            "prompt": pairs.prompts[i],
            "seed": pairs.seeds[i],
            "before": uris[2 * n],
            "after": uris[2 * n + 1],
            "scores": [(name, float(pairs.before[name][i]), float(pairs.after[name][i])) for name in names],
        }
        for n, i in enumerate(chosen)
    ]


# ---- training


def _slider(record: RunRecord) -> dict[str, Any] | None:
    """The sample grids: a fixed set of prompts and seeds at every iteration that was drawn."""
    steps = [step for step, images in record.samples.items() if images]
    if not steps:
        return None
    count = min(len(record.samples[step]) for step in steps)
    steps = fitting_steps(steps, count, SLIDER_BYTES)
    uris, edge = embedded([record.samples[s][i] for s in steps for i in range(count)], SLIDER_BYTES)
    captions = []
    for file in record.samples[steps[-1]][:count]:
        prompt, info = read_png_text(file)
        captions.append((prompt or file.name, info.get("seed")))
    frames = [[uris[n * count + i] for n in range(len(steps))] for i in range(count)]
    return {"steps": steps, "frames": frames, "captions": captions, "edge": edge, "all": len(record.samples)}


def _reward_charts(record: RunRecord) -> list[Any]:
    charts = []
    for name in evaluated_names(record):
        series = evaluation_series(record, name)
        kind = "trained" if name in record.trained else "held out"
        what = "gain over the start" if series.points and series.points[0][1] == 0 else "mean"
        if series.points:
            charts.append(line_chart(f"{name}, evaluation, {what} ({kind}; band: standard error)", [series]))
    for name in record.trained:
        series = reward_series(record, name)
        if series.points:
            charts.append(
                line_chart(f"{name}, training images (band: standard error over the groups)", [series])
            )
    return charts


def _health(record: RunRecord) -> list[Any]:
    charts = []
    for key, title in HEALTH:
        series = metric_series(record.iterations, key)
        if series.points:
            charts.append(line_chart(title, [series]))
    deviation = largest_of(record.iterations, "velocity_dev/", "velocity_dev")
    if deviation.points:
        charts.append(
            line_chart("Velocity deviation of update against rollout, largest noise step", [deviation])
        )
    return charts


def _guard_charts(record: RunRecord) -> list[Any]:
    """One chart per signal; those of several noise steps share one."""
    lines = sorted((*record.iterations, *record.evaluations), key=lambda line: int(line["step"]))
    names = dict.fromkeys(key for line in lines for key in line if key.startswith("guard/"))
    by_signal: dict[str, list[str]] = {}
    for name in names:
        by_signal.setdefault(name.split("/")[1], []).append(name)
    charts = []
    for signal, keys in by_signal.items():
        several = [metric_series(lines, key, key.removeprefix(f"guard/{signal}/")) for key in keys]
        if any(series.points for series in several):
            charts.append(line_chart(signal if len(keys) == 1 else f"{signal} by noise step", several))
    return charts


def _heat_maps(record: RunRecord) -> list[Any]:
    """Spread of rewards and advantages by noise step and granularity, averaged over all groups."""
    fields = [("reward_std", name, f"{name}: spread within a group") for name in record.trained]
    fields += [("advantage_std", "", "spread of the advantages that a granularity would give alone")]
    maps = []
    for key, reward, title in fields:
        cells = by_noise_step(record, key, reward)
        if cells:
            maps.append(_map(record, title, cells))
    correlations = by_noise_step(record, "rank_correlation")
    if correlations:
        maps.append(_map(record, "rank correlation between granularities", correlations, ["all"]))
    return maps


def _map(
    record: RunRecord, title: str, cells: Mapping[tuple[int, int], float], columns: Sequence[str] = ()
) -> Any:
    steps = sorted({k for k, _ in cells})
    width = 1 + max(j for _, j in cells)
    known = record.config.get("granularities", [])
    if not columns:
        columns = [f"λ = {known[j]}" if len(known) == width else str(j) for j in range(width)]
    at = {(steps.index(k), j): value for (k, j), value in cells.items()}
    corner = "noise step k, granularity λ" if len(columns) > 1 else "noise step k"
    return heat_map(title, [str(k) for k in steps], columns, at, corner)


def _gains(record: RunRecord) -> dict[str, Any] | None:
    pairs = next((p for p in reversed(record.sets) if p.before_images and p.after_images and p.after), None)
    if pairs is None:
        return None
    weights = {name: float(weight) for name, weight in record.config.get("rewards", {}).items()}
    gain = gains(pairs, weights)
    order = [int(i) for i in np.argsort(gain) if math.isfinite(gain[i])]
    if not order:
        return None
    count = min(NUM_GAINS, len(order) // 2 or 1)
    chosen = {"The largest gains": order[::-1][:count], "The smallest gains": order[:count]}
    return {title: _with_images(record, pairs, indices, PAIR_BYTES // 4) for title, indices in chosen.items()}


# ---- cost and settings


def _planned(record: RunRecord) -> tuple[Costs | None, str]:
    """What `plan` predicts for this run, or why that is not known."""
    if is_custom(str(record.config.get("algorithm", ""))):
        return None, "a custom algorithm is not imported for a report, so there is no prediction"
    try:
        settings = read_settings(record.folder)
        processes = record.starts[-1]["num_processes"] if record.starts else 1
        gpu = str(record.starts[-1].get("device", "")) if record.starts else ""
        speeds = tabulated_speeds(settings, shape_of_run(settings), gpu)
        return plan_costs(settings, num_processes=processes, speeds=speeds), ""
    except (ValueError, OSError, KeyError) as error:
        return None, f"no prediction: {error}"


def _start(line: Mapping[str, Any]) -> list[tuple[str, str]]:
    packages = ", ".join(f"{name} {v}" for name, v in line.get("packages", {}).items() if v)
    memory = line.get("device_memory_gb")
    device = str(line.get("device")) + (f", {memory:.0f} GB" if memory else "")
    return [
        ("started", f"{line.get('time')}, at iteration {line['step']}"),
        ("device", f"{line.get('num_processes', 1)} × {device}"),
        ("system", f"{line.get('platform')}, Python {line.get('python')}"),
        ("packages", packages),
    ]


def _command(record: RunRecord) -> str:
    processes = record.starts[-1]["num_processes"] if record.starts else 1
    launch = "g2rpo" if processes == 1 else f"torchrun --nproc-per-node {processes} -m g2rpo"
    return f"{launch} train {record.folder}/config.toml out=NEW_FOLDER"


def _warning(line: Mapping[str, Any]) -> tuple[str, str, str]:
    text = line.get("message") or ", ".join(
        f"{k} {_text(v)}" for k, v in line.items() if k not in ("step", "kind")
    )
    return str(line.get("step", "")), str(line.get("kind", "")), str(text)


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", _text(value)))
    return rows


def _text(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    return str(value)
