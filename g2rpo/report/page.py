"""Writes the report of a run: RUN/report.html, one page without external files.

The page's parts are in the order in which a reader asks: what came out, how it came about, whether the run
was healthy, what it cost, and how to repeat it. A part whose data were not recorded says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import jinja2

from g2rpo.algorithms.registry import is_custom
from g2rpo.config.load import read_settings
from g2rpo.costs.costs import Costs, plan_costs
from g2rpo.costs.memory import shape_of_run
from g2rpo.costs.speeds import tabulated_speeds
from g2rpo.inference.images import read_png_text
from g2rpo.report.charts import Series, heat_map, line_chart, number, signed
from g2rpo.report.findings import (
    Difference,
    by_noise_step,
    cost_rows,
    differences,
    evaluated_names,
    evaluation_series,
    gains,
    headline,
    largest_of,
    metric_series,
    reward_series,
    unpaired_evaluations,
)
from g2rpo.report.health import constant_note, is_constant, preflight_rows
from g2rpo.report.pictures import embedded, fitting_steps
from g2rpo.report.record import MALFORMED, PairedSet, RunRecord, read_run
from g2rpo.runtime.files import write_atomic
from g2rpo.runtime.style import css_variables

T = TypeVar("T")

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

BY_METRIC = ("fall_z", "reward_drift")
"""Signals of the guard that have a value per metric; the others have one per noise step."""


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
    parts = _Parts(list(record.problems))
    planned, no_plan = _planned(record)
    main, sets = parts.of("verdict", lambda: _sets(record), ([], []))
    charts, constant = parts.of("health", lambda: _health(record), ([], ""))
    guard, guard_constant = parts.of("guard", lambda: _guard_charts(record), ([], ""))
    sections = {
        "pairs": parts.of("pairs of images", lambda: _pairs(record), None),
        "slider": parts.of("images during training", lambda: _slider(record), None),
        "reward_charts": parts.of("rewards", lambda: _reward_charts(record), []),
        "preflight": parts.of("pre-flight", lambda: preflight_rows(record.preflight), []),
        "heat_maps": parts.of("groups", lambda: _heat_maps(record), []),
        "gains": parts.of("gains", lambda: _gains(record), None),
        "cost": parts.of("cost", lambda: cost_rows(record, planned), []),
        "starts": parts.of("environment", lambda: [_start(line) for line in record.starts], []),
    }
    return environment.get_template("page").render(
        style=css_variables() + (here / "page.css").read_text(encoding="utf-8"),
        script=(here / "page.js").read_text(encoding="utf-8"),
        title=record.folder.resolve().name,
        summary=_summary(record),
        state=_state(record),
        headline=headline(main),
        verdict=_verdict(record, main, sets),
        sets=[(pairs.title, rows) for pairs, rows in sets],
        health=charts,
        constant=constant,
        preflight_values=_flat(
            {k: v for k, v in record.preflight.items() if k not in ("settings", "limits")}
        ),
        preflight_warnings=[_text(text) for text in record.preflight.get("warnings", ())],
        guard=guard,
        guard_constant=guard_constant,
        guard_warnings=[_warning(line) for line in record.warnings if line.get("kind") != "preflight"],
        no_plan=no_plan,
        warnings=[_warning(line) for line in record.warnings],
        problems=parts.problems,
        settings=[(key, _text(value)) for key, value in record.config.items()],
        config_text=record.config_text,
        command=_command(record),
        number=number,
        signed=signed,
        **sections,
    )


class _Parts:
    """Makes the parts of the page; one whose records are damaged or foreign is noted, and the others stay.

    Attributes:
        problems: what could not be read, for the page.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems

    def of(self, name: str, make: Callable[[], T], empty: Any) -> T:
        """Returns what `make` returns, or `empty`, of the same type, if it cannot be made."""
        try:
            return make()
        except MALFORMED as error:
            reason = str(error) if type(error) is ValueError else f"unexpected content, {error!r}"
            self.problems.append(f"{name}: {reason}")
            nothing: T = empty
            return nothing


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
    if record.running:
        return f"in progress: {record.done} of {total} iterations"
    if record.running is None:
        return f"{record.done} of {total} iterations; in progress on another machine, or interrupted"
    if record.done == total:
        return f"all {total} iterations; the images after training are not recorded"
    return f"interrupted: {record.done} of {total} iterations"


def _sets(record: RunRecord) -> tuple[list[Difference], list[tuple[PairedSet, list[Difference]]]]:
    """The differences that the verdict is about, and those of every set of pairs."""
    sets = [(pairs, differences(pairs, record.trained)) for pairs in record.sets if pairs.after]
    if not sets and record.evaluated is not None:
        sets = [(record.evaluated, differences(record.evaluated, record.trained))]
    return (sets[-1][1] if sets else []), sets  # unseen prompts come last


def _verdict(
    record: RunRecord, main: Sequence[Difference], sets: Sequence[tuple[PairedSet, Any]]
) -> list[str]:
    if not main:
        none = "No images of the same prompts and seeds were scored before and after, so there is no verdict."
        unpaired = unpaired_evaluations(record)
        return [none, *(["Means of the evaluations: " + "; ".join(unpaired) + "."] if unpaired else [])]
    trained = [row.sentence for row in main if row.trained]
    held_out = [row.sentence for row in main if not row.trained]
    lines = [f"On {main[0].prompts} prompts ({sets[-1][0].title}), same seeds before and after."]
    if trained:
        lines.append("Trained: " + "; ".join(trained) + ".")
    lines.append("Held out: " + ("; ".join(held_out) + "." if held_out else "no reward was held out."))
    return lines


def _pairs(record: RunRecord) -> dict[str, Any] | None:
    """Pairs of the last set, spread evenly over its prompts; or of the sample grids, if there is none yet."""
    pairs = next((p for p in reversed(record.sets) if p.before_images and p.after_images), None)
    after = "after training"
    if pairs is None:
        steps = [step for step, images in record.samples.items() if images]
        if len(steps) < 2:
            return None
        pairs, after = _of_samples(record, steps[0], steps[-1]), f"at iteration {steps[-1]}"
    count = len(pairs.prompts)
    number = min(NUM_PAIRS, count)
    chosen = sorted({round(i * (count - 1) / max(1, number - 1)) for i in range(number)})
    return {"rows": _with_images(record, pairs, chosen, PAIR_BYTES // 2), "after": after}


def _of_samples(record: RunRecord, first: int, last: int) -> PairedSet:
    """The sample grids of two iterations as pairs without scores."""
    before, after = record.samples[first], record.samples[last]
    texts = [read_png_text(file) for file in after]
    return PairedSet(
        "sample grid",
        tuple(prompt or file.name for (prompt, _), file in zip(texts, after, strict=True)),
        tuple(info.get("seed", "unknown") for _, info in texts),
        {},
        {},
        before[: len(after)],
        after[: len(before)],
    )


def _with_images(
    record: RunRecord, pairs: PairedSet, chosen: Sequence[int], budget: int
) -> list[dict[str, Any]]:
    images = [file for i in chosen for file in (pairs.before_images[i], pairs.after_images[i])]
    uris, _ = embedded(images, budget)
    both = [name for name in pairs.before if name in pairs.after]
    names = sorted(both, key=lambda name: name not in record.trained)
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
    rows: dict[str, list[tuple[int, Any]]] = {}
    for i, file in enumerate(record.samples[steps[-1]][:count]):
        prompt, info = read_png_text(file)
        rows.setdefault(prompt or file.name, []).append((i, info.get("seed", "unknown")))
    frames = [[uris[n * count + i] for n in range(len(steps))] for i in range(count)]
    return {"steps": steps, "frames": frames, "rows": rows, "edge": edge, "all": len(record.samples)}


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


def _health(record: RunRecord) -> tuple[list[Any], str]:
    """Charts of the metrics that changed, and a sentence on those that did not."""
    series = {title: metric_series(record.iterations, key) for key, title in HEALTH}
    title = "Velocity deviation of update against rollout, largest noise step"
    series[title] = largest_of(record.iterations, "velocity_dev/", "velocity_dev")
    return _changing({title: [one] for title, one in series.items() if one.points})


def _changing(charts: Mapping[str, Sequence[Series]]) -> tuple[list[Any], str]:
    """Charts with a line that is not constant, and a sentence on the others."""
    constant = {title: several for title, several in charts.items() if all(map(is_constant, several))}
    drawn = [line_chart(title, several) for title, several in charts.items() if title not in constant]
    return drawn, constant_note(constant)


def _guard_charts(record: RunRecord) -> tuple[list[Any], str]:
    """One chart per signal; those of several noise steps share one."""
    lines = sorted((*record.iterations, *record.evaluations), key=lambda line: int(line["step"]))
    names = dict.fromkeys(key for line in lines for key in line if key.startswith("guard/"))
    by_signal: dict[str, list[str]] = {}
    for name in names:
        by_signal.setdefault(name.split("/")[1], []).append(name)
    charts = {}
    for signal, keys in by_signal.items():
        several = [metric_series(lines, key, key.removeprefix(f"guard/{signal}/")) for key in keys]
        several = [series for series in several if series.points]
        if several:
            by = " by metric" if signal in BY_METRIC else " by noise step" if len(keys) > 1 else ""
            charts[signal + by] = several
    return _changing(charts)


def _heat_maps(record: RunRecord) -> list[Any]:
    """Spread of rewards and advantages by noise step and granularity, averaged over all groups."""
    fields = [("reward_std", name, f"{name}: spread within a group") for name in record.trained]
    fields += [("advantage_std", "", "spread of the advantages that a granularity would give alone")]
    maps = []
    for key, reward, title in fields:
        cells = by_noise_step(record, key, reward)
        if cells:
            maps.append(_map(record, title, cells))
    used = by_noise_step(record, "advantage_abs")
    if used:
        maps.append(_map(record, "mean |advantage| that the update used", used, ["all"]))
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
    ordered = gains(pairs, weights)
    if not ordered:
        return None
    count = min(NUM_GAINS, len(ordered) // 2 or 1)
    result = {}
    for title, chosen in (
        ("The largest gains", ordered[:count]),
        ("The smallest gains", ordered[::-1][:count]),
    ):
        rows = _with_images(record, pairs, [gain.pairs[0] for gain in chosen], PAIR_BYTES // 4)
        result[title] = [
            row | {"gain": gain.gain, "images": len(gain.pairs)}
            for row, gain in zip(rows, chosen, strict=True)
        ]
    return result


# ---- cost and settings


def _planned(record: RunRecord) -> tuple[Costs | None, str]:
    """What `plan` predicts for this run, or why that is not known."""
    if is_custom(str(record.config.get("algorithm", ""))):
        return None, "a custom algorithm is not imported for a report, so there is no prediction"
    try:
        settings = read_settings(record.folder)
        processes = record.num_processes
        gpu = str(record.starts[-1].get("device", "")) if record.starts else ""
        speeds = tabulated_speeds(settings, shape_of_run(settings), gpu)
        no_times = (
            ""
            if speeds
            else (
                f"g2rpo plan has no times for this model on {gpu or 'an unknown device'}; to measure them on "
                f"that device, use g2rpo plan {record.folder}/config.toml --measure"
            )
        )
        return plan_costs(settings, num_processes=processes, speeds=speeds), no_times
    except (*MALFORMED, OSError) as error:
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
    processes = record.num_processes
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
