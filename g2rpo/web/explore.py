"""The tab "Explore a group"."""

from __future__ import annotations

from g2rpo.web.context import WebContext


def explore_tab(context: WebContext) -> None:
    """Builds the tab; call it inside its `gr.Tab`."""
