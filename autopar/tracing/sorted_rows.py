"""Rewrite a mixture of experts that sorts tokens, so that the tokens keep their order.

A mixture of experts without a capacity sorts the rows of its tokens by expert, multiplies groups of
rows with `jax.lax.ragged_dot`, and puts the rows back. Only the products depend on the order. So
each value whose rows are sorted is replaced by one with the rows in their first order: the lookups
that sort rows repeat them instead, those that put them back are left out, and the products take the
group of each row (`autopar.primitives.ragged_products`). Devices and microbatches then need only
their own tokens.

A sort stays if something else depends on its order, such as an index that is an output of the step.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import (
    convert_element_type_p,
    gather_p,
    reduce_sum_p,
    select_n_p,
    sort_p,
)
from jax.lax import scatter_add_p, scatter_p

from autopar.ir import control_flow
from autopar.ir.graph import Atom, aval_of, needed_eqns
from autopar.microbatch.deferred_division import equations
from autopar.primitives import op_factors, record_of
from autopar.primitives.factors import PARTIAL
from autopar.primitives.index_dims import IndexDims
from autopar.primitives.ragged_products import dims_of, grouped_dot_p
from autopar.tracing.group_starts import GroupStarts, SumsOfSizes
from autopar.tracing.row_facts import (
    DependsOnOrderError,
    GroupSizes,
    RowFacts,
    SortedDim,
    keys_of_sorts,
    sort_of,
)
from autopar.tracing.row_tables import (
    MOST_ELEMENTS,
    Origin,
    RowTable,
    core,
    holds,
    is_uniform,
    known_result,
)


def without_sorted_rows(jaxpr: Jaxpr) -> Jaxpr:
    """Return a flat jaxpr whose ragged products take rows in their first order, where possible."""
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    if not {"ragged_dot_general", "sort"} <= names:
        return jaxpr
    kept: set[int] = set()
    while True:
        try:
            eqns = _Unsorting(jaxpr, kept).eqns
        except DependsOnOrderError as dependence:
            kept.add(dependence.sort)
            continue
        return jaxpr.replace(eqns=needed_eqns(eqns, jaxpr.outvars))


class _Unsorting:
    """The equations of a step without the sorts whose order only products depend on.

    Attributes:
        eqns: the new equations.
        first_order: for each variable that changes, the atom that replaces it: with rows in their
            first order, if they were sorted.
        facts: what is known of the variables of the old trace.
        starts: what is known of those that are computed from sizes of groups.
        columns: for each array with the groups of rows that has several dims, the same as one.
    """

    def __init__(self, jaxpr: Jaxpr, kept: set[int]) -> None:
        self.kept = kept
        self.eqns: list[JaxprEqn] = []
        self.first_order: dict[Var, Atom] = {}
        self.facts = RowFacts(keys_of_sorts(jaxpr))
        self.starts = GroupStarts(self.facts)
        self.columns: dict[Var, Var] = {}
        for var in jaxpr.invars:
            self.facts.add_keys(var)
        for number, eqn in enumerate(jaxpr.eqns):
            self._add(number, eqn)
            for var in eqn.outvars:
                self.facts.add_keys(var)
        for atom in jaxpr.outvars:
            self.facts.check_order_unread(atom)

    def _read(self, atom: Atom) -> Atom:
        return self.first_order.get(atom, atom) if isinstance(atom, Var) else atom

    def _add(self, number: int, eqn: JaxprEqn) -> None:
        """Add an equation of the old trace."""
        if eqn.primitive in control_flow.MARKERS:
            self._add_marker(eqn)
        elif record_of(eqn).passes_through:
            self._pass_through(eqn)
        elif not self._moves_rows(number, eqn):
            self._add_sizes(eqn)
            self.starts.note(eqn)
            self._add_plain(eqn)

    def _moves_rows(self, number: int, eqn: JaxprEqn) -> bool:
        """Add an equation that sorts rows or puts them back; return whether it does."""
        if eqn.primitive is sort_p:
            return number not in self.kept and self._add_sort(number, eqn)
        if eqn.primitive is gather_p:
            return self._add_gather(eqn)
        if eqn.primitive is select_n_p:
            return self._add_choice(eqn)
        if eqn.primitive in (scatter_p, scatter_add_p):
            return self._add_scatter(eqn)
        return self._add_groups(eqn)

    def _emit(self, eqn: JaxprEqn, **changes: Any) -> None:
        changes = {"invars": [self._read(atom) for atom in eqn.invars], **changes}
        self.eqns.append(eqn.replace(**changes))

    def _compute(self, eqn: JaxprEqn, fun: Callable[..., Any], operand: Atom, aval: Any) -> Var:
        """Add the equations of a function of one array, and return the variable of its result."""
        result = Var(ShapedArray(aval.shape, aval.dtype))
        self.eqns += equations(fun, [operand], result, eqn.source_info)
        return result

    def _add_sort(self, number: int, eqn: JaxprEqn) -> bool:
        """Leave out a sort of rows by one key; return whether it can be."""
        facts = self.facts
        keys = eqn.invars[0]
        key_aval = aval_of(keys)
        if eqn.params["num_keys"] != 1 or key_aval.ndim != 1:
            return False
        places = np.arange(key_aval.shape[0])
        counted = [
            isinstance(known := facts.known_of(atom), np.ndarray) and np.array_equal(known, places)
            for atom in eqn.invars
        ]
        order = facts.column(keys, "before")
        if order is not None and order.is_column(places) and all(counted[1:]):
            sort = sort_of(order)
            for var in eqn.outvars:
                facts.known[var] = RowTable(Origin("after", sort), places, places.shape, places)
                facts.unmade[var] = sort
            if eqn.outvars:
                facts.known[eqn.outvars[0]] = places
            return True
        facts.check_order_unread(*eqn.invars)
        table = facts.column(keys, "key")
        if table is None or not table.is_column(table.domain):
            return False
        for atom, var, is_counted in zip(eqn.invars, eqn.outvars, counted, strict=True):
            facts.rows[var] = SortedDim(number, 0)
            self.first_order[var] = self._read(atom)
            if is_counted:
                facts.known[var] = RowTable(Origin("before", number), places, places.shape, places)
        keys = facts.keys_of(table)
        assert keys is not None
        facts.keys_of_sort[number] = keys
        facts.known[eqn.outvars[0]] = replace(table, origin=Origin("sorted", number))
        return True

    def _add_gather(self, eqn: JaxprEqn) -> bool:
        """Add a lookup that sorts rows, or puts them back; return whether it does."""
        facts = self.facts
        operand, indices = eqn.invars
        if not _takes_rows(eqn):
            return False
        (out,) = eqn.outvars
        rows = facts.rows_of(operand)
        before, after = (facts.column(indices, origin) for origin in ("before", "after"))
        placed = facts.known_of(operand)
        if isinstance(placed, RowTable) and placed.origin.kind == "after":
            if before is None or before.origin.of != placed.origin.of or len(placed.rows) != 1:
                return False
            if not before.is_column(before.domain):
                return False
            facts.known[out] = placed.values
            facts.unmade[out] = sort_of(before)
            return True
        if before is not None and rows is None:
            size, count = len(before.domain), aval_of(operand).shape[0]
            if size % count or not before.is_column(before.domain // (size // count)):
                return False
            sort = sort_of(before)
            facts.rows[out] = SortedDim(sort, 0)
            repeat = _repeated(size // count)
            source = self._read(operand)
            self.first_order[out] = (
                source if size == count else self._compute(eqn, repeat, source, aval_of(out))
            )
            keys = facts.column(operand, "key")
            if keys is not None and keys.origin.of is facts.keys_of_sort[sort] and size == count:
                facts.known[out] = replace(keys, origin=Origin("sorted", sort))
            return True
        if after is not None and rows == SortedDim(sort_of(after), 0):
            if not after.is_column(after.domain) or len(after.domain) != aval_of(operand).shape[0]:
                return False
            self.first_order[out] = self._read(operand)
            return True
        return False

    def _add_scatter(self, eqn: JaxprEqn) -> bool:
        """Add a scatter that puts rows back, or sorts them; return whether it does."""
        facts = self.facts
        start, indices, updates = eqn.invars
        if not _writes_rows(eqn):
            return False
        (out,) = eqn.outvars
        rows = facts.rows_of(updates)
        before, after = (facts.column(indices, origin) for origin in ("before", "after"))
        size, count = aval_of(updates).shape[0], aval_of(start).shape[0]
        adds = eqn.primitive is scatter_add_p
        if size % count or (size != count and not adds) or (adds and not facts.is_zero(start)):
            return False
        if before is not None and before.is_column(before.domain // (size // count)):
            sort = sort_of(before)
            if rows == SortedDim(sort, 0):
                total, source = _summed(size // count), self._read(updates)
                self.first_order[out] = (
                    source if size == count else self._compute(eqn, total, source, aval_of(out))
                )
                return True
            known = facts.known_of(updates)
            places = np.arange(size)
            if size == count and isinstance(known, np.ndarray) and aval_of(out).dtype.kind in "iu":
                facts.known[out] = RowTable(Origin("after", sort), places, places.shape, known)
                facts.unmade[out] = sort
                return True
        if after is not None and rows is None and after.is_column(after.domain) and size == count:
            facts.rows[out] = SortedDim(sort_of(after), 0)
            self.first_order[out] = self._read(updates)
            return True
        return False

    def _add_choice(self, eqn: JaxprEqn) -> bool:
        """Add a choice that is known although a sort decides it; return whether it is.

        Of a scatter whose indices may be equal, JAX differentiates the updates that were written
        last. The indices of a sort are all different.
        """
        facts = self.facts
        which, *cases = eqn.invars
        known = facts.known_of(which)
        if facts.unmade_by(which) is None or known is None:
            return False
        numbers = np.unique(core(known.values if isinstance(known, RowTable) else known))
        if len(numbers) != 1:
            return False
        (out,) = eqn.outvars
        chosen = cases[int(numbers[0])]
        self.first_order[out] = self._read(chosen)
        facts.copy(chosen, out)
        return True

    def _add_groups(self, eqn: JaxprEqn) -> bool:
        """Add an equation whose result depends on the group of each sorted row alone.

        Rows of no group are after the rows of the last one.

        Returns:
            Whether it is such an equation: one plus the last group that has started up to a row, or
            whether groups have started.
        """
        if len(eqn.outvars) != 1:
            return False
        (out,), aval = eqn.outvars, aval_of(eqn.outvars[0])
        if started := self.starts.started(eqn):
            (sizes, count), dim = started, 0

            def fun(group: Any) -> Any:
                return jnp.minimum(group, count - 1) + 1

        elif reached := self.starts.reached(eqn):
            sizes, count, dim = reached.sizes, reached.num_groups, reached.dim

            def fun(group: Any) -> Any:
                of_rows = lax.broadcast_in_dim(group, aval.shape, (dim,))
                added = reached.first
                if reached.groups_dim is not None:
                    added += lax.broadcasted_iota(group.dtype, aval.shape, reached.groups_dim)
                return (of_rows >= added) == reached.reached

        else:
            return False
        sort = self._sort_by(sizes)
        if sort is None:
            return False

        def of_groups(group: Any) -> Any:
            is_valid = (group >= 0) & (group < count)
            return fun(jnp.where(is_valid, group, count)).astype(aval.dtype)

        self.facts.rows[out] = SortedDim(sort, dim)
        self.first_order[out] = self._compute(eqn, of_groups, sizes.group, aval)
        return True

    def _sort_by(self, sizes: GroupSizes) -> int | None:
        """Return the last sort that is left out and arranges rows by these groups, if any does."""
        of_keys = self.facts.keys_of_sort.items()
        return max((sort for sort, keys in of_keys if keys is sizes.keys), default=None)

    def _pass_through(self, eqn: JaxprEqn) -> None:
        """Add an equation whose results are its operands."""
        made = [k for k, atom in enumerate(eqn.invars) if self.facts.unmade_by(atom) is None]
        self._emit(
            eqn,
            invars=[self._read(eqn.invars[k]) for k in made],
            outvars=[eqn.outvars[k] for k in made],
        )
        for atom, var in zip(eqn.invars, eqn.outvars, strict=True):
            self.facts.copy(atom, var)

    def _add_sizes(self, eqn: JaxprEqn) -> None:
        """Note that a result counts the rows of each group."""
        facts = self.facts
        if len(eqn.outvars) != 1 or len(aval_of(eqn.outvars[0]).shape) != 1:
            return
        (out,) = eqn.outvars
        num_groups = aval_of(out).shape[0]
        if eqn.primitive is scatter_add_p:
            start, indices, updates = eqn.invars
            table = facts.known_of(indices)
            if not (isinstance(table, RowTable) and table.has_numbers):
                return
            counts = is_uniform(facts.known_of(updates), 1.0) and facts.is_zero(start)
            if facts.keys_of(table) and counts and _are_groups(eqn, table, num_groups):
                facts.sizes[out] = self._sizes_of(eqn, table, indices)
        elif eqn.primitive is reduce_sum_p:
            table = facts.known_of(eqn.invars[0])
            if not isinstance(table, RowTable) or facts.keys_of(table) is None:
                return
            if tuple(eqn.params["axes"]) != table.row_dims or table.domain[0] < 0:
                return
            one_hot = table.domain[:, None] == np.arange(num_groups)
            if np.array_equal(table.values, one_hot):
                facts.sizes[out] = self._sizes_of(eqn, table)
                return
            summed = _summed_groups(table, num_groups)
            if summed is not None and holds(aval_of(out).dtype, prod(table.rows)):
                self.starts.add(out, SumsOfSizes(self._sizes_of(eqn, table), summed))
        elif eqn.primitive is convert_element_type_p and isinstance(eqn.invars[0], Var):
            sizes = facts.sizes.get(eqn.invars[0])
            dtypes = [aval_of(atom).dtype for atom in (*eqn.invars, *eqn.outvars)]
            if sizes and all(holds(dtype, aval_of(sizes.keys).size) for dtype in dtypes):
                facts.sizes[out] = sizes

    def _sizes_of(self, eqn: JaxprEqn, table: RowTable, indices: Atom | None = None) -> GroupSizes:
        """Return the sizes of groups: the group of a row is its key, or its index."""
        keys = self.facts.keys_of(table)
        assert keys is not None
        group = keys if indices is None or table.is_column(table.domain) else indices
        column = self._read(group)
        assert isinstance(column, Var)
        if len(aval_of(column).shape) != 1 and column not in self.columns:
            shape = ShapedArray((prod(table.rows),), aval_of(column).dtype)
            self.columns[column] = self._compute(eqn, lambda x: x.reshape(-1), column, shape)
        return GroupSizes(keys, self.columns.get(column, column))

    def _add_plain(self, eqn: JaxprEqn) -> None:
        """Add any other equation, which may compute sorted rows one by one, or sum over them."""
        facts = self.facts
        known = known_result(eqn, [facts.known_of(atom) for atom in eqn.invars])
        if known is not None:
            facts.known[eqn.outvars[0]] = known
        after = [sort for atom in eqn.invars if (sort := facts.unmade_by(atom)) is not None]
        if after:
            if known is None:
                raise DependsOnOrderError(after[0])
            facts.unmade[eqn.outvars[0]] = after[0]
            return
        facts.note_even(eqn)
        sort = next((rows.sort for atom in eqn.invars if (rows := facts.rows_of(atom))), None)
        if eqn.primitive.name == "ragged_dot_general":
            sort = self._sort_of_even_rows(eqn) if sort is None else sort
            if sort is not None:
                self._add_product(eqn, sort)
                return
        if sort is None:
            self._emit(eqn)
            return
        self._arrange_results(eqn, sort)
        unsorted = {"indices_are_sorted": False} if "indices_are_sorted" in eqn.params else {}
        self._emit(eqn, params=eqn.params | unsorted)

    def _arrange_results(self, eqn: JaxprEqn, sort: int) -> None:
        """Note which dims of the results are sorted.

        The sort is refused unless the equation treats all rows alike, and operands that share the
        dim of rows are sorted in the same way or equal in all rows.
        """
        facts = self.facts
        factors = op_factors(eqn)
        row_factors: set[tuple[int, ...]] = set()
        for atom, dims in zip(eqn.invars, factors.operands, strict=True):
            if rows := facts.rows_of(atom):
                if rows.sort != sort or rows.is_stacked:
                    raise DependsOnOrderError(rows.sort)
                row_factors.add(dims[rows.dim])
        if len(row_factors) != 1 or len(row_factor := row_factors.pop()) != 1:
            raise DependsOnOrderError(sort)
        (factor,) = row_factor
        kind = factors.kinds[factor]
        if kind != "parallel" and kind not in PARTIAL:
            raise DependsOnOrderError(sort)
        for atom, dims in zip(eqn.invars, factors.operands, strict=True):
            rows = facts.rows_of(atom)
            for dim, of in enumerate(dims):
                if factor not in of or (rows is not None and rows.dim == dim and of == (factor,)):
                    continue
                if rows is not None or dim not in facts.even_dims(atom):
                    raise DependsOnOrderError(sort)
        for var, dims in zip(eqn.outvars, factors.results, strict=True):
            at = [dim for dim, of in enumerate(dims) if factor in of]
            if kind == "parallel" and (len(at) != 1 or dims[at[0]] != (factor,)):
                raise DependsOnOrderError(sort)
            if kind != "parallel" and at:
                raise DependsOnOrderError(sort)
            if at:
                facts.rows[var] = SortedDim(sort, at[0])

    def _add_product(self, eqn: JaxprEqn, sort: int) -> None:
        """Add a ragged product as one that takes the group of each row."""
        facts = self.facts
        dims = dims_of(eqn)
        sizes = facts.sizes_of(eqn.invars[2])
        if dims is None or dims.batch or sizes is None or sizes.is_stacked:
            raise DependsOnOrderError(sort)
        is_sorted = all(
            self._has_rows(atom, dim, sort)
            for atom, dim in zip(eqn.invars, (dims.rows, dims.rows_of_rhs), strict=False)
        )
        if not is_sorted or facts.keys_of_sort[sort] is not sizes.keys:
            raise DependsOnOrderError(sort)
        out = aval_of(eqn.outvars[0]).shape
        count = out[0] if dims.groups is None else aval_of(eqn.invars[1]).shape[dims.groups]
        names = ("precision", "preferred_element_type", "ragged_dot_dimension_numbers")
        params = {name: eqn.params[name] for name in names} | {"num_groups": count}
        operands = [*map(self._read, eqn.invars[:2]), sizes.group]
        self._emit(eqn, primitive=grouped_dot_p, invars=operands, params=params)
        if dims.groups is not None:
            free = [
                d
                for d in range(len(aval_of(eqn.invars[0]).shape))
                if d not in dict(dims.contracted)
            ]
            facts.rows[eqn.outvars[0]] = SortedDim(sort, free.index(dims.rows))

    def _has_rows(self, atom: Atom, dim: int | None, sort: int) -> bool:
        """Return whether a dim has rows in the order of a sort, or equal ones; None is no dim."""
        rows = self.facts.rows_of(atom)
        if rows is None:
            return dim is None or dim in self.facts.even_dims(atom)
        return dim is not None and rows == SortedDim(sort, dim)

    def _sort_of_even_rows(self, eqn: JaxprEqn) -> int | None:
        """Return a sort by the groups of a ragged product whose rows are equal to one another.

        It is None for other products.
        """
        dims, sizes = dims_of(eqn), self.facts.sizes_of(eqn.invars[2])
        if dims is None or sizes is None or dims.rows not in self.facts.even_dims(eqn.invars[0]):
            return None
        return self._sort_by(sizes)

    # -- loops

    def _add_marker(self, eqn: JaxprEqn) -> None:
        """Add a marker of a loop or branch; sorted rows may enter, be stacked and be sliced."""
        facts = self.facts
        if eqn.primitive not in (
            control_flow.loop_const_p,
            control_flow.loop_stack_p,
            control_flow.loop_slice_p,
        ):
            facts.check_order_unread(*eqn.invars)
            self._emit(eqn)
            return
        value, token = eqn.invars
        (out,) = eqn.outvars
        if not isinstance(value, Var):
            self._emit(eqn)
            return
        if value not in facts.unmade:
            self._emit(eqn)
        else:
            facts.unmade[out] = facts.unmade[value]
        if eqn.primitive is control_flow.loop_const_p:
            facts.copy(value, out)
            return
        stacks = eqn.primitive is control_flow.loop_stack_p
        of, into = (facts.known, facts.stacked) if stacks else (facts.stacked, facts.known)
        if value in of:
            into[out] = of[value]
        if rows := facts.rows.get(value):
            dim = rows.dim + (1 if stacks else -1)
            if rows.is_stacked is stacks or dim < 0:
                raise DependsOnOrderError(rows.sort)
            facts.rows[out] = SortedDim(rows.sort, dim, stacks)
        sizes = facts.sizes.get(value)
        if sizes is not None and sizes.is_stacked is not stacks:
            aval = aval_of(sizes.group)
            length = aval_of(out if stacks else value).shape[0]
            shape = (length, *aval.shape) if stacks else aval.shape[1:]
            group = Var(ShapedArray(shape, aval.dtype))
            self._emit(eqn, invars=[sizes.group, token], outvars=[group])
            facts.sizes[out] = GroupSizes(sizes.keys, group, stacks)


def _are_groups(eqn: JaxprEqn, table: RowTable, num_groups: int) -> bool:
    """Return whether rows that are sorted by key are sorted by group, with those of no group last.

    Args:
        eqn: a scatter that counts the rows of groups.
        table: the group of each key.
        num_groups: the number of groups.
    """
    group = table.values.ravel()
    is_valid = (group >= 0) & (group < num_groups)
    count = int(is_valid.sum())
    if eqn.params["mode"] is not lax.GatherScatterMode.FILL_OR_DROP and count < len(group):
        return False
    return bool(is_valid[:count].all() and (np.diff(group[:count]) >= 0).all())


def _summed_groups(table: RowTable, num_groups: int) -> np.ndarray | None:
    """Return `SumsOfSizes.summed` for the sum of a table over its rows, whose keys are groups.

    It is None for a table that does not count rows of groups.
    """
    present = min(len(table.domain), num_groups)
    counts = table.values[:present]
    if (
        num_groups**2 > MOST_ELEMENTS
        or counts.shape != (present, num_groups)
        or not np.array_equal(table.domain[:present], np.arange(present))
        or not np.isin(counts, (0, 1)).all()
        or table.values[present:].any()
    ):
        return None
    summed = np.zeros((num_groups, num_groups), np.int64)
    summed[:, :present] = counts.T
    return summed


def _takes_rows(eqn: JaxprEqn) -> bool:
    """Return whether a gather takes whole rows of its operand, one for each index."""
    row = aval_of(eqn.invars[0]).shape[1:]
    return _indexes_rows(eqn) and tuple(eqn.params["slice_sizes"]) == (1, *row)


def _writes_rows(eqn: JaxprEqn) -> bool:
    """Return whether a scatter writes whole rows, one for each index."""
    operand, _, updates = (aval_of(atom).shape for atom in eqn.invars)
    return _indexes_rows(eqn) and updates[1:] == operand[1:]


def _indexes_rows(eqn: JaxprEqn) -> bool:
    """Return whether a gather or scatter has a vector of indices, each of them of one row."""
    operand, indices = (aval_of(atom).shape for atom in eqn.invars[:2])
    windows = tuple(range(1, len(operand)))
    return IndexDims.of(eqn) == IndexDims(windows, (0,), (0,), {}) and len(indices) == 2


def _repeated(times: int) -> Callable[[Any], Any]:
    """Return the function that repeats each row."""

    def repeat(x: Any) -> Any:
        shape = (x.shape[0], times, *x.shape[1:])
        dims = (0, *range(2, len(shape)))
        return lax.broadcast_in_dim(x, shape, dims).reshape(-1, *x.shape[1:])

    return repeat


def _summed(times: int) -> Callable[[Any], Any]:
    """Return the function that adds up runs of rows."""
    return lambda x: x.reshape(-1, times, *x.shape[1:]).sum(1)
