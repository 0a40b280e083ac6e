"""The tab "Generate": one prompt, the base and a tuned model, the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import gradio as gr

from g2rpo.data.prompts import read_prompts
from g2rpo.runtime.text import shortened
from g2rpo.web.context import WebContext
from g2rpo.web.jobs import MODEL_QUEUE, Job, Progress, messages, status_html
from g2rpo.web.sampling import ImageRequest, Sampled, checked_request, sample_image, save_image

ONE_MODEL = "none: one image"
"""Entry of the second menu."""
STEPS = 16
IMAGE_PX = 360
"""Height of an image on the page."""
OTHER_EXAMPLES = (
    "a red fox in fresh snow, morning light",
    "three green apples on a wooden table",
    "a street at night in the rain, neon signs",
)

Updates = dict[Any, Any]
Entry = tuple[str, str, ImageRequest]
"""Path, label of the model, and request of an earlier image."""


def examples(context: WebContext) -> list[str]:
    """Returns prompts to begin with: of the embedded world for its model, otherwise of photographs."""
    if not context.is_embedded:
        return list(OTHER_EXAMPLES)
    demo, heldout = read_prompts("world:demo")[0], read_prompts("world:heldout")[0]
    return [prompt.text for prompt in [*demo[:2], *heldout[:3]]]


@dataclass(frozen=True)
class _Inputs:
    prompt: gr.Textbox
    left: gr.Dropdown
    right: gr.Dropdown
    steps: gr.Slider
    guidance: gr.Slider
    seed: gr.Number

    @classmethod
    def build(cls, context: WebContext) -> _Inputs:
        first, second = context.pair
        labels, limits = list(context.models), context.limits
        with gr.Row():
            prompt = gr.Textbox(
                examples(context)[0],
                label="Prompt",
                lines=2,
                scale=3,
                min_width=280,
                elem_id="generate-prompt",
            )
            left = gr.Dropdown(labels, value=first, label="Model on the left", elem_id="generate-model-left")
            right = gr.Dropdown(
                [*labels, ONE_MODEL],
                value=second or ONE_MODEL,
                label="Model on the right",
                elem_id="generate-model-right",
            )
        gr.Examples(
            [[text] for text in examples(context)], [prompt], label="Examples", elem_id="generate-examples"
        )
        with gr.Row():
            steps = gr.Slider(
                1, limits.steps, STEPS, step=1, label="Denoising steps", elem_id="generate-steps"
            )
            guidance = gr.Slider(
                0, limits.guidance, 3.5, step=0.1, label="Guidance", elem_id="generate-guidance"
            )
            # Without limits: Gradio's own message about them names no input, and logs a stack trace.
            seed = gr.Number(0, label="Seed", precision=0, elem_id="generate-seed")
        return cls(prompt, left, right, steps, guidance, seed)


@dataclass(frozen=True)
class _Results:
    status: gr.HTML
    images: tuple[gr.Image, gr.Image]
    files: tuple[gr.DownloadButton, gr.DownloadButton]
    slider: gr.ImageSlider
    gallery: gr.Gallery
    earlier: gr.State

    @classmethod
    def build(cls) -> _Results:
        status = gr.HTML(status_html("ready"), elem_id="generate-status")
        columns = []
        with gr.Row(elem_id="generate-pair"):
            for side in ("left", "right"):
                with gr.Column(min_width=240):
                    image = gr.Image(
                        label=side,
                        type="filepath",
                        interactive=False,
                        height=IMAGE_PX,
                        elem_id=f"generate-image-{side}",
                        elem_classes="g2rpo-image",
                        buttons=["fullscreen"],
                        alt_text=f"image of the {side} model",
                    )
                    file = gr.DownloadButton(
                        f"Download {side}", interactive=False, elem_id=f"generate-file-{side}"
                    )
                columns.append((image, file))
            with gr.Column(min_width=240):
                slider = gr.ImageSlider(
                    label="left | right: move the handle",
                    type="filepath",
                    interactive=False,
                    height=IMAGE_PX,
                    max_height=IMAGE_PX,
                    elem_id="generate-slider",
                    elem_classes="g2rpo-image",
                    buttons=["fullscreen"],
                )
        gr.Markdown("Earlier images: choose one to return to its prompt, seed and settings.")
        gallery = gr.Gallery(
            label="Earlier images",
            show_label=False,
            columns=6,
            height="auto",
            fit_columns=False,
            allow_preview=False,
            interactive=False,
            object_fit="contain",
            buttons=[],
            elem_id="generate-gallery",
            elem_classes="g2rpo-image",
        )
        (image_left, file_left), (image_right, file_right) = columns
        images, files = (image_left, image_right), (file_left, file_right)
        return cls(status, images, files, slider, gallery, gr.State([]))

    @property
    def all(self) -> list[Any]:
        """All components that the handler changes."""
        return [self.status, *self.images, *self.files, self.slider, self.gallery, self.earlier]


def generate_tab(context: WebContext) -> None:
    """Builds the tab; call it inside its `gr.Tab`."""
    gr.Markdown(
        "Both models start from the same noise, so the two images differ in what training changed. The same "
        "seed and settings give the same images again, also with `g2rpo sample`. A downloaded PNG carries "
        "its prompt, model, seed and settings."
    )
    inputs = _Inputs.build(context)
    with gr.Row():
        button = gr.Button("Generate", variant="primary", min_width=110, elem_id="generate-button")
        dice = gr.Button("Another seed", min_width=110, elem_id="generate-dice")
        cancel = gr.Button("Cancel", min_width=110, elem_id="generate-cancel")
    results = _Results.build()

    def generate(
        prompt: Any, left: Any, right: Any, steps: Any, guidance: Any, seed: Any, earlier: list[Entry]
    ) -> Iterator[Updates]:
        with messages():
            request = checked_request(context, prompt, seed, steps, guidance)
            labels = [context.model(left).label]
            labels += [] if right == ONE_MODEL else [context.model(right).label]
            yield from _generated(context, inputs, results, request, labels, earlier)

    def choose(event: gr.SelectData, earlier: list[Entry]) -> tuple[Any, ...]:
        request = earlier[event.index][2]
        scale = gr.skip() if request.guidance is None else request.guidance
        return request.prompt, request.seed, request.steps, scale

    values = [inputs.prompt, inputs.left, inputs.right, inputs.steps, inputs.guidance, inputs.seed]
    running = gr.on(
        [button.click, inputs.prompt.submit],
        generate,
        [*values, results.earlier],
        [*results.all, inputs.guidance],
        show_progress="hidden",
        trigger_mode="once",
        api_name="generate",
        **MODEL_QUEUE,
    )
    private: dict[str, Any] = {"queue": False, "api_visibility": "private"}
    # An event of its own: on a busy machine the browser may merge updates of one event, and lose this one.
    running.success(
        lambda: [gr.update(interactive=True)] * len(results.files), None, list(results.files), **private
    )
    # First the job ends, then the line is written: progress that is still under way would replace it.
    cancel.click(lambda: None, None, None, cancels=[running], **private).then(
        lambda: status_html("cancelled"), None, results.status, **private
    )
    another = random.SystemRandom()
    dice.click(lambda: another.randint(0, context.limits.seed), None, inputs.seed, **private)
    results.gallery.select(
        choose, results.earlier, [inputs.prompt, inputs.seed, inputs.steps, inputs.guidance], **private
    )


def _generated(
    context: WebContext,
    inputs: _Inputs,
    results: _Results,
    request: ImageRequest,
    labels: list[str],
    earlier: list[Entry],
) -> Iterator[Updates]:
    """Yields the changes of the page while one or two models sample the request."""
    pair = len(labels) == 2
    yield {
        results.slider: gr.update(value=None, visible=pair),
        results.images[1]: gr.update(value=None, visible=pair),
        **{file: gr.update(interactive=False) for file in results.files[:1]},
        results.files[1]: gr.update(interactive=False, visible=pair),
    }
    conditions: Mapping[str, Any] | None = None
    entries: list[Entry] = []
    notes: dict[str, None] = {}
    seconds = 0.0
    for label, image, file in zip(labels, results.images, results.files, strict=False):
        work = partial(_work, context, label, request, conditions)
        for event in context.jobs.run(work):
            if isinstance(event, Progress):
                yield {results.status: status_html(event.text, event)}
                continue
            sampled, seconds = event.value, seconds + event.seconds
            notes |= dict.fromkeys(sampled.notes)
            conditions = sampled.conditions  # the second model samples under those of the first
            name = f"{label}_seed{request.seed}"
            path = str(save_image(context, name, request.prompt, sampled.image, sampled.info))
            entries.append((path, label, request))
            yield {
                image: gr.update(value=path, label=label),
                file: gr.update(value=path, interactive=True),
                inputs.guidance: gr.update(visible=sampled.guidance is not None),
            }
    kept = [*entries, *earlier][: context.limits.gallery]
    both = zip(entries, results.images, results.files, strict=False)
    yield {  # all values once more: other clients than a browser see only the last state
        **{part: path for (path, _, _), *parts in both for part in parts},
        results.status: status_html("; ".join([f"done in {seconds:.1f} s", *notes])),
        results.slider: (entries[0][0], entries[1][0]) if pair else None,
        results.gallery: [(path, _caption(label, entry)) for path, label, entry in kept],
        results.earlier: kept,
    }


def _work(
    context: WebContext, label: str, request: ImageRequest, conditions: Mapping[str, Any] | None, job: Job
) -> Sampled:
    return sample_image(context, job.report, label, request, conditions)


def _caption(label: str, request: ImageRequest) -> str:
    return f"{label}, seed {request.seed}: {shortened(request.prompt, 60)}"
