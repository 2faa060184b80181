"""A loop over the chunks of a batch: a `scan` of a flat step, with its body flat as well."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import convert_element_type_p, copy_p

from autopar.ir.flatten import flatten
from autopar.ir.graph import Atom, aval_of, read, renamed, rewired, source_line
from autopar.layering.gradient_scans import additive_carries
from autopar.layering.piece_writer import scan_operands
from autopar.microbatch.deferred_division import inlined


class ChunkLoop(NamedTuple):
    """A loop over the chunks of a batch.

    Attributes:
        eqn: the equation that it was traced as, which names its place in the user's code.
        body: what an iteration computes, flat but for its loops. Its inputs are constants, carries
            and slices.
        consts: the constants.
        init: the first carries.
        arrays: the arrays that are sliced along their first dim.
        results: the last carries, and an array of each value that the iterations stack.
        length: the number of iterations.
        is_reversed: whether the first iteration takes the last slices.
    """

    eqn: JaxprEqn
    body: Jaxpr
    consts: Sequence[Atom]
    init: Sequence[Atom]
    arrays: Sequence[Atom]
    results: Sequence[Var]
    length: int
    is_reversed: bool

    @property
    def line(self) -> str:
        """The line of the loop in the user's code, as "FILE:LINE"."""
        return source_line(self.eqn)

    @property
    def carries(self) -> Sequence[Var]:
        """The carries, as an iteration reads them."""
        return self.body.invars[len(self.consts) :][: len(self.init)]

    @property
    def slices(self) -> Sequence[Var]:
        """The slices, as an iteration reads them."""
        return self.body.invars[len(self.consts) + len(self.init) :]

    @property
    def handed_on(self) -> Sequence[Atom]:
        """The carries that an iteration hands on."""
        return self.body.outvars[: len(self.init)]

    @property
    def stacked(self) -> Sequence[Atom]:
        """What an iteration adds to the stacked results."""
        return self.body.outvars[len(self.init) :]

    @property
    def additive(self) -> Sequence[bool]:
        """Whether the iterations only add to each carry."""
        return additive_carries(self.body, len(self.consts), len(self.init))

    def addend(self, carry: Var) -> Atom:
        """Return what an iteration adds to an additive carry."""
        (eqn,) = (eqn for eqn in self.body.eqns if carry in eqn.invars)
        (value,) = (atom for atom in eqn.invars if atom is not carry)
        return value


def chunk_loop(scan: JaxprEqn) -> ChunkLoop:
    """Return a scan as a loop over chunks."""
    consts, init, arrays = scan_operands(scan)
    return ChunkLoop(
        eqn=scan,
        body=_flat_body(scan),
        consts=consts,
        init=init,
        arrays=arrays,
        results=scan.outvars,
        length=scan.params["length"],
        is_reversed=scan.params["reverse"],
    )


def _flat_body(scan: JaxprEqn) -> Jaxpr:
    """Return the body of a scan, flat but for its loops, without casts of a dtype to itself.

    A carry that starts as a Python number is cast to itself to lose its weak type.
    """
    body = flatten(scan.params["jaxpr"], loops=False)
    names: dict[Var, Atom] = {}
    eqns: list[JaxprEqn] = []
    for eqn in body.eqns:
        eqn = rewired(eqn, names)
        if is_same_cast(eqn):
            names[eqn.outvars[0]] = eqn.invars[0]
        else:
            eqns.append(eqn)
    return body.replace(eqns=eqns, outvars=renamed(body.outvars, names))


def is_same_cast(eqn: JaxprEqn) -> bool:
    """Return whether an equation casts a value to the dtype that it has."""
    is_cast = eqn.primitive is convert_element_type_p
    return is_cast and aval_of(eqn.invars[0]).dtype == aval_of(eqn.outvars[0]).dtype


def loop_equations(
    fun: Callable[..., list[jax.Array]],
    operands: Sequence[Sequence[Atom]],
    results: Sequence[Var],
    source_info: Any,
) -> list[JaxprEqn]:
    """Return equations that compute `results` from groups of operands, flat but for loops.

    A result that equals an operand or a constant is a copy.
    """

    def copies(*groups: list[jax.Array]) -> list[jax.Array]:
        return [copy_p.bind(value) for value in fun(*groups)]

    avals = [
        [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in map(aval_of, group)] for group in operands
    ]
    traced = flatten(jax.make_jaxpr(copies)(*avals), loops=False)
    return inlined(traced, [atom for group in operands for atom in group], results, source_info)


def stacked_variable(var: Var, length: int) -> Var:
    """Return a variable for the values that a variable has in all iterations."""
    aval = aval_of(var)
    return Var(aval.update(shape=(length, *aval.shape)))


def zero_equations(results: Sequence[Var], source_info: Any) -> list[JaxprEqn]:
    """Return equations that set `results` to zeros."""

    def zeros() -> list[jax.Array]:
        return [jnp.zeros(aval_of(var).shape, aval_of(var).dtype) for var in results]

    return loop_equations(zeros, [], results, source_info)


def value_of(atom: Atom, env: dict[Var, Any]) -> jax.Array:
    """Return the value of an operand, an array of its type."""
    return jnp.asarray(read(atom, env), aval_of(atom).dtype)
