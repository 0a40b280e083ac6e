"""The page: a title, four tabs, one style sheet."""

from __future__ import annotations

import html

import gradio as gr

from g2rpo.runtime.version import __version__
from g2rpo.web.context import WebContext
from g2rpo.web.explore import explore_tab
from g2rpo.web.generate import generate_tab
from g2rpo.web.runs import runs_tab
from g2rpo.web.vote import vote_tab

CSS = """
.gradio-container {
  max-width: 1280px !important; min-width: 0 !important; width: 100%; margin: 0 auto !important;
}
.gradio-container .column, .gradio-container .block { min-width: 0; }
.gradio-container [role=tab][aria-selected=true] { color: var(--primary-700); }
.dark .gradio-container [role=tab][aria-selected=true] { color: var(--primary-300); }
#page-title h1 { margin: 0; font-size: 1.4rem; }
#page-title p { margin: 0.15rem 0 0; color: var(--body-text-color-subdued); }
.g2rpo-status { display: flex; align-items: center; gap: 0.75rem; min-height: 1.75rem; flex-wrap: wrap; }
.g2rpo-status progress { width: min(16rem, 100%); height: 0.6rem; accent-color: var(--color-accent); }
.g2rpo-prompt { overflow-wrap: anywhere; }
/* The images of the embedded model have 64 pixels: enlarged, with visible pixels. */
.g2rpo-image img { width: 100%; height: 100%; object-fit: contain; image-rendering: pixelated; }
.g2rpo-image .image-frame, .g2rpo-image .image-container { width: 100%; height: 100%; }
#generate-gallery .grid-wrap { min-height: 0; }
#generate-gallery .grid-container { grid-template-columns: repeat(auto-fill, minmax(6rem, 1fr)) !important; }
.g2rpo-table { overflow-x: auto; max-width: 100%; }
.g2rpo-table table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.g2rpo-table th, .g2rpo-table td { padding: 0.3rem 0.6rem; text-align: left; }
.g2rpo-table tr { border-bottom: 1px solid var(--border-color-primary); }
@media (max-width: 600px) {
  .gradio-container { padding: 0.5rem !important; }
}
"""
"""Own rules of the page, shared by all tabs; colours are those of the theme, in light and in dark mode."""

# System fonts: the default theme would ask a server for its own.
THEME = gr.themes.Soft(
    primary_hue="blue",
    secondary_hue="slate",
    neutral_hue="slate",
    font=["system-ui", "sans-serif"],
    font_mono=["ui-monospace", "monospace"],
).set(
    # Contrast of at least 4.5 to 1 in both modes.
    body_text_color_subdued="*neutral_600",
    body_text_color_subdued_dark="*neutral_300",
    block_title_text_color="*neutral_800",
    block_title_text_color_dark="*neutral_100",
    block_title_background_fill="none",
    block_title_background_fill_dark="none",
    block_label_text_color="*neutral_800",
    block_label_text_color_dark="*neutral_100",
    block_label_background_fill="*neutral_100",
    block_label_background_fill_dark="*neutral_700",
    body_background_fill="*neutral_50",
    block_border_width="1px",
    checkbox_label_background_fill_selected="*primary_700",
    checkbox_label_background_fill_selected_dark="*primary_700",
    checkbox_label_text_color_selected="white",
    checkbox_label_text_color_selected_dark="white",
    button_secondary_background_fill="*neutral_200",
    button_secondary_background_fill_hover="*neutral_300",
    button_cancel_background_fill="*neutral_200",
    button_primary_background_fill="*primary_700",
    button_primary_background_fill_hover="*primary_800",
    button_primary_background_fill_dark="*primary_700",
    button_primary_background_fill_hover_dark="*primary_600",
    button_primary_text_color="white",
)


def build(context: WebContext) -> gr.Blocks:
    """Returns the page of a context; `server.serve` starts it with `THEME` and `CSS`."""
    with gr.Blocks(title="g2rpo", analytics_enabled=False) as page:
        gr.HTML(_head(context), elem_id="page-title")
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Generate", id="generate", elem_id="tab-generate"):
                generate_tab(context)
            with gr.Tab("Explore a group", id="explore", elem_id="tab-explore"):
                explore_tab(context)
            with gr.Tab("Runs", id="runs", elem_id="tab-runs"):
                runs_tab(context)
            with gr.Tab("Vote", id="vote", elem_id="tab-vote"):
                vote_tab(context)
    return page


def _head(context: WebContext) -> str:
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in context.notes)
    models = ", ".join(context.models)
    return f"<h1>g2rpo {html.escape(__version__)}</h1><p>Models: {html.escape(models)}</p>{notes}"
