"""Flat jaxprs: a traced step as one list of equations, calls inlined, so that every value has one name."""

import hashlib
import re
import sysconfig
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from autopar.ir import control_flow

type Atom = Var | Literal


def needed(
    eqns: Iterable[tuple[int, JaxprEqn]], outvars: Iterable[Atom], given: Collection[Var] = ()
) -> list[tuple[int, JaxprEqn]]:
    """The numbered equations on which `outvars` or an effect depend when the values in `given` are known, in order."""
    eqns = list(eqns)
    live = {atom for atom in outvars if isinstance(atom, Var)}.difference(given)

    def keeps(eqn: JaxprEqn) -> bool:
        bound = eqn.primitive in control_flow.BOUND and control_flow.token_of(eqn) in live
        return bound or bool(eqn.effects) or not live.isdisjoint(eqn.outvars)

    while True:
        known, kept = len(live), []
        for number, eqn in reversed(eqns):
            if keeps(eqn):
                kept.append((number, eqn))
                live.update(
                    atom for atom in eqn.invars if isinstance(atom, Var) and atom not in given
                )
        if len(live) == known or not any(eqn.primitive in control_flow.BOUND for _, eqn in eqns):
            return kept[::-1]  # a loop that turned out to be needed needs all its carries


def source_line(eqn: JaxprEqn) -> str:
    """Return where the user's code makes `eqn`, as "FILE:LINE", or the name stack where JAX does not know the line."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{frame.file_name}:{frame.line_num}"
    return str(eqn.source_info.name_stack) or "the step"


@dataclass(frozen=True, slots=True)
class Where:
    """An equation as errors name it, by its primitive and the line of the user's code; nothing is looked up until it is printed."""

    eqn: JaxprEqn

    def __str__(self) -> str:
        return f"{self.eqn.primitive.name} at {source_line(self.eqn)}"


_LIBRARIES = (
    sysconfig.get_path("purelib"),
    sysconfig.get_path("stdlib"),
    f"{Path(__file__).parent}/",
    "<",
)
"""Where the code is that is not the user's."""


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
        line = (
            *map(name, eqn.outvars),
            eqn.primitive.name,
            params_text(eqn),
            *map(name, eqn.invars),
        )
        digest.update(" ".join(line).encode())
    digest.update(" ".join(map(name, jaxpr.outvars)).encode())
    return digest.hexdigest()[:16]


def params_text(eqn: JaxprEqn) -> str:
    """Return the parameters of `eqn` as text: equal for equal parameters, whatever trace they come from."""
    return ", ".join(f"{key}={_text(value)}" for key, value in sorted(eqn.params.items()))


def constant(value: Any) -> np.ndarray:
    """Return a constant of a jaxpr as a numpy array; random keys as their data."""
    if jax.numpy.issubdtype(getattr(value, "dtype", float), jax.dtypes.extended):
        value = jax.random.key_data(value)
    return np.asarray(value)


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
            return _SET.sub(
                lambda found: str(sorted(found[1].split(", "))), _PLACE.sub("", str(value))
            )
