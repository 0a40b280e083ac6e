"""The tab "Generate": one prompt, two models, the same seed."""

from __future__ import annotations

from g2rpo.web.context import WebContext


def generate_tab(context: WebContext) -> None:
    """Builds the tab; call it inside its `gr.Tab`."""
