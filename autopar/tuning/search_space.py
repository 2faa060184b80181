"""Search spaces: named knobs, each with a domain that may depend on the knobs before it."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from autopar.checks import checked, satisfying

type Candidate = dict[str, Any]
"""A value for each knob."""

type Domain = Sequence[Any] | Callable[[Candidate], Sequence[Any]]
"""The values of a knob, or a function from the knobs before it to the values."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """An ordered set of knobs.

    Attributes:
        domains: the domain of each knob, by name.

    Raises:
        TypeError: A domain is neither a sequence of values nor a function.
        ValueError: There are no knobs.
    """

    domains: Mapping[str, Domain]

    def __post_init__(self) -> None:
        rule = satisfying(
            "a dict of knobs by name, such as {'tensor': [1, 2, 4, 8]}",
            lambda space: isinstance(space, Mapping),
        )
        checked("space", self.domains, rule)
        if not self.domains:
            raise ValueError(
                "the space has no knobs; expected a dict such as {'tensor': [1, 2, 4, 8]}"
            )
        for name, domain in self.domains.items():
            if isinstance(domain, str) or not (callable(domain) or isinstance(domain, Sequence)):
                raise TypeError(
                    f"knob {name!r} is {domain!r}, expected a list of values, or a function of the"
                    " knobs before it that returns one"
                )

    def __iter__(self) -> Iterator[Candidate]:
        """Yield every candidate; the last knob changes fastest."""
        return self._extended({}, {})

    def values(self, name: str, chosen: Candidate) -> tuple[Any, ...]:
        """Return the values of a knob, given the values of the knobs before it.

        Raises:
            TypeError: The domain is no sequence of hashable values.
        """
        domain = self.domains[name]
        values = domain(dict(chosen)) if callable(domain) else domain
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise TypeError(
                f"knob {name!r} may be {values!r} after {chosen}, expected a list of values"
            )
        unhashable = [value for value in values if not isinstance(value, Hashable)]
        if unhashable:
            raise TypeError(
                f"knob {name!r} has the value {unhashable[0]!r}, expected values that can be"
                " hashed, such as tuples"
            )
        return tuple(values)

    def line(self, candidate: Candidate, name: str) -> list[Candidate]:
        """Return the candidates that differ from `candidate` in knob `name`.

        Later knobs keep their value if their domain still has it; otherwise they take the first
        value of the domain. A value of `name` that leaves a later knob without values is left out.
        """
        before = dict(takewhile(lambda knob: knob[0] != name, candidate.items()))
        neighbours = (
            next(self._extended({**before, name: value}, candidate), None)
            for value in self.values(name, before)
        )
        return [neighbour for neighbour in neighbours if neighbour is not None]

    def _extended(self, chosen: Candidate, preferred: Candidate) -> Iterator[Candidate]:
        """Yield the candidates that extend `chosen`, those with the `preferred` values first."""
        name = next((name for name in self.domains if name not in chosen), None)
        if name is None:
            yield chosen
            return
        for value in sorted(
            self.values(name, chosen), key=lambda v: name not in preferred or v != preferred[name]
        ):
            yield from self._extended({**chosen, name: value}, preferred)
