"""Integer arrays as tables: each element as a function of a number that its row has.

An index such as `order // 2` is computed by a dozen equations: the quotient is corrected for
negative numbers, and a negative index counts from the end. As a table over all numbers that `order`
may hold, the same index is a short list, which is compared with what it should be.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, NamedTuple

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from autopar.ir.graph import Atom, aval_of, constant


class Origin(NamedTuple):
    """Where the numbers of a table come from.

    Attributes:
        kind: "key": the keys that rows are sorted by, in the first order. "sorted": the same keys
            in sorted order. "before": the place of a row before a sort, in sorted order. "after":
            its place after the sort, in the first order.
        of: the array with the keys, or the number of the sort.
    """

    kind: Literal["key", "sorted", "before", "after"]
    of: Var | int


@dataclass(frozen=True, eq=False)
class RowTable:
    """An array whose rows depend on one number each.

    Attributes:
        origin: where the numbers come from.
        domain: the numbers that there may be, in ascending order.
        rows: the sizes of the consecutive dims that count the rows.
        values: the array's row for each number of the domain, shape (numbers, *other dims).
        first: the first of the dims that count the rows.
    """

    origin: Origin
    domain: np.ndarray
    rows: tuple[int, ...]
    values: np.ndarray
    first: int = 0

    @property
    def row_dims(self) -> tuple[int, ...]:
        """The dims that count the rows."""
        return tuple(range(self.first, self.first + len(self.rows)))

    @property
    def has_numbers(self) -> bool:
        """Whether the array has one number per row, and rows are its leading dims."""
        return self.values.size == len(self.domain) and self.first == 0

    def is_column(self, of: np.ndarray) -> bool:
        """Return whether the array has one number per row, and these are `of`."""
        return self.has_numbers and np.array_equal(self.values.ravel(), of)

    def others(self, of: Sequence[int]) -> tuple[int, ...]:
        """Return the entries of a sequence, one per dim, for the dims that do not count rows."""
        return (*of[: self.first], *of[self.first + len(self.rows) :])


type Known = RowTable | np.ndarray
"""What is known of an array: a table, or all of a constant. Repeated elements have stride zero."""

MOST_ELEMENTS = 1 << 24
"""Elements of a table or constant that is worth computing."""


def _quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Divide as `lax.div` does, towards zero for integers."""
    if not np.issubdtype(x.dtype, np.integer):
        return x / y
    divisor = np.where(y == 0, 1, y)
    return np.where(y == 0, -1, np.sign(x) * np.sign(divisor) * (abs(x) // abs(divisor)))


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.choose(which.astype(np.int64), cases)


_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "copy": np.asarray,
    "div": _quotient,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "rem": lambda x, y: np.fmod(x, np.where(y == 0, 1, y)),
    "select_n": _select,
    "sign": np.sign,
    "sub": np.subtract,
}


def is_uniform(known: Known | None, value: float) -> bool:
    """Return whether all elements of a constant are `value`."""
    return isinstance(known, np.ndarray) and bool((core(known) == value).all())


def known_literal(atom: Atom) -> np.ndarray | None:
    """Return the value of a literal; None for a variable or a random key."""
    return constant(atom.val) if isinstance(atom, jex.Literal) else None


def known_result(eqn: JaxprEqn, operands: Sequence[Known | None]) -> Known | None:
    """Return what is known of the result of an equation; None for nothing.

    Args:
        eqn: an equation with one result.
        operands: what is known of its operands.
    """
    if len(eqn.outvars) != 1 or any(known is None for known in operands):
        return None
    aval = aval_of(eqn.outvars[0])
    match eqn.primitive.name:
        case "iota":
            along = [1] * len(aval.shape)
            along[eqn.params["dimension"]] = -1
            numbers = np.arange(aval.shape[eqn.params["dimension"]]).astype(aval.dtype)
            return np.broadcast_to(numbers.reshape(along), aval.shape)
        case "broadcast_in_dim":
            return _broadcast(operands[0], aval.shape, eqn.params["broadcast_dimensions"])
        case "reshape" | "squeeze":
            return _reshaped(operands[0], aval.shape)
        case "convert_element_type":
            return _elementwise(lambda x: x.astype(aval.dtype), operands, aval)
        case "le_to" | "lt_to" if np.issubdtype(aval_of(eqn.invars[0]).dtype, np.integer):
            return _elementwise(_ELEMENTWISE[eqn.primitive.name[:2]], operands, aval)
        case name if name in _ELEMENTWISE:
            return _elementwise(_ELEMENTWISE[name], operands, aval)
    return None


def _elementwise(
    fun: Callable[..., Any], operands: Sequence[Known | None], aval: Any
) -> Known | None:
    """Return the table of a function of tables and constants; None if it is no table."""
    tables = [known for known in operands if isinstance(known, RowTable)]
    if len({(table.origin, table.rows, table.first) for table in tables}) > 1:
        return None
    parts: list[np.ndarray] = []
    for known in operands:
        if isinstance(known, RowTable):
            parts.append(known.values)
            continue
        assert known is not None
        values = core(known)
        if known.ndim and tables:
            if any(values.shape[dim] > 1 for dim in tables[0].row_dims):
                return None  # rows differ by their position
            values = values.reshape(1, *tables[0].others(values.shape))
        parts.append(values)
    if prod(np.broadcast_shapes(*(part.shape for part in parts))) > MOST_ELEMENTS:
        return None
    with np.errstate(all="ignore"):
        values = np.asarray(fun(*parts)).astype(aval.dtype)
    if not tables:
        return np.broadcast_to(values, aval.shape)
    values = np.broadcast_to(values, (len(tables[0].domain), *tables[0].others(aval.shape)))
    return replace(tables[0], values=values)


def _broadcast(known: Known | None, shape: tuple[int, ...], dims: Sequence[int]) -> Known | None:
    """Return what is known after `broadcast_in_dim`; the dims of rows stay together."""
    if isinstance(known, np.ndarray):
        return spread(known, shape, dims)
    assert known is not None
    first = int(dims[known.first])
    table = replace(known, first=first)
    if tuple(dims[dim] for dim in known.row_dims) != table.row_dims:
        return None
    if tuple(shape[dim] for dim in table.row_dims) != known.rows:
        return None
    rest = (len(known.domain), *table.others(shape))
    if prod(rest) > MOST_ELEMENTS:
        return None
    count = len(known.rows)
    placed = [dim + 1 if dim < first else dim + 1 - count for dim in known.others(dims)]
    return replace(table, values=spread(known.values, rest, [0, *placed]))


def spread(values: np.ndarray, shape: tuple[int, ...], dims: Sequence[int]) -> np.ndarray:
    """Return a constant with its dims at `dims` of another shape; others have stride zero."""
    placed = [1] * len(shape)
    for dim, size in zip(dims, values.shape, strict=True):
        placed[dim] = size
    return np.broadcast_to(values.reshape(placed), shape)


def _reshaped(known: Known | None, shape: tuple[int, ...]) -> Known | None:
    """Return what is known after a reshape that keeps rows apart from other dims."""
    if isinstance(known, np.ndarray):
        if known.ndim and core(known).size == 1:
            return np.broadcast_to(core(known).reshape(()), shape)
        return known.reshape(shape) if known.size <= MOST_ELEMENTS else None
    assert known is not None
    if known.first:
        return None
    for count in (1, 2):
        if prod(shape[:count]) == prod(known.rows) and len(shape) >= count:
            values = known.values.reshape(len(known.domain), *shape[count:])
            return RowTable(known.origin, known.domain, shape[:count], values)
    return None


def core(values: np.ndarray) -> np.ndarray:
    """Return a constant with its repeated elements once: dims of stride zero have size one."""
    strides = zip(values.strides, values.shape, strict=True)
    return values[tuple(slice(0, 1) if s == 0 and n else slice(None) for s, n in strides)]


def holds(dtype: Any, count: int) -> bool:
    """Return whether a type has all numbers from 0 to `count`."""
    if jnp.issubdtype(dtype, jnp.integer):
        return count <= jnp.iinfo(dtype).max
    return jnp.issubdtype(dtype, jnp.floating) and count <= 2 ** (jnp.finfo(dtype).nmant + 1)
