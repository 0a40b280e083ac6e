"""An explored group as HTML: the parts of the method in order, each with a short explanation beside it."""

from __future__ import annotations

import math

import torch
from markupsafe import Markup, escape
from torch import Tensor

from g2rpo.report.charts import number
from g2rpo.web.explore_data import Cell, ExploredGroup, ExploreRequest
from g2rpo.web.view import LOSSLESS_PX, image_uri

INTRODUCTION = """
<div class="g2rpo-view"><p>A training iteration makes a <b>group</b> of images of one prompt, scores them, and
raises the probability of what led to the better ones. This page makes one group with the functions of
training and shows every part. Choose a preset, then press <b>Explore</b>. Compare the first two presets: with
<b>one noise step</b> (singular sampling) all members start the step from the same state, so a difference
between their images comes from that step; with <b>noise at every step</b> (path sampling) one image judges
all steps at once.</p></div>
"""


def summary(request: ExploreRequest) -> str:
    """Returns the request as a line of text."""
    if request.sampling == "path":
        how = f"noise at steps 0 to {request.num_steps - 2}"
    else:
        steps = ", ".join(map(str, sorted(request.noise_steps)))
        strides = ", ".join(map(str, sorted(request.granularities)))
        how = f"noise at k = {steps}, granularities {{{strides}}}"
    start = "shared initial noise" if request.shared_start else "initial noise of its own for each member"
    coupled = "" if request.noise == "independent" else f", {request.noise} noise"
    return (
        f"{how}, G = {request.group_size}, T = {request.num_steps}, eta = {request.eta:g}, "
        f"seed {request.seed}, {start}{coupled}"
    )


def group_html(group: ExploredGroup) -> str:
    """Returns the explored group as HTML."""
    request = group.request
    rewards = ", ".join(
        name if weight == 1 else f"{weight:g} × {name}" for name, weight in request.rewards.items()
    )
    parts = [
        f'<div class="g2rpo-view" id="explore-group"><h3>{escape(request.prompt)}</h3>'
        f'<p class="quiet">{escape(summary(request))}. Reward: {escape(rewards)}. '
        f"{group.nfe['total']} forwards of the model, {group.seconds:.1f} s.</p>",
        *(
            f'<p class="problem">{escape(name)} gave no score for some images: {escape(reason)}</p>'
            for name, reason in group.problems.items()
        ),
        _anchor_html(group),
    ]
    for cell in group.cells:
        parts += [_branches_html(group, cell), _favoured_html(group, cell)]
    return "".join(map(str, [*parts, "</div>"]))


def _anchor_html(group: ExploredGroup) -> Markup:
    request = group.request
    noisy = {k for cell in group.cells for k in cell.noise_steps}
    figures = []
    for i, sigma in enumerate(request.sigmas.tolist()):
        marked = ' class="noisy"' if i in noisy else ""
        label = "image" if i == request.num_steps else f"k = {i}" + (", noise" if i in noisy else "")
        state = _img(group.anchor.states[i], f"state at sigma {sigma:.2f}")
        predicted = _img(group.anchor.predictions[i], f"image predicted at sigma {sigma:.2f}")
        figures.append(
            f"<figure><div{marked}>{state}</div><div>{predicted}</div>"
            f"<figcaption>{label}<br>σ = {sigma:.2f}</figcaption></figure>"
        )
    path = " This is the path of the first member." if not request.shared_start else ""
    path += " The members leave it at the first step." if request.sampling == "path" else ""
    return Markup(
        f"<h3>1. The anchor path</h3><p>The ODE leads from noise (σ = 1) to an image (σ = 0) in "
        f"{request.num_steps} denoising steps, without randomness: upper row the state, lower row the image "
        f"that the model predicts from it. Early steps decide the composition, late ones the details. Noise "
        f"enters at the framed states.{path} Reward of the anchor's image: "
        f"<b>{escape(_scores(request, group.anchor_rewards))}</b>.</p>"
        f'<div class="wide" tabindex="0" role="region" aria-label="anchor path"><div class="strip">'
        f"{''.join(figures)}</div></div>"
    )


def _branches_html(group: ExploredGroup, cell: Cell) -> Markup:
    request = group.request
    is_path = request.sampling == "path"
    if is_path:
        title = f"2. {request.group_size} paths with noise at every step"
        text = (
            "Each member gets noise of its own at every step but the last. Its one image is scored, and the "
            "same advantage counts for all its noise steps: which of them made the image better is not known."
        )
    else:
        (k,) = cell.noise_steps
        title = f"2. {request.group_size} branches from noise step k = {k}"
        shared = (
            f"All members start from the same state x<sub>{k}</sub>"
            if request.shared_start
            else f"Each member has a state x<sub>{k}</sub> of its own, so part of the differences comes from "
            "the initial noise"
        )
        text = (
            f"{shared}; each adds noise of its own at this step and is finished by the ODE once per "
            "<b>granularity</b> λ: λ = 1 takes every remaining denoising step, λ = 2 every second one. "
            "Coarse tails are cheaper and show the branch from another view."
        )
    order = cell.order
    largest = float(cell.advantages.abs().max()) or 1.0
    head = "".join(_head(cell, g, largest) for g in order)
    rows = []
    for j, stride in enumerate(cell.granularities):
        cells = "".join(f"<td>{_branch(request, cell, j, g)}</td>" for g in order)
        name = "image" if is_path else f"granularity {stride}"
        rows.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    adds = " and what it adds to the advantage" if len(cell.granularities) > 1 else ""
    agreement = cell.agreement
    agree = (
        ""
        if agreement is None or not math.isfinite(agreement)
        else f" The rankings by the granularities have a rank correlation of {two_decimals(agreement)} (1: "
        "the same order, 0: unrelated)."
    )
    return Markup(
        f"<h3>{title}</h3><p>{text}</p>"
        "<p>The <b>advantage</b> of a branch is how far its reward lies above the mean of the group, in "
        "standard deviations, summed over rewards and granularities and bounded at ±5. Branches are sorted "
        f"by it; below each image stand its rewards{adds}.{agree}</p>"
        f'<div class="wide" tabindex="0" role="region" aria-label="{title[3:]}"><table class="group">'
        f'<thead><tr><th scope="col">advantage</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody>'
        "</table></div>"
    )


def _head(cell: Cell, member: int, largest: float) -> str:
    value = float(cell.advantages[member])
    if not bool(cell.valid[member]):
        kind, verdict = "", "no score"
    elif value > 0:
        kind, verdict = "raise", "▲ raise"
    elif value < 0:
        kind, verdict = "lower", "▼ lower"
    else:
        kind, verdict = "", "unchanged"
    width = 100 * abs(value) / largest
    return (
        f'<th scope="col" data-member="{member}" data-advantage="{value:.6g}"><span class="value">member '
        f'{member + 1}</span><span class="verdict {kind}">{verdict} {two_decimals(value)}<span class="bar">'
        f'<i style="width:{width:.0f}%"></i></span></span></th>'
    )


def _branch(request: ExploreRequest, cell: Cell, j: int, member: int) -> str:
    scores = cell.rewards[:, j, member]
    part = float(cell.parts[j, member])
    adds = f'<span class="value">adds {two_decimals(part)}</span>' if len(cell.granularities) > 1 else ""
    values = "".join(
        f'<span class="value" data-reward="{escape(name)}">{escape(name)} {_number(float(score))}</span>'
        for name, score in zip(request.rewards, scores, strict=True)
    )
    alt = f"member {member + 1}, granularity {cell.granularities[j]}"
    return f"{_img(cell.images[j, member], alt)}{values}{adds}"


def _favoured_html(group: ExploredGroup, cell: Cell) -> Markup:
    request = group.request
    steps = "all noise steps" if request.sampling == "path" else f"noise step k = {cell.noise_steps[0]}"
    title = f"<h3>3. What the update favours at {steps}</h3>"
    if not cell.has_advantages:
        why = "no branch has a score" if not bool(cell.valid.any()) else "all branches have the same reward"
        return Markup(f'{title}<p class="problem">Nothing: {why}, so all advantages are 0.</p>')
    up = int((cell.advantages > 0).sum())
    down = int((cell.advantages < 0).sum())
    figures = []
    favoured, other = cell.mean_image(True), cell.mean_image(False)
    for image, caption in ((favoured, "favoured, mean"), (other, "disfavoured, mean")):
        if image is not None:
            figures.append(_figure(_to_bytes(image), caption))
    if favoured is not None and other is not None:
        gap = favoured - other
        scale = float(gap.abs().max()) or 1.0
        figures.append(_figure(_to_bytes(0.5 + 0.5 * gap / scale), "difference (gray: none)"))
    return Markup(
        f"{title}<p>The update raises the probability of {up} branches and lowers that of {down}, each in "
        "proportion to its advantage. The means are weighted by the advantages; their difference shows where "
        f'and in which colours the two sides differ.</p><div class="images">{"".join(figures)}</div>'
        f"{_push_html(request, cell)}"
    )


def _push_html(request: ExploreRequest, cell: Cell) -> str:
    if cell.push is None:
        why = (
            "With noise at every step the members part from the second step on: each step of each member has "
            "a state and a gradient of its own, and there is no single direction to show."
            if request.sampling == "path"
            else "The members do not share the state before the step, so there is no one direction to show."
        )
        return f'<p class="quiet">{why}</p>'
    figures = [
        _figure(image, f"{caption}<br>{escape(_scores(request, cell.push.rewards[:, n]))}")
        for n, (image, caption) in enumerate(
            zip(
                cell.push.images,
                ("▼ against the update", "mean of the step", "▲ along the update"),
                strict=True,
            )
        )
    ]
    return (
        "<h4>Where the gradient points</h4><p>All branches share one state, so their noise, weighted by the "
        "advantages, adds up to one direction: the gradient of the training loss at this step. Here the mean "
        "of the step is moved along it and against it by one standard deviation of the step's noise, and "
        f"finished by the ODE.{_branch_mean(request, cell)} An optimizer step moves it far less, and one "
        "small group is a rough estimate: training averages over many.</p>"
        f'<div class="images">{"".join(figures)}</div>'
    )


def _branch_mean(request: ExploreRequest, cell: Cell) -> str:
    """The mean reward of the branches with tails of stride 1, which lie as far from the mean of the step."""
    if 1 not in cell.granularities:
        return ""
    mean = cell.rewards[:, cell.granularities.index(1)].nanmean(1)
    return (
        " Compare with the branches of granularity 1, whose noise has the same size (on average "
        f"{escape(_scores(request, mean))})."
    )


def two_decimals(value: float) -> str:
    """Formats an advantage, always with its sign."""
    return f"{value:+.2f}".replace("-", "\N{MINUS SIGN}")


def _figure(pixels: Tensor, caption: str) -> str:
    alt = caption.split("<br>")[0]
    return f"<figure>{_img(pixels, alt)}<figcaption>{caption}</figcaption></figure>"


def _img(pixels: Tensor, alt: str) -> str:
    kind = ' class="pixels"' if max(pixels.shape[1:]) <= LOSSLESS_PX else ""
    return f'<img{kind} src="{image_uri(pixels)}" alt="{escape(alt)}">'


def _to_bytes(image: Tensor) -> Tensor:
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)


def _number(value: float) -> str:
    return number(value) if math.isfinite(value) else "no score"


def _scores(request: ExploreRequest, scores: Tensor) -> str:
    return ", ".join(
        f"{name} {_number(float(score))}" for name, score in zip(request.rewards, scores, strict=True)
    )
