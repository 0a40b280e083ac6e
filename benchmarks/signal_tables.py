"""The tables of gradient_signal.py, as Markdown on stdout."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def show(reward: str, r: int, report: dict[str, Any], num_steps: int, trained: int) -> None:
    """Prints the tables of reward number `r` that `report` contains."""

    def line(*cells: str) -> None:
        print(f"| {' | '.join(cells)} |", flush=True)

    def title(what: str, *cells: str) -> None:
        print(f"\n{reward}: {what}\n")
        line("arm", *cells)
        line(*["---"] * (len(cells) + 1))

    def pm(value: Tensor | float, error: Tensor | float, digits: int = 2) -> str:
        return f"{value:.{digits}f} ± {error:.{digits}f}"

    steps = [f"step {k}" for k in range(num_steps - 1)]
    if "shares" in report:
        title("share of a path's variance by a step's noise / variance of singular noise over it", *steps)
    for name, of in report.get("shares", {}).items():
        values = zip(*(of[key][r] for key in ("share", "share_error", "ratio", "ratio_error")), strict=True)
        cells = [f"{pm(*four[:2])} / {pm(*four[2:])}" for four in values]
        line(name, *cells, *[""] * (num_steps - 1 - len(cells)))
    if "advantages" in report:
        title("reliability of an advantage; its std over redraws", *steps[:trained], "mean", "std")
    for name, of in report.get("advantages", {}).items():
        cells = [f"{value:.2f}" for value in of["reliability"][r][:-1]]
        line(name, *cells, *(pm(of[key][r][-1], of[f"{key}_error"][r][-1]) for key in ("reliability", "std")))
    title(
        "signal-to-noise ratio (SNR) of the gradient",
        "repeats",
        "forwards a prompt",
        "update rows",
        "SNR",
        "per 1,000 forwards",
        "over {1}",
        "cosine to the reference",
        "per 1,000 along it",
        "with the update",
    )
    for name, of in report["gradients"][reward].items():
        cells = [f"{of[key]:.0f}" for key in ("repeats", "forwards", "update_rows")]
        for key, digits in (("snr", 3), ("per_1000", 4), ("gain", 2), ("cosine", 2)):
            cells.append(pm(of[key], of[f"{key}_error"], digits) if key in of else "")
        line(name, *cells, *(f"{of[key]:.4f}" if key in of else "" for key in ("aligned", "with_update")))
