"""Text fragments of error messages."""

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Returns `; did you mean 'lr'?` if an allowed name is similar to `given`, else the empty string."""
    near = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def printable(text: str) -> str:
    """Returns the text with its control and formatting characters, such as line breaks, as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, characters: int = 80) -> str:
    """Returns the text, or its beginning and an ellipsis."""
    return text if len(text) <= characters else f"{text[:characters]}…"
