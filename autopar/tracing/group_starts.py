"""Where groups of sorted rows start, and so the group of each row.

`jnp.repeat(jnp.arange(groups), sizes, total_repeat_length=rows)` is the group of each sorted row,
with which a mixture of experts looks up a bias or a scale of each expert. JAX computes it from the
sizes of the groups in three steps: where each group starts, which is the sum of the sizes before
it; how many groups start at each row; and how many have started up to a row, a cumulative sum.

A place among the rows may also be compared with sums of sizes: `jnp.arange(rows) < sizes.sum()` is
false for the rows of no group, which are the last ones.

Sizes may be differences of such sums: `jnp.searchsorted` with method "compare_all" counts the rows
of the first groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var
from jax.extend.core.primitives import (
    broadcast_in_dim_p,
    cumsum_p,
    lt_p,
    scatter_add_p,
    scatter_p,
    select_n_p,
)
from jax.lax import GatherScatterMode

from autopar.ir.graph import Atom, aval_of
from autopar.primitives import record_of
from autopar.tracing.row_facts import GroupSizes, RowFacts
from autopar.tracing.row_tables import MOST_ELEMENTS, core, holds, spread


class ReachedGroups(NamedTuple):
    """The result of comparing the places of sorted rows with sums of the sizes of first groups.

    Attributes:
        sizes: the sizes of all groups.
        num_groups: the number of groups.
        dim: the dim of the rows.
        first: the number of groups whose sizes are added up, the least of all elements.
        groups_dim: the dim along which each element adds up one group more; None if all add up
            equally many.
        reached: the result where the group of a row is none of those that are added up.
    """

    sizes: GroupSizes
    num_groups: int
    dim: int
    first: int
    groups_dim: int | None
    reached: bool


@dataclass(frozen=True, eq=False, slots=True)
class SumsOfSizes:
    """An array of sums of sizes of groups.

    Attributes:
        sizes: the sizes.
        summed: for each element of the array 1 for the groups whose sizes it adds up, and 0 for the
            others, shape (*shape of the array, groups).
    """

    sizes: GroupSizes
    summed: np.ndarray

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return self.summed.shape[-1]

    @property
    def first_groups(self) -> np.ndarray | None:
        """The number of groups whose sizes each element adds up, if these are the first ones.

        Dims along which all elements are equal have size one.
        """
        summed = core(self.summed)
        count = summed.sum(-1)
        is_first = np.arange(self.num_groups) < count[..., None]
        return count if np.array_equal(summed, is_first) else None


@dataclass
class GroupStarts:
    """What is known of arrays that a step computes from sizes of groups.

    Attributes:
        facts: what is known of its other arrays.
        sums: the arrays of sums of sizes.
        starting: for each array with the number of groups that start at a row, the sizes of the
            groups, and their number.
    """

    facts: RowFacts
    sums: dict[Var, SumsOfSizes] = field(default_factory=dict)
    starting: dict[Var, tuple[GroupSizes, int]] = field(default_factory=dict)

    def note(self, eqn: JaxprEqn) -> None:
        """Note what is known of the result of an equation."""
        operands = {k: sums for k, atom in enumerate(eqn.invars) if (sums := self._sums(atom))}
        if not operands or len(eqn.outvars) != 1:
            return
        (out,) = eqn.outvars
        if eqn.primitive is lt_p:
            self._note_not_negative(eqn)
        elif eqn.primitive is select_n_p:
            which = self.facts.known_of(eqn.invars[0])
            if isinstance(which, np.ndarray) and not core(which).any() and 1 in operands:
                self.sums[out] = operands[1]
        elif eqn.primitive is scatter_add_p:
            self._note_starting(eqn)
        elif _is_linear(eqn) and (found := self._result(eqn, operands)):
            self.add(out, found)

    def add(self, var: Var, sums: SumsOfSizes) -> None:
        """Note that a variable has sums of sizes, or the size of each of the first groups."""
        self.sums[var] = sums
        count = len(sums.summed)
        if np.array_equal(sums.summed, np.eye(count, sums.num_groups)):
            self.facts.sizes[var] = sums.sizes

    def started(self, eqn: JaxprEqn) -> tuple[GroupSizes, int] | None:
        """Return the sizes and the number of groups if an equation counts those started by a row.

        It is None for other equations.
        """
        if eqn.primitive is not cumsum_p or eqn.params["reverse"]:
            return None
        counted = eqn.invars[0]
        return None if isinstance(counted, Literal) else self.starting.get(counted)

    def reached(self, eqn: JaxprEqn) -> ReachedGroups | None:
        """Return what an equation says of groups if it compares places of rows with their starts.

        It is None for other equations.
        """
        for at in (0, 1):
            reached = _of_reached(eqn, at)
            if reached is None:
                continue
            places, sums = self.facts.known_of(eqn.invars[at]), self._sums(eqn.invars[1 - at])
            if sums is None or not isinstance(places, np.ndarray):
                continue
            counts, rows = sums.first_groups, aval_of(sums.sizes.keys).size
            dims = [dim for dim, size in enumerate(core(places).shape) if size > 1]
            if counts is None or len(dims) != 1 or (counts.ndim and counts.shape[dims[0]] > 1):
                continue
            along = [dim for dim, size in enumerate(counts.shape) if size > 1]
            first = int(counts.flat[0])
            is_ascending = np.array_equal(counts.ravel(), first + np.arange(counts.size))
            if (
                is_ascending
                and len(along) < 2
                and np.array_equal(core(places).ravel(), np.arange(rows))
            ):
                groups_dim = along[0] if along else None
                return ReachedGroups(
                    sums.sizes, sums.num_groups, dims[0], first, groups_dim, reached
                )
        return None

    def _sums(self, atom: Atom) -> SumsOfSizes | None:
        if isinstance(atom, Literal):
            return None
        sizes = self.facts.sizes_of(atom)
        if atom not in self.sums and sizes and not sizes.is_stacked:
            (groups,) = aval_of(atom).shape
            if groups**2 <= MOST_ELEMENTS:
                self.sums[atom] = SumsOfSizes(sizes, np.eye(groups, dtype=np.int64))
        return self.sums.get(atom)

    def _note_not_negative(self, eqn: JaxprEqn) -> None:
        """Note that no sum of sizes is below zero, as JAX asks of each index."""
        if self._sums(eqn.invars[0]) and self.facts.is_zero(eqn.invars[1]):
            (out,) = eqn.outvars
            self.facts.known[out] = np.broadcast_to(np.False_, aval_of(out).shape)

    def _result(self, eqn: JaxprEqn, operands: Mapping[int, SumsOfSizes]) -> SumsOfSizes | None:
        """Return the sums that an equation computes from sums and constants; None for others."""
        known = [self.facts.known_of(atom) for atom in eqn.invars]
        sizes = next(iter(operands.values())).sizes
        if eqn.primitive is broadcast_in_dim_p:
            shape, dims = aval_of(eqn.outvars[0]).shape, eqn.params["broadcast_dimensions"]
            groups = operands[0].num_groups
            summed = spread(operands[0].summed, (*shape, groups), [*dims, len(shape)])
            return SumsOfSizes(sizes, summed)
        of_same = all(sums.sizes.group is sizes.group for sums in operands.values())
        others = [each for k, each in enumerate(known) if k not in operands]
        aval = aval_of(eqn.outvars[0])
        if not of_same or not all(isinstance(each, np.ndarray) for each in others):
            return None
        if not _holds_integers(eqn.outvars[0], aval_of(sizes.keys).size):
            return None
        largest = max(aval.size, *(aval_of(atom).size for atom in eqn.invars))
        if largest * operands[min(operands)].num_groups > MOST_ELEMENTS:
            return None

        def apply(*columns: jax.Array) -> jax.Array:
            given = dict(zip(operands, columns, strict=True))
            values = [
                given[k].astype(aval_of(atom).dtype) if k in given else jnp.asarray(known[k])
                for k, atom in enumerate(eqn.invars)
            ]
            return eqn.primitive.bind(*values, **eqn.params)

        summed = [sums.summed for sums in operands.values()]
        with jax.ensure_compile_time_eval():
            constant = apply(*(jnp.zeros(each.shape[:-1]) for each in summed))
            columns = jax.vmap(apply, -1, -1)(*map(jnp.asarray, summed))
        result = np.asarray(columns)
        if np.asarray(constant).any() or not np.isin(result, (0, 1)).all():
            return None
        return SumsOfSizes(sizes, result)

    def _note_starting(self, eqn: JaxprEqn) -> None:
        """Note that a result counts the groups that start at each row."""
        start, indices, updates = eqn.invars
        sums, (out,) = self._sums(indices), eqn.outvars
        if sums is None or not self.facts.is_zero(start):
            return
        groups = sums.num_groups
        before = np.tri(groups, k=-1)
        updated = self.facts.known_of(updates)
        if (
            aval_of(out).shape == (aval_of(sums.sizes.keys).size,)
            and isinstance(updated, np.ndarray)
            and (core(updated) == 1).all()
            and np.array_equal(sums.summed, before[:, None])
            and eqn.params["mode"] is GatherScatterMode.FILL_OR_DROP  # an empty last group
            and _holds_integers(out, groups)
        ):
            self.starting[out] = sums.sizes, groups


def _is_linear(eqn: JaxprEqn) -> bool:
    """Return whether a result is linear in operands if all others are constants."""
    return eqn.primitive is scatter_p or record_of(eqn).algebra in ("linear", "sum")


def _of_reached(eqn: JaxprEqn, at: int) -> bool | None:
    """Return what a comparison is for places that are no smaller than the other operand.

    It is None for other equations.

    Args:
        eqn: an equation.
        at: the number of the operand with the places.
    """
    match eqn.primitive.name, at:
        case ("ge", 0) | ("le", 1):
            return True
        case ("lt", 0) | ("gt", 1):
            return False
    return None


def _holds_integers(atom: Atom, count: int) -> bool:
    """Return whether an array has integers of a type that goes from 0 to `count` at least."""
    dtype = aval_of(atom).dtype
    return jnp.issubdtype(dtype, jnp.integer) and holds(dtype, count)
