"""The tab "Runs"."""

from __future__ import annotations

from g2rpo.web.context import WebContext


def runs_tab(context: WebContext) -> None:
    """Builds the tab; call it inside its `gr.Tab`."""
