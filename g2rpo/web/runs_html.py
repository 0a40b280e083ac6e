"""The tab "Runs" as HTML: the table of runs, their sample grids and their charts."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

from g2rpo.web.runs_data import RunView, facts, grid_at, sections

INTRODUCTION = (
    '<div class="g2rpo-view"><p>Choose one run, or several to compare. The page follows runs that are in '
    "progress. A run that is stopped here writes a checkpoint first; nothing can be deleted.</p></div>"
)

NO_RUNS = (
    "There are no runs yet. <code>g2rpo train</code> makes one in <code>runs/tiny</code>; or give run "
    "folders when you start the page: <code>g2rpo demo RUN …</code>"
)

HEADS = (
    "run",
    "state",
    "iterations",
    "reward, change since the start",
    "per iteration",
    "invalid",
    "warnings",
)


def table_html(views: Sequence[RunView], listed: int, selected: int) -> str:
    """Returns the table of the runs, with a message for each that cannot be shown.

    Args:
        views: the runs that are shown.
        listed: number of runs in the list.
        selected: number of runs that are chosen.
    """
    if not views:
        return f'<div class="g2rpo-view"><p>{"Choose a run." if listed else NO_RUNS}</p></div>'
    problems = [
        Markup('<p class="problem"><b>{}</b> cannot be shown: {}</p>').format(view.name, view.problem)
        for view in views
        if view.record is None
    ]
    if selected > len(views):
        problems.append(
            Markup(
                '<p class="problem">{} runs are chosen; the first {} are shown, one per colour.</p>'
            ).format(selected, len(views))
        )
    rows = [facts(view) for view in views if view.record is not None]
    head = "".join(f'<th scope="col">{name}</th>' for name in HEADS)
    body = "".join(
        Markup('<tr data-run="{0}"><th scope="row">{0}</th>{1}</tr>').format(
            row.name,
            Markup("").join(
                Markup("<td>{}</td>").format(text)
                for text in (
                    row.state.text,
                    row.iterations,
                    row.rewards,
                    row.seconds,
                    row.invalid,
                    row.warnings,
                )
            ),
        )
        for row in rows
    )
    records = [
        Markup('<p class="problem">{}: {}</p>').format(view.name, problem)
        for view in views
        if view.record is not None
        for problem in view.record.problems
    ]
    table = (
        '<div class="wide" tabindex="0" role="region" aria-label="runs"><table class="runs">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        if rows
        else ""
    )
    return f'<div class="g2rpo-view">{"".join(problems)}{table}{"".join(records)}</div>'


def grid_html(views: Sequence[RunView], steps: Sequence[int], position: int) -> str:
    """Returns the sample grids of all runs at one position of the slider."""
    shown = [view for view in views if view.record is not None]
    if not shown:
        return ""
    if not steps:
        return (
            '<div class="g2rpo-view"><h3>Samples</h3><p class="quiet">No sample grid is drawn yet '
            "(sample_every).</p></div>"
        )
    step = steps[position]
    parts = [
        f'<div class="g2rpo-view" data-iteration="{step}">'
        f'<h3 aria-live="polite">Samples at iteration {step}</h3><p class="quiet">Grid {position + 1} of '
        f"{len(steps)}; the same prompts and seeds at every iteration.</p>"
    ]
    for view in shown:
        try:
            own, images = grid_at(view, step)
        except ValueError as error:
            parts.append(Markup('<p class="problem">{}: {}</p>').format(view.name, str(error)))
            continue
        title = view.name if own in (step, None) else f"{view.name}, last grid before: iteration {own}"
        parts.append(Markup("<h4>{}</h4>").format(title))
        if own is None:
            parts.append('<p class="quiet">No grid at or before this iteration.</p>')
        parts.append('<div class="frames">')
        parts += [
            Markup('<figure><img src="{}" alt="{}"><figcaption>{}{}</figcaption></figure>').format(
                image.uri,
                f"iteration {own}: {image.prompt}",
                image.prompt,
                "" if image.seed is None else f", seed {image.seed}",
            )
            for image in images
        ]
        parts.append("</div>")
    return "".join(map(str, [*parts, "</div>"]))


def charts_html(views: Sequence[RunView]) -> str:
    """Returns the charts, one line per run."""
    if not any(view.record is not None for view in views):
        return ""
    parts = ['<div class="g2rpo-view">']
    for section in sections(views):
        parts.append(f"<h3>{escape(section.title)}</h3>")
        if section.charts:
            small = " small" if len(section.charts) > 4 else ""
            parts.append(f'<div class="charts{small}">{"".join(section.charts)}</div>')
        else:
            parts.append(f'<p class="quiet">Nothing to draw: {escape(section.missing)}.</p>')
    return "".join([*parts, "</div>"])
