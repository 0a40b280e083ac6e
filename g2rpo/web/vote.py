"""The tab "Vote": a blind comparison of two models."""

from __future__ import annotations

from g2rpo.web.context import WebContext


def vote_tab(context: WebContext) -> None:
    """Builds the tab; call it inside its `gr.Tab`."""
