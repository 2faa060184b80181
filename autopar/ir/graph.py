"""Flat jaxprs: helpers for one list of equations in which every value has one name."""

import hashlib
import re
import sysconfig
import traceback
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import isnan
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from autopar.ir import control_flow

type Atom = Var | Literal

_MOST_LINES = 6
"""How many lines of code a message lists."""


def needed(
    eqns: Iterable[tuple[int, JaxprEqn]], outvars: Iterable[Atom], given: Collection[Var] = ()
) -> list[tuple[int, JaxprEqn]]:
    """Return the numbered equations that `outvars` or an effect depend on, in order.

    Args:
        eqns: equations with their numbers.
        outvars: the values that are needed.
        given: values that are known, and whose dependences do not count.
    """
    numbered = list(eqns)
    known = frozenset(given)
    live = set(variables(outvars)).difference(known)
    pending: Sequence[int] = range(len(numbered))[::-1]
    kept: list[int] = []
    while True:
        unused: list[int] = []
        is_region_needed = False
        for position in pending:
            eqn = numbered[position][1]
            is_bound = eqn.primitive in control_flow.BOUND and control_flow.token_of(eqn) in live
            if not live.isdisjoint(eqn.outvars) or is_bound or eqn.effects:
                kept.append(position)
                live.update(
                    [atom for atom in eqn.invars if isinstance(atom, Var) and atom not in known]
                )
                if eqn.primitive in control_flow.OPENING:
                    is_region_needed = True
                    live.update(eqn.outvars)  # its token: the region needs its `BOUND` markers
            else:
                unused.append(position)
        # A loop that is needed needs all its carries, which takes another pass.
        if not is_region_needed:
            return [numbered[position] for position in sorted(kept)]
        pending = unused


def needed_eqns(
    eqns: Iterable[JaxprEqn], outvars: Iterable[Atom], given: Collection[Var] = ()
) -> list[JaxprEqn]:
    """Return `needed` of equations without numbers."""
    return [eqn for _, eqn in needed(enumerate(eqns), outvars, given)]


def source_line(eqn: JaxprEqn) -> str:
    """Return the line of the user's code that makes `eqn`, as "FILE:LINE".

    If JAX does not know the line, return the name stack.
    """
    frame = _user_frame(eqn.source_info.traceback)
    if frame is not None:
        return f"{frame.file_name}:{frame.line_num}"
    return str(eqn.source_info.name_stack) or "the step"


def is_called_by(eqn: JaxprEqn, function: str) -> bool:
    """Return whether a function of this name makes `eqn`, itself or by others that it calls."""
    frames = eqn.source_info.traceback.frames if eqn.source_info.traceback else ()
    return any(frame.function_name == function for frame in frames)


def listed(lines: Sequence[str]) -> str:
    """Return the first of some lines of code, and how many more there are."""
    more = f" and {len(lines) - _MOST_LINES} more lines" if len(lines) > _MOST_LINES else ""
    return ", ".join(lines[:_MOST_LINES]) + more


def error_line(error: Exception) -> str:
    """Return the innermost line of the user's code that an error passed, as "FILE:LINE".

    If it passed none, return "the step".
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return f"{frame.f_code.co_filename}:{line}"
    return "the step"


def eqns_of_call(jaxpr: Jaxpr, caller: Any) -> Sequence[JaxprEqn]:
    """Return the equations of a called jaxpr, with tracebacks that contain the user's code.

    JAX cuts off the tracebacks of cached calls, such as those in `jax.random`, where the call
    begins. Then equations have the traceback of the call.

    Args:
        jaxpr: the jaxpr.
        caller: traceback of the equation that calls it; None if it is not called.
    """
    own = jaxpr.eqns[0].source_info.traceback if jaxpr.eqns else None
    if caller is None or _user_frame(own) is not None:
        return jaxpr.eqns
    return [
        eqn.replace(source_info=eqn.source_info.replace(traceback=caller)) for eqn in jaxpr.eqns
    ]


def _user_frame(frames: Any) -> Any:
    """Return the innermost frame of JAX's traceback that is in the user's code, or None."""
    for frame in frames.frames if frames is not None else ():
        if not frame.file_name.startswith(_LIBRARIES):
            return frame
    return None


@dataclass(frozen=True, slots=True)
class Where:
    """The name of an equation in errors: its primitive and the line of the user's code.

    The line is looked up when the name is printed.
    """

    eqn: JaxprEqn

    def __str__(self) -> str:
        return f"{self.eqn.primitive.name} at {source_line(self.eqn)}"


_LIBRARIES = (
    sysconfig.get_path("purelib"),
    sysconfig.get_path("stdlib"),
    f"{Path(__file__).parents[1]}/",
    "<",
)
"""Prefixes of the files that are not the user's code."""


def scopes(eqn: JaxprEqn) -> str:
    """Return the name stack of an equation as text.

    Equations of a flat jaxpr share name stacks, whose text is built once.
    """
    stack = eqn.source_info.name_stack
    known = _texts_of_stacks.get(id(stack))
    if known is None:
        if len(_texts_of_stacks) > _MAX_STACKS:
            _texts_of_stacks.clear()
        known = _texts_of_stacks[id(stack)] = stack, str(stack)
    return known[1]


_texts_of_stacks: dict[int, tuple[Any, str]] = {}
"""Name stacks and their text by id of the stack, which stays alive as long as it is listed."""

_MAX_STACKS = 1 << 14


def with_name_stack(eqn: JaxprEqn, stack: Any) -> JaxprEqn:
    """Return an equation with another name stack, a value of JAX's type."""
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def without_elements(eqn: JaxprEqn, names: Iterable[str]) -> JaxprEqn:
    """Return an equation whose name stack lacks the first element with each of the names."""
    stack = eqn.source_info.name_stack
    elements = list(stack.stack)
    for name in names:
        element = next((element for element in elements if element.name == name), None)
        if element is not None:
            elements.remove(element)
    return with_name_stack(eqn, type(stack)(tuple(elements)))


def is_backward(eqn: JaxprEqn) -> bool:
    """Return whether an equation is in a backward pass, which JAX names `transpose(...)`."""
    return "transpose(" in scopes(eqn)


def is_outer_backward(eqn: JaxprEqn) -> bool:
    """Return whether an equation is in the backward pass of the outermost gradient.

    A model that descends along an energy takes gradients itself. They are in its forward pass,
    which JAX then names `jvp(transpose(...))`.
    """
    outside, found, _ = scopes(eqn).partition("transpose(")
    return bool(found) and "jvp(" not in outside


def is_forward(eqn: JaxprEqn) -> bool:
    """Return whether an equation is in no backward pass, or is recomputed in one by remat."""
    return not is_backward(eqn) or "rematted_computation" in scopes(eqn)


def is_differentiated(eqn: JaxprEqn) -> bool:
    """Return whether an equation is in a differentiated function, which JAX names `jvp(...)`.

    That includes its backward pass.
    """
    return "jvp(" in scopes(eqn)


def comparable(param: Any) -> Any:
    """Return a parameter of an equation, or text for NaN, which does not equal itself.

    NaN is what lookups return for indices out of range.
    """
    return "NaN" if isinstance(param, float) and isnan(param) else param


def literal_key(literal: Literal) -> Hashable:
    """Return a key that is equal for literals of the same type and bytes: -0.0 is not 0.0."""
    return np.asarray(literal.val).tobytes(), literal.aval


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Return the atoms that are no literals, in order."""
    return [atom for atom in atoms if isinstance(atom, Var)]


def renamed(atoms: Iterable[Atom], names: Mapping[Var, Atom]) -> list[Atom]:
    """Return atoms with those in `names` replaced by what `names` has for them."""
    return [names.get(atom, atom) if isinstance(atom, Var) else atom for atom in atoms]


def rewired(eqn: JaxprEqn, names: Mapping[Var, Atom]) -> JaxprEqn:
    """Return an equation that reads what `names` has for its operands; itself if it has none."""
    if names.keys().isdisjoint(variables(eqn.invars)):
        return eqn
    return eqn.replace(invars=renamed(eqn.invars, names))


def possible_weights(jaxpr: Jaxpr, batch: Collection[int]) -> list[Var]:
    """Return the inputs that may be weights or states of a model: float arrays but the batch.

    Args:
        jaxpr: the jaxpr of a step.
        batch: numbers of the inputs that are its batch.
    """
    return [
        var
        for i, var in enumerate(jaxpr.invars)
        if i not in batch
        and aval_of(var).ndim > 0
        and jax.numpy.issubdtype(aval_of(var).dtype, jax.numpy.inexact)
    ]


def all_eqns(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the equations of a jaxpr, each followed by the equations inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from all_eqns(inner)


def aval_of(atom: Atom) -> ShapedArray:
    """Return shape and dtype of a value of a flat jaxpr, whose values are all arrays."""
    assert isinstance(atom.aval, ShapedArray), atom.aval
    return atom.aval


type Source = tuple[int, int] | None
"""What computes a value: the number of an equation, and which of its results the value is.

Inputs and constants have numbers below zero; literals are None.
"""


def sources(jaxpr: Jaxpr, eqns: Iterable[JaxprEqn]) -> dict[Var, Source]:
    """Return what computes each value, with the equations `eqns` of a jaxpr numbered from zero."""
    groups = (jaxpr.constvars, jaxpr.invars, *(eqn.outvars for eqn in eqns))
    return {var: (n, r) for n, group in enumerate(groups, -2) for r, var in enumerate(group)}


def sources_of(atoms: Iterable[Atom], known: Mapping[Var, Source]) -> list[Source]:
    """Return what computes each of `atoms`, where `known` has the sources of all values."""
    return [known[atom] if isinstance(atom, Var) else None for atom in atoms]


def read(atom: Atom, env: dict[Var, Any]) -> Any:
    """Return the value of `atom` under `env`."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def fingerprint(jaxpr: Jaxpr) -> str:
    """Return a short hash of a flat jaxpr, equal for equal programs in all processes.

    Of meshes only the axes count, not the devices: a plan made for absent GPUs is for the same
    step.
    """
    number: dict[Var, int] = {}
    text = cache(str)  # avals are few, and slow to print

    def name(atom: Atom) -> str:
        if isinstance(atom, Literal):
            return f"{atom.val}:{text(atom.aval)}"
        return f"%{number.setdefault(atom, len(number))}:{text(atom.aval)}"

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
    """Return the parameters of `eqn` as text, equal for equal parameters in all traces."""
    return ", ".join(f"{key}={_text(value)}" for key, value in sorted(eqn.params.items()))


def constant(value: Any) -> np.ndarray:
    """Return a constant of a jaxpr as a numpy array; random keys as their data."""
    if jax.numpy.issubdtype(getattr(value, "dtype", float), jax.dtypes.extended):
        value = jax.random.key_data(value)
    return np.asarray(value)


_PLACE = re.compile(r"0x[0-9a-f]+|, device_kind=[^)]*?, num_cores=\w+, platform=\w+")
"""Text that differs between processes: addresses, and the devices of a mesh."""

_SET = re.compile(r"set\(\{([^{}]*)\}\)")
"""A set of mesh axes, whose order differs between processes."""


def _text(value: Any) -> str:
    match value:
        case Mesh() | AbstractMesh():
            return f"mesh {dict(value.shape)}"
        case NamedSharding():
            return f"{value.spec} over {_text(value.mesh)}"
        case _:
            return _SET.sub(
                lambda match: str(sorted(match[1].split(", "))), _PLACE.sub("", str(value))
            )
