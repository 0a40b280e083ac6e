"""Text fragments of error messages."""

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Returns `; did you mean 'lr'?` if an allowed name is similar to `given`, else the empty string."""
    near = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def shortened(text: str, characters: int = 80) -> str:
    """Returns the text, or its beginning and an ellipsis."""
    return text if len(text) <= characters else f"{text[:characters]}…"
