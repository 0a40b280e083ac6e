"""What `g2rpo plan` prints: the verdict in a few lines, then the details as a table."""

from __future__ import annotations

from g2rpo.costs.costs import Costs
from g2rpo.costs.disk import size_text

LARGEST = 3
"""Parts of the memory that the verdict names."""


def verdict_lines(costs: Costs) -> list[str]:
    """Whether the run fits, its time, its disk space, and the largest parts of its memory."""
    memory = costs.memory
    peak = f"about {size_text(memory.peak)} per device at its peak, in the {memory.peak_phase}"
    if costs.fit:
        lines = list(costs.fit)
    elif costs.device_bytes is None:
        lines = [f"memory: {peak}; give --memory GB to see whether it fits"]
    else:
        lines = [f"fits: {peak}, of {size_text(costs.device_bytes)}"]
    parts = memory.always | memory.phases[memory.peak_phase]
    largest = sorted(parts.items(), key=lambda item: -item[1])[:LARGEST]
    lines.append("largest parts: " + ", ".join(f"{part} {size_text(size)}" for part, size in largest))
    if costs.run_seconds is None:
        lines.append(
            "time: unknown; give --gpu NAME or --seconds-per-forward S, or use --measure on that machine"
        )
    else:
        hours = costs.run_seconds / 3600
        devices = f" on {costs.num_processes} devices" if costs.num_processes > 1 else ""
        lines.append(
            f"time: {hours:,.1f} h{devices}" if hours >= 1 else f"time: {60 * hours:,.1f} min{devices}"
        )
    disk = sum(size for part, size in costs.disk.items() if part != "one checkpoint")
    lines.append(f"disk: {size_text(disk)}")
    return lines


def table_rows(costs: Costs) -> list[tuple[str, str, str]]:
    """The details: (section, item, value)."""
    shape = costs.shape
    table = [
        (
            "model",
            "image",
            f"{shape.width_px} x {shape.height_px} px, {shape.latent_shape[0]} latent tokens",
        ),
        ("model", "transformer", f"{shape.transformer_params / 1e6:,.1f} M parameters"),
        ("model", "trained", f"{costs.trained_params / 1e6:,.1f} M parameters"),
        ("model", "forward", f"{shape.forward_flops / 1e12:,.3g} TFLOP per image"),
    ]
    for part in ("anchor", "sde", "tails", "total"):
        item = f"rollout, {'all' if part == 'total' else part}"
        table.append(("forwards per iteration", item, f"{costs.forwards[part]:,.0f}"))
    for part, count in costs.update_forwards.items():
        item = "update (with backward)" if part == "policy" else f"update, {part}"
        table += [("forwards per iteration", item, f"{count:,.0f}")] if count else []
    table += [
        ("images per iteration", "decoded and scored", f"{costs.images:,.0f}"),
        *(
            ("group judgements per iteration", name, f"{count:,.0f} comparisons in {costs.cells:,.0f} cells")
            for name, count in costs.comparisons.items()
        ),
        ("forwards per run", "evaluations, samples, comparison", f"{costs.eval_forwards:,}"),
        (
            "compute",
            "entire run",
            f"{costs.flops / 1e15:,.0f} PFLOP" if costs.flops > 1e17 else f"{costs.flops / 1e15:,.3g} PFLOP",
        ),
    ]
    table.append(("compute", "samples per rollout forward", f"{costs.rollout_batch:,}"))
    memory = costs.memory
    table += [("memory per device, always", part, size_text(size)) for part, size in memory.always.items()]
    table.append(("memory per device, before", "text encoders", size_text(memory.encoders)))
    for phase, parts in memory.phases.items():
        table += [
            (f"memory per device, {phase}", part, f"about {size_text(size)}") for part, size in parts.items()
        ]
    peak = f"about {size_text(memory.peak)}, in the {memory.peak_phase}"
    table.append(("memory per device", "peak", peak))
    table += [("disk", part, size_text(size)) for part, size in costs.disk.items()]
    table += [("time per iteration", part, f"{seconds:,.1f} s") for part, seconds in costs.seconds.items()]
    if costs.run_seconds is not None and costs.speeds is not None:
        table.append(("time per iteration", "total", f"{sum(costs.seconds.values()):,.1f} s"))
        scoring = "" if costs.speeds.reward or costs.speeds.cell else ", without scoring"
        hours = costs.run_seconds / 3600
        devices = f" on {costs.num_processes} devices" if costs.num_processes > 1 else ""
        table.append(("time", f"entire run{scoring}", f"{hours:,.2f} h{devices}"))
        table.append(("time", f"entire run{scoring}", f"{hours * costs.num_processes:,.1f} device hours"))
        table.append(("time", "source of the times", costs.speeds.source))
    if costs.released_gpu_hours is not None:
        table.append(("time", "released code's forwards", f"{costs.released_gpu_hours:,.0f} device hours"))
    return table + [("note", "", note) for note in costs.notes]
