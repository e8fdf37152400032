"""The closest known name of a misspelt one, and the hint in an error message."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name with the most similar spelling, ignoring case; None if none is close.

    Parameters
    ----------
    cutoff : least similarity, from 0 (nothing in common) to 1 (equal).
    """
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_lower, 1, cutoff)
    return by_lower[near[0]] if near else None


def meant(name: str, known: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """The end of an error about a wrong name: `did you mean 'demo'?`, or `otherwise` if no known name is close."""
    near = nearest(name, known, cutoff)
    return f"did you mean {near!r}?" if near else otherwise
