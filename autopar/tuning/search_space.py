"""What a search may choose: knobs by name, each with the values it may have."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from autopar.checks import checked, satisfying

type Candidate = dict[str, Any]
"""A value for each knob."""

type Domain = Sequence[Any] | Callable[[Candidate], Sequence[Any]]
"""What a knob may be: values, or a function of the knobs before it that returns them."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Knobs in an order; what one may be can depend on those before it.

    Raises TypeError for a domain that is neither values nor a function, ValueError for a space without knobs.
    """

    domains: Mapping[str, Domain]

    def __post_init__(self) -> None:
        known = satisfying(
            "a dict of knobs by name, such as {'tensor': [1, 2, 4, 8]}",
            lambda space: isinstance(space, Mapping),
        )
        checked("space", self.domains, known)
        if not self.domains:
            raise ValueError(
                "the space has no knobs; expected a dict such as {'tensor': [1, 2, 4, 8]}"
            )
        for name, domain in self.domains.items():
            if isinstance(domain, str) or not (callable(domain) or isinstance(domain, Sequence)):
                raise TypeError(
                    f"knob {name!r} is {domain!r}, expected a list of values, or a function of the knobs before it that returns one"
                )

    def __iter__(self) -> Iterator[Candidate]:
        """Every candidate, the last knob changing fastest."""
        return self._extended({}, {})

    def values(self, name: str, chosen: Candidate) -> tuple[Any, ...]:
        """What a knob may be once those before it are chosen."""
        domain = self.domains[name]
        values = domain(dict(chosen)) if callable(domain) else domain
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise TypeError(
                f"knob {name!r} may be {values!r} after {chosen}, expected a list of values"
            )
        unfit = [value for value in values if not isinstance(value, Hashable)]
        if unfit:
            raise TypeError(
                f"knob {name!r} has the value {unfit[0]!r}, expected values that can be hashed, such as tuples"
            )
        return tuple(values)

    def line(self, candidate: Candidate, name: str) -> list[Candidate]:
        """The candidates that differ in one knob.

        Those after it keep their value where they still may have it, and else have the first that they may; a value that leaves
        none to a later one is left out.
        """
        before = dict(takewhile(lambda knob: knob[0] != name, candidate.items()))
        moved = (
            next(self._extended({**before, name: value}, candidate), None)
            for value in self.values(name, before)
        )
        return [each for each in moved if each is not None]

    def _extended(self, chosen: Candidate, liked: Candidate) -> Iterator[Candidate]:
        """Candidates with the knobs that are chosen, those first that have others as `liked` has them."""
        name = next((name for name in self.domains if name not in chosen), None)
        if name is None:
            yield chosen
            return
        for value in sorted(
            self.values(name, chosen), key=lambda v: name not in liked or v != liked[name]
        ):
            yield from self._extended({**chosen, name: value}, liked)
