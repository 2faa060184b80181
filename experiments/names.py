"""Errors for misspelt names: what is valid, and what was probably meant."""

from collections.abc import Iterable
from difflib import get_close_matches

from simulator.files import brief


def known(what: str, name: str, valid: Iterable[str]) -> str:
    """`name` itself if it is one of `valid`; else a `ValueError` that lists them and suggests the nearest."""
    names = sorted(map(str, valid))
    if name in names:
        return name
    nearest = get_close_matches(str(name)[:100], names, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"unknown {what} {brief(name)}{hint} (valid: {', '.join(names)})")
