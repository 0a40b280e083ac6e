"""The tab "Vote": a blind comparison of two models on the visitor's prompts."""

from __future__ import annotations

import html
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from g2rpo.data.prompts import SUFFIXES
from g2rpo.web.context import WebContext
from g2rpo.web.generate import STEPS, examples
from g2rpo.web.inputs import checked_count, prompt_list
from g2rpo.web.jobs import MODEL_QUEUE, Job, Progress, messages, status_html
from g2rpo.web.sampling import SHIFT, ImageRequest, checked_request, sample_image, save_image
from g2rpo.web.vote_data import Ballot, Pair, Vote, pairs_of, result_of

MAX_BALLOTS = 1000
"""Ballots that are kept for the common result; their CSV files are kept in any case."""

SCROLLED = "<div class='g2rpo-table' role='region' aria-label='table' tabindex='0'>"
"""Around a table that may be wider than the window: it can then be scrolled with the keyboard."""

Updates = dict[Any, Any]


@dataclass
class Voting:
    """All ballots of this server. They stay here, so that a browser never receives which side is which.

    Attributes:
        context: the page.
        ballots: voter -> ballot.
    """

    context: WebContext
    ballots: OrderedDict[str, Ballot] = field(default_factory=OrderedDict)

    def begin(
        self, text: Any, file: Any, first: Any, second: Any, steps: Any, guidance: Any, seed: Any, images: Any
    ) -> Ballot:
        """Returns a new ballot from what a visitor entered.

        Raises:
            ValueError: a value is missing or out of range, or both models are the same.
        """
        context = self.context
        prompts = prompt_list(text, file, context.limits)
        models = (context.model(first).label, context.model(second).label)
        request = checked_request(context, prompts[0], seed, steps, guidance)
        per_prompt = checked_count(images, "Images per prompt", 1, context.limits.vote_images)
        coin = random.SystemRandom()  # a voter can't predict the sides from the seed
        ballot = Ballot(
            models,
            pairs_of(prompts, models, request.seed, per_prompt, coin),
            {"steps": request.steps, "guidance": request.guidance, "shift": SHIFT},
            {label: context.model(label).model for label in models},
        )
        self.ballots[ballot.voter] = ballot
        while len(self.ballots) > MAX_BALLOTS:
            self.ballots.popitem(last=False)
        return ballot

    def ballot(self, voter: Any) -> Ballot:
        """Returns the ballot of a voter.

        Raises:
            ValueError: there is none.
        """
        ballot = self.ballots.get(voter) if isinstance(voter, str) else None
        if ballot is None:
            raise ValueError("There is no vote to continue; start a new one")
        return ballot

    def images(self, ballot: Ballot, pair: Pair, job: Job) -> tuple[str, str]:
        """Samples the images of a pair in a job; returns their files, which do not tell the models.

        Both are sampled under the conditions of the ballot's first model, in its order, whichever side they
        are on.
        """
        settings = ballot.settings
        request = ImageRequest(pair.prompt, pair.seed, settings["steps"], settings["guidance"])
        files: dict[str, Path] = {}
        conditions = None
        for number, label in enumerate(ballot.models, 1):
            report = partial(_blind_report, job, number)
            sampled = sample_image(self.context, report, label, request, conditions)
            conditions = sampled.conditions
            files[label] = save_image(self.context, "image", pair.prompt, sampled.image, {})
        return str(files[pair.left]), str(files[pair.right])

    def together(self, models: tuple[str, str]) -> tuple[int, list[Vote]]:
        """Returns the number of voters and all votes on these two models, in either order."""
        ballots = [b for b in self.ballots.values() if set(b.models) == set(models) and b.votes]
        return len(ballots), [vote for ballot in ballots for vote in ballot.votes]


def _blind_report(job: Job, number: int, done: int, total: int, activity: str) -> None:
    """Reports progress without the activity, which names the model."""
    job.report(done, total, f"image {number} of 2: denoising step")


@dataclass(frozen=True)
class _Setup:
    panel: gr.Column
    values: list[Any]
    start: gr.Button

    @classmethod
    def build(cls, context: WebContext) -> _Setup:
        first, second = context.pair
        labels, limits = list(context.models), context.limits
        with gr.Column(elem_id="vote-setup") as panel:
            with gr.Row():
                prompts = gr.Textbox(
                    "\n".join(examples(context)),
                    label="Prompts, one per line",
                    lines=6,
                    max_lines=20,
                    scale=2,
                    min_width=280,
                    elem_id="vote-prompts",
                )
                file = gr.File(
                    label="or a file of prompts", file_types=list(SUFFIXES), elem_id="vote-file", height=180
                )
            with gr.Row():
                model_first = gr.Dropdown(
                    labels, value=first, label="First model", elem_id="vote-model-first"
                )
                model_second = gr.Dropdown(
                    labels, value=second or first, label="Second model", elem_id="vote-model-second"
                )
            with gr.Row():
                steps = gr.Slider(
                    1, limits.steps, STEPS, step=1, label="Denoising steps", elem_id="vote-steps"
                )
                guidance = gr.Slider(
                    0, limits.guidance, 3.5, step=0.1, label="Guidance", elem_id="vote-guidance"
                )
                images = gr.Slider(
                    1, limits.vote_images, 1, step=1, label="Images per prompt", elem_id="vote-images"
                )
                seed = gr.Number(0, label="First seed", precision=0, elem_id="vote-seed")
            start = gr.Button("Start voting", variant="primary", elem_id="vote-start")
        values = [prompts, file, model_first, model_second, steps, guidance, seed, images]
        return cls(panel, values, start)


@dataclass(frozen=True)
class _Booth:
    panel: gr.Column
    heading: gr.HTML
    images: tuple[gr.Image, gr.Image]
    choices: dict[str, gr.Button]
    again: gr.Button
    finish: gr.Button

    @classmethod
    def build(cls) -> _Booth:
        with gr.Column(visible=False, elem_id="vote-booth") as panel:
            heading = gr.HTML(elem_id="vote-heading")
            images, choices = [], {}
            with gr.Row():
                for side, title in (("left", "Left is better"), ("right", "Right is better")):
                    with gr.Column(min_width=240):
                        images.append(
                            gr.Image(
                                label=side,
                                type="filepath",
                                interactive=False,
                                height=380,
                                buttons=["fullscreen"],
                                elem_id=f"vote-image-{side}",
                                elem_classes="g2rpo-image",
                                alt_text=f"image on the {side}",
                            )
                        )
                        choices[side] = gr.Button(
                            title, variant="primary", interactive=False, elem_id=f"vote-{side}"
                        )
            with gr.Row():
                choices["tie"] = gr.Button("No preference", interactive=False, elem_id="vote-tie")
                again = gr.Button("Show this pair again", elem_id="vote-again")
                finish = gr.Button("Finish and show the result", elem_id="vote-finish")
        return cls(panel, heading, (images[0], images[1]), choices, again, finish)


@dataclass(frozen=True)
class _Page:
    setup: _Setup
    booth: _Booth
    status: gr.HTML
    result: gr.HTML
    file: gr.DownloadButton
    voter: gr.State

    @property
    def changed(self) -> list[Any]:
        """All components that the handlers change."""
        booth = self.booth
        return [
            self.setup.panel,
            booth.panel,
            booth.heading,
            *booth.images,
            *booth.choices.values(),
            self.status,
            self.result,
            self.file,
            self.voter,
        ]

    def open_choices(self, is_open: bool) -> Updates:
        """Lets a visitor choose, or not."""
        return {button: gr.update(interactive=is_open) for button in self.booth.choices.values()}


def vote_tab(context: WebContext) -> None:
    """Builds the tab; call it inside its `gr.Tab`."""
    gr.Markdown(
        "Which of two models do people prefer? Both images of a pair have the same prompt and the same "
        "noise; the sides are drawn at random and are revealed at the end. Every vote is saved at once to a "
        "CSV file in the server's folder of votes."
    )
    setup = _Setup.build(context)
    status = gr.HTML(status_html("ready"), elem_id="vote-status")
    booth = _Booth.build()
    result = gr.HTML(elem_id="vote-result", visible=False)
    file = gr.DownloadButton("Download the votes (CSV)", visible=False, elem_id="vote-file-csv")
    page = _Page(setup, booth, status, result, file, gr.State(None))
    voting = Voting(context)

    def start(*values: Any) -> Iterator[Updates]:
        with messages():
            ballot = voting.begin(*values)
            yield {
                page.voter: ballot.voter,
                setup.panel: gr.update(visible=False),
                booth.panel: gr.update(visible=True),
                result: gr.update(visible=False),
                file: gr.update(visible=False),
            }
            yield from _next(page, voting, ballot)

    def choose(choice: str) -> Any:
        def handler(voter: Any) -> Iterator[Updates]:
            with messages():
                ballot = voting.ballot(voter)
                ballot.vote(choice)
                ballot.save(context.votes)
                yield from _next(page, voting, ballot)

        return handler

    def again(voter: Any) -> Iterator[Updates]:
        with messages():
            yield from _next(page, voting, voting.ballot(voter))

    def finish(voter: Any) -> Updates:
        with messages():
            return _finished(page, voting, voting.ballot(voter))

    model: dict[str, Any] = {
        "show_progress": "hidden",
        "trigger_mode": "once",
        "api_visibility": "private",
        **MODEL_QUEUE,
    }
    running: list[Any] = [setup.start.click(start, setup.values, page.changed, **model)]
    for choice, button in booth.choices.items():
        running.append(button.click(choose(choice), page.voter, page.changed, **model))
    running.append(booth.again.click(again, page.voter, page.changed, **model))
    private: dict[str, Any] = {"queue": False, "api_visibility": "private"}
    # First the job ends, then the result is shown: progress that is still under way would replace it.
    booth.finish.click(lambda: None, None, None, cancels=running, **private).then(
        finish, page.voter, page.changed, **private
    )


def _next(page: _Page, voting: Voting, ballot: Ballot) -> Iterator[Updates]:
    """Yields the changes of the page until the next pair can be voted on, or the result."""
    pair = ballot.pair
    if pair is None:
        yield _finished(page, voting, ballot)
        return
    number, total = len(ballot.votes) + 1, len(ballot.pairs)
    booth = page.booth
    yield {
        booth.heading: f'<p class="g2rpo-prompt">{number} of {total}: <strong>{html.escape(pair.prompt)}'
        "</strong></p>",
        booth.images[0]: None,
        booth.images[1]: None,
        **page.open_choices(False),
    }
    for event in voting.context.jobs.run(lambda job: voting.images(ballot, pair, job)):
        if isinstance(event, Progress):
            yield {page.status: status_html(event.text, event)}
        else:
            yield {
                page.status: status_html(f"pair {number} of {total}: which image is better?"),
                booth.images[0]: event.value[0],
                booth.images[1]: event.value[1],
                **page.open_choices(True),
            }


def _finished(page: _Page, voting: Voting, ballot: Ballot) -> Updates:
    closed: Updates = {
        page.setup.panel: gr.update(visible=True),
        page.booth.panel: gr.update(visible=False),
        **page.open_choices(False),
    }
    if not ballot.votes:
        return closed | {page.status: status_html("no votes were given")}
    saved = ballot.save(voting.context.votes)
    copy = voting.context.folder / saved.name  # only files of the session's folder are served
    copy.write_bytes(saved.read_bytes())
    return closed | {
        page.status: status_html(f"{len(ballot.votes)} votes saved to {saved}"),
        page.result: gr.update(value=result_html(voting, ballot), visible=True),
        page.file: gr.update(value=str(copy), visible=True),
    }


def result_html(voting: Voting, ballot: Ballot) -> str:
    """Returns the result of a ballot, and of all voters on the same models, as HTML; texts are escaped."""
    first, second = (html.escape(label) for label in ballot.models)
    voters, votes = voting.together(ballot.models)
    rows = [("your votes", ballot.result)]
    if voters > 1:
        rows.append((f"all {voters} voters", result_of(votes, ballot.models[1])))
    own = ballot.result
    sentence = {
        "preferred": f"{second} is preferred to {first}: the interval lies above 50 %.",
        "not preferred": f"{first} is preferred to {second}: the interval lies below 50 %.",
        "undecided": "The votes do not decide: the interval contains 50 %.",
    }[own.verdict]
    lines = "".join(
        f"<tr><th scope='row'>{name}</th><td>{r.wins}</td><td>{r.losses}</td><td>{r.ties}</td>"
        f"<td>{100 * r.rate:.1f} %</td><td>{100 * r.low:.1f} to {100 * r.high:.1f} %</td></tr>"
        for name, r in rows
    )
    revealed = "".join(
        f"<tr><td>{i}</td><td class='g2rpo-prompt'>{html.escape(vote.pair.prompt)}</td>"
        f"<td>{vote.pair.seed}</td><td>{html.escape(vote.pair.left)}</td>"
        f"<td>{html.escape(vote.pair.right)}</td><td>{html.escape(vote.winner or 'tie')}</td></tr>"
        for i, vote in enumerate(ballot.votes, 1)
    )
    return (
        f"<p><strong>{sentence}</strong></p>"
        f"{SCROLLED}<table><thead><tr><th></th><th scope='col'>{second} wins</th>"
        f"<th scope='col'>{first} wins</th><th scope='col'>ties</th><th scope='col'>win rate of {second}</th>"
        f"<th scope='col'>95 % interval (Wilson)</th></tr></thead><tbody>{lines}</tbody></table></div>"
        "<p>A tie counts half. Votes count as independent; several votes on the same prompt are less certain "
        "than the interval says.</p>"
        f"<details><summary>Which side was which</summary>{SCROLLED}<table><thead><tr>"
        "<th scope='col'>pair</th><th scope='col'>prompt</th><th scope='col'>seed</th><th scope='col'>left"
        "</th><th scope='col'>right</th><th scope='col'>preferred</th></tr></thead>"
        f"<tbody>{revealed}</tbody></table></div></details>"
    )
