"""Errors for misspelt names, which list the valid names and suggest the nearest."""

from collections.abc import Iterable
from difflib import get_close_matches

from simulator.files import brief


def check_name(what: str, name: str, valid: Iterable[str]) -> str:
    """Return `name` if it is one of `valid`.

    Args:
        what: what the name is of, for the error.
        name: the name to check.
        valid: the valid names.

    Raises:
        ValueError: `name` is unknown; the message lists the valid names and suggests the nearest.
    """
    names = sorted(map(str, valid))
    if name in names:
        return name
    nearest = get_close_matches(str(name)[:100], names, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"unknown {what} {brief(name)}{hint} (valid: {', '.join(names)})")
