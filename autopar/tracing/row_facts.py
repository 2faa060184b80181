"""Facts about the values of a step that sorts rows: their numbers, and the dims that are sorted."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import (
    approx_top_k_p,
    argmax_p,
    argmin_p,
    broadcast_in_dim_p,
    convert_element_type_p,
    reshape_p,
    sort_p,
    top_k_p,
)

from autopar.ir.graph import Atom, aval_of
from autopar.primitives import record_of
from autopar.tracing.row_tables import Known, Origin, RowTable, is_uniform, known_literal


class DependsOnOrderError(Exception):
    """Something depends on the order of a sort, given by the number of its equation."""

    def __init__(self, sort: int) -> None:
        super().__init__(sort)
        self.sort = sort


class SortedDim(NamedTuple):
    """The dim of an array whose rows a sort arranged.

    Attributes:
        sort: the number of the sort.
        dim: the dim.
        is_stacked: whether a loop stacked arrays of several sorts, one per iteration.
    """

    sort: int
    dim: int
    is_stacked: bool = False


class GroupSizes(NamedTuple):
    """What is known of the sizes of groups.

    Attributes:
        keys: the array by which rows are in groups.
        group: the variable with the group of each row.
        is_stacked: see `SortedDim`.
    """

    keys: Var
    group: Var
    is_stacked: bool = False


@dataclass
class RowFacts:
    """What is known of the variables of a step.

    Attributes:
        keys: the arrays that rows are sorted by, each with the numbers that it may hold.
        rows: the dims that are sorted.
        known: what is known of integer arrays.
        stacked: what is known of each array that a loop stacks.
        unmade: variables that no equation computes: the places of rows after a sort, with its
            number.
        even: for each variable, the dims along which its elements are equal.
        sizes: what is known of the sizes of groups.
        keys_of_sort: the array of each sort that is left out, by its number.
    """

    keys: dict[Var, np.ndarray]
    rows: dict[Var, SortedDim] = field(default_factory=dict)
    known: dict[Var, Known] = field(default_factory=dict)
    stacked: dict[Var, Known] = field(default_factory=dict)
    unmade: dict[Var, int] = field(default_factory=dict)
    even: dict[Var, frozenset[int]] = field(default_factory=dict)
    sizes: dict[Var, GroupSizes] = field(default_factory=dict)
    keys_of_sort: dict[int, Var] = field(default_factory=dict)

    def known_of(self, atom: Atom) -> Known | None:
        """Return what is known of the elements of a value."""
        return self.known.get(atom) if isinstance(atom, Var) else known_literal(atom)

    def sizes_of(self, atom: Atom) -> GroupSizes | None:
        """Return what is known of the sizes of groups in a value; None if it has none."""
        return self.sizes.get(atom) if isinstance(atom, Var) else None

    def rows_of(self, atom: Atom) -> SortedDim | None:
        """Return the sorted dim of a value; None if no sort arranged it."""
        return self.rows.get(atom) if isinstance(atom, Var) else None

    def unmade_by(self, atom: Atom) -> int | None:
        """Return the sort without which a value is not computed; None for other values."""
        return self.unmade.get(atom) if isinstance(atom, Var) else None

    def add_keys(self, var: Var) -> None:
        """Note that rows have numbers of their own, if they are keys of a sort."""
        if var in self.keys and var not in self.rows and var not in self.known:
            domain = self.keys[var]
            shape = aval_of(var).shape
            self.known[var] = RowTable(Origin("key", var), domain, shape, domain)

    def column(self, atom: Atom, origin: str) -> RowTable | None:
        """Return the table of an array if it has one number per row and this kind of origin."""
        known = self.known_of(atom)
        if not isinstance(known, RowTable) or not known.has_numbers:
            return None
        return known if known.origin.kind == origin and len(known.rows) == 1 else None

    def keys_of(self, table: RowTable) -> Var | None:
        """Return the keys that a table depends on, in the first or in sorted order, if any."""
        if table.origin.kind == "sorted":
            return self.keys_of_sort[sort_of(table)]
        return table.origin.of if isinstance(table.origin.of, Var) else None

    def check_order_unread(self, *atoms: Atom) -> None:
        """Refuse a sort whose order the atoms depend on."""
        for atom in atoms:
            if (sort := self.unmade_by(atom)) is not None:
                raise DependsOnOrderError(sort)
            if rows := self.rows_of(atom):
                raise DependsOnOrderError(rows.sort)

    def is_zero(self, atom: Atom) -> bool:
        """Return whether all elements of a value are known to be zero."""
        return is_uniform(self.known_of(atom), 0.0)

    def copy(self, atom: Atom, var: Var) -> None:
        """Note that a variable has the value of an atom."""
        if (known := self.known_of(atom)) is not None:
            self.known[var] = known
        if not isinstance(atom, Var):
            return
        for of in (self.rows, self.unmade, self.even, self.sizes, self.stacked):
            if atom in of:
                of[var] = of[atom]  # pyright: ignore[reportArgumentType]

    def even_dims(self, atom: Atom) -> frozenset[int]:
        """Return the dims along which the elements of a value are known to be equal."""
        return self.even.get(atom, frozenset()) if isinstance(atom, Var) else frozenset()

    def note_even(self, eqn: JaxprEqn) -> None:
        """Note along which dims the elements of a result are equal."""
        if len(eqn.outvars) != 1:
            return
        (out,) = eqn.outvars
        shape = aval_of(out).shape
        if eqn.primitive is broadcast_in_dim_p:
            dims = eqn.params["broadcast_dimensions"]
            sizes = aval_of(eqn.invars[0]).shape
            own = {
                dim: k
                for k, dim in enumerate(dims)
                if sizes[k] == shape[dim] and k not in self.even_dims(eqn.invars[0])
            }
            self.even[out] = frozenset(range(len(shape))).difference(own)
        elif record_of(eqn).fusion == "elementwise":
            arrays = [atom for atom in eqn.invars if aval_of(atom).shape]
            if arrays and all(aval_of(atom).shape == shape for atom in arrays):
                self.even[out] = frozenset.intersection(*map(self.even_dims, arrays))


def sort_of(table: RowTable) -> int:
    """Return the sort that a table of places or sorted keys comes from."""
    assert isinstance(table.origin.of, int)
    return table.origin.of


def keys_of_sorts(jaxpr: Jaxpr) -> dict[Var, np.ndarray]:
    """Return the arrays that rows are sorted by, each with the numbers that it may hold."""
    maker = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    keys: dict[Var, np.ndarray] = {}
    for eqn in jaxpr.eqns:
        atom = eqn.invars[0] if eqn.primitive is sort_p else None
        while isinstance(atom, Var) and jnp.issubdtype(aval_of(atom).dtype, jnp.integer):
            made_by = maker.get(atom)
            if made_by is None or made_by.primitive not in (reshape_p, convert_element_type_p):
                keys[atom] = _numbers(aval_of(atom).dtype, made_by)
                break
            atom = made_by.invars[0]
    return keys


def _numbers(dtype: Any, maker: JaxprEqn | None) -> np.ndarray:
    """Return the numbers that an array may hold; for an unknown range, numbers that represent it.

    Equal intervals are represented by the numbers at their ends.
    """
    dim = None if maker is None else _dim_of_indices(maker)
    if maker is not None and dim is not None:
        return np.arange(aval_of(maker.invars[0]).shape[dim]).astype(dtype)
    limits = jnp.iinfo(dtype)
    small = np.arange(max(limits.min, -2048), min(limits.max, 2048))
    return np.unique(np.array([limits.min, *small, limits.max])).astype(dtype)


def _dim_of_indices(maker: JaxprEqn) -> int | None:
    """Return the dim of its operand that a result of an equation has indices of, if any."""
    if maker.primitive is top_k_p:
        return maker.params["axis"]
    if maker.primitive is approx_top_k_p:
        return maker.params["reduction_dimension"]
    return maker.params["axes"][0] if maker.primitive in (argmax_p, argmin_p) else None
