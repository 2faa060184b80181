"""Write lookups in an example's own row as lookups with a batch dim.

`logits[jnp.arange(n), labels]` reads an element of each row. Its indices are the position of the
row and a label. But positions in a microbatch are not those in the whole batch. As a gather with a
batch dim, the lookup needs no position: row i of the labels indexes row i of the logits. So it is
the same for a microbatch. Scatters are written alike.
"""

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import (
    broadcast_in_dim_p,
    concatenate_p,
    convert_element_type_p,
    gather_p,
    iota_p,
    lt_p,
    reshape_p,
    select_n_p,
)

from autopar.ir.control_flow import SHIFTS
from autopar.ir.equation_groups import dependents
from autopar.ir.graph import Atom, aval_of, needed_eqns
from autopar.microbatch.deferred_division import equations
from autopar.primitives.index import is_scatter
from autopar.primitives.index_dims import IndexDims


def with_own_rows(jaxpr: Jaxpr, batch: Collection[int]) -> Jaxpr:
    """Return a flat jaxpr whose lookups at an example's own position have a batch dim instead.

    Args:
        jaxpr: the flat jaxpr of a step.
        batch: inputs whose first dim is the batch. What is read from arrays that do not depend on
            them is left: a table has as many rows as the batch by coincidence.
    """
    lookups = _Lookups(dependents(enumerate(jaxpr.eqns), (jaxpr.invars[i] for i in batch)))
    for eqn in jaxpr.eqns:
        lookups.add(eqn)
    if not lookups.num_changed:
        return jaxpr
    return jaxpr.replace(eqns=needed_eqns(lookups.eqns, jaxpr.outvars))


@dataclass
class _Lookups:
    """The equations so far, and what is known of the indices that they compute.

    Attributes:
        depending: the values that depend on the batch.
        eqns: the equations, with lookups in own rows written with batch dims.
        num_changed: the number of lookups that were changed.
        counted: for each array whose elements are their index along some dim, that dim.
        negative: truth values that are false everywhere: an index compared with zero.
        columns: for each array of index vectors, the arrays that it concatenates.
    """

    depending: Set[Var]
    eqns: list[JaxprEqn] = field(default_factory=list)
    num_changed: int = 0
    counted: dict[Var, int] = field(default_factory=dict)
    negative: set[Var] = field(default_factory=set)
    columns: dict[Var, list[Atom]] = field(default_factory=dict)

    def add(self, eqn: JaxprEqn) -> None:
        """Append an equation."""
        is_read = eqn.primitive is gather_p and eqn.invars[0] in self.depending
        if is_read or is_scatter(eqn):
            self._add_lookup(eqn)
            return
        self.eqns.append(eqn)
        match eqn.primitive:
            case _ if eqn.primitive in SHIFTS:
                self._follow_marker(eqn)
            case _ if eqn.primitive is concatenate_p:
                shape = aval_of(eqn.outvars[0]).shape
                if eqn.params["dimension"] == len(shape) - 1:
                    self.columns[eqn.outvars[0]] = list(eqn.invars)
            case _ if eqn.primitive is lt_p:
                index, bound = eqn.invars
                if self._dim(index) is not None and _is_zero(bound):
                    self.negative.add(eqn.outvars[0])
            case _:
                dim = self._counted_dim(eqn)
                if dim is not None:
                    self.counted[eqn.outvars[0]] = dim

    def _follow_marker(self, eqn: JaxprEqn) -> None:
        """Note what a value is that enters a loop, or that one loop stacks and another reads."""
        value, token = eqn.invars
        (out,) = eqn.outvars
        shift = SHIFTS[eqn.primitive]
        if (dim := self._dim(value)) is not None and dim + shift >= 0:
            self.counted[out] = dim + shift
        if not isinstance(value, Var):
            return
        if value in self.negative:
            self.negative.add(out)
        if value not in self.columns:
            return
        lead = aval_of(out).shape[:shift] if shift > 0 else ()
        self.columns[out] = []
        for column in self.columns[value]:
            shape = (*lead, *aval_of(column).shape[max(0, -shift) :])
            own = Var(ShapedArray(shape, aval_of(column).dtype))
            self.columns[out].append(own)
            marker = eqn.replace(invars=[column, token], outvars=[own])
            self.eqns.append(marker)
            self._follow_marker(marker)

    def _dim(self, atom: Atom) -> int | None:
        return self.counted.get(atom) if isinstance(atom, Var) else None

    def _counted_dim(self, eqn: JaxprEqn) -> int | None:
        """Return the dim along which the elements of a result are their index, if there is one."""
        result = aval_of(eqn.outvars[0]) if len(eqn.outvars) == 1 else None
        if result is None or not jnp.issubdtype(result.dtype, jnp.integer):
            return None
        if eqn.primitive is iota_p:
            fits = result.shape[eqn.params["dimension"]] <= jnp.iinfo(result.dtype).max
            return eqn.params["dimension"] if fits else None
        if eqn.primitive is select_n_p:  # the index of an element from the end, if it is negative
            condition, index = eqn.invars[:2]
            negative = isinstance(condition, Var) and condition in self.negative
            return self._dim(index) if negative else None
        dim = self._dim(eqn.invars[0]) if eqn.invars else None
        if dim is None:
            return None
        size = aval_of(eqn.invars[0]).shape[dim]
        if eqn.primitive is convert_element_type_p:
            return dim if size <= jnp.iinfo(result.dtype).max else None
        if eqn.primitive is broadcast_in_dim_p:
            target = eqn.params["broadcast_dimensions"][dim]
            return target if result.shape[target] == size else None
        if eqn.primitive is reshape_p:
            return _dim_after_reshape(aval_of(eqn.invars[0]).shape, result.shape, dim)
        return None

    def _add_lookup(self, eqn: JaxprEqn) -> None:
        """Append a gather or scatter, with a batch dim for each index that is an own position."""
        operand, indices = aval_of(eqn.invars[0]).shape, eqn.invars[1]
        *places, width = aval_of(indices).shape
        columns = self.columns.get(indices, [indices]) if isinstance(indices, Var) else [indices]
        dims = IndexDims.of(eqn)
        batched: dict[int, int] = {}
        for column, name in zip(columns, _column_numbers(columns), strict=True):
            at = self._dim(column)
            dim = dims.indexed[name] if name is not None else None
            if (
                at is not None
                and dim is not None
                and at < len(places)
                and dim in dims.dropped
                and at not in (*dims.batched.values(), *batched.values())
                and operand[dim] == places[at]
            ):
                batched[dim] = at
        if not batched:
            self.eqns.append(eqn)
            return
        self.num_changed += 1
        kept = [
            column
            for column, name in zip(columns, _column_numbers(columns), strict=True)
            if name is None or dims.indexed[name] not in batched
        ]
        others = self._concatenated(eqn, kept, (*places, width - len(batched)))
        invars = [eqn.invars[0], others, *eqn.invars[2:]]
        changed = IndexDims(
            dims.windows,
            tuple(dim for dim in dims.dropped if dim not in batched),
            tuple(dim for dim in dims.indexed if dim not in batched),
            {**dims.batched, **batched},
        )
        params = {**eqn.params, "dimension_numbers": changed.numbers(eqn)}
        self.eqns.append(eqn.replace(invars=invars, params=params))

    def _concatenated(self, eqn: JaxprEqn, columns: list[Atom], shape: tuple[int, ...]) -> Atom:
        """Return the index vectors that consist of `columns`, and append what computes them."""
        if len(columns) == 1:
            return columns[0]
        dtype = aval_of(eqn.invars[1]).dtype
        indices = Var(ShapedArray(shape, dtype))

        def concatenated(*parts: Any) -> Any:
            return jnp.concatenate(parts, -1) if parts else jnp.zeros(shape, dtype)

        self.eqns += equations(concatenated, columns, indices, eqn.source_info)
        return indices


def _column_numbers(columns: Sequence[Atom]) -> list[int | None]:
    """Return the place of each column in an index vector; None for columns of several numbers."""
    places: list[int | None] = []
    start = 0
    for column in columns:
        width = aval_of(column).shape[-1]
        places.append(start if width == 1 else None)
        start += width
    return places


def _is_zero(atom: Atom) -> bool:
    return isinstance(atom, Literal) and not np.any(atom.val)


def _dim_after_reshape(source: Sequence[int], target: Sequence[int], dim: int) -> int | None:
    """Return the place of a dim after a reshape that adds or removes dims of size one."""
    if [size for size in source if size > 1] != [size for size in target if size > 1]:
        return None
    if source[dim] == 1:
        return None
    before = sum(size > 1 for size in source[:dim])
    return [at for at, size in enumerate(target) if size > 1][before]
