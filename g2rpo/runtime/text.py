"""Small words in messages."""

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'lr'?` where one of the allowed names is near what was given, else nothing."""
    near = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
