"""Flat jaxprs: a traced step as one list of equations, calls inlined, so that every value has one name."""

import hashlib
import re
from collections.abc import Collection, Iterable
from functools import cache
from typing import Any

from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from autopar import regions

type Atom = Var | Literal


def needed(
    eqns: Iterable[tuple[int, JaxprEqn]], outvars: Iterable[Atom], given: Collection[Var] = ()
) -> list[tuple[int, JaxprEqn]]:
    """The numbered equations on which `outvars` or an effect depend when the values in `given` are known, in order."""
    eqns = list(eqns)
    live = {atom for atom in outvars if isinstance(atom, Var)}.difference(given)

    def keeps(eqn: JaxprEqn) -> bool:
        bound = eqn.primitive in regions.BOUND and regions.token_of(eqn) in live
        return bound or bool(eqn.effects) or not live.isdisjoint(eqn.outvars)

    while True:
        known, kept = len(live), []
        for number, eqn in reversed(eqns):
            if keeps(eqn):
                kept.append((number, eqn))
                live.update(atom for atom in eqn.invars if isinstance(atom, Var) and atom not in given)
        if len(live) == known or not any(eqn.primitive in regions.BOUND for _, eqn in eqns):
            return kept[::-1]  # a loop that turned out to be needed needs all its carries


def aval_of(atom: Atom) -> ShapedArray:
    """Shape and dtype of an atom of a flat jaxpr, whose values are all arrays."""
    assert isinstance(atom.aval, ShapedArray), atom.aval
    return atom.aval


def read(atom: Atom, env: dict[Var, Any]) -> Any:
    """The value of `atom` under `env`."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def fingerprint(jaxpr: Jaxpr) -> str:
    """A short hash of what a flat jaxpr computes: equal for equal programs, whatever process traced them, for whatever devices.

    Meshes that the program names count by their axes alone: a plan made for GPUs that are not here is for the same step here.
    """
    number: dict[Var, int] = {}
    kind = cache(str)  # avals are few, and slow to print

    def name(atom: Atom) -> str:
        if isinstance(atom, Literal):
            return f"{atom.val}:{kind(atom.aval)}"
        return f"%{number.setdefault(atom, len(number))}:{kind(atom.aval)}"

    digest = hashlib.sha256()
    for var in (*jaxpr.constvars, *jaxpr.invars):
        digest.update(name(var).encode())
    for eqn in jaxpr.eqns:
        params = ", ".join(f"{key}={_text(value)}" for key, value in sorted(eqn.params.items()))
        line = (*map(name, eqn.outvars), eqn.primitive.name, params, *map(name, eqn.invars))
        digest.update(" ".join(line).encode())
    digest.update(" ".join(map(name, jaxpr.outvars)).encode())
    return digest.hexdigest()[:16]


_PLACE = re.compile(r"0x[0-9a-f]+|, device_kind=[^)]*?, num_cores=\w+, platform=\w+")
"""What parameters say of where they were written: addresses, and the kind of the devices of a mesh."""

_SET = re.compile(r"set\(\{([^{}]*)\}\)")
"""A set, also in the text of a jaxpr inside: other processes have the names of mesh axes in another order there."""


def _text(value: Any) -> str:
    match value:
        case Mesh() | AbstractMesh():
            return f"mesh {dict(value.shape)}"
        case NamedSharding():
            return f"{value.spec} over {_text(value.mesh)}"
        case _:
            return _SET.sub(lambda found: str(sorted(found[1].split(", "))), _PLACE.sub("", str(value)))
