"""Where the rows of the examples are in a dim that consists of blocks.

After merging the dims (time, batch), each of `time` blocks has a row per example. A dim of examples
alone is one block. Rows that are all equal fit any number of blocks.

A dim may also have a part of the batch: `x[: n // 2]` has half a block. After `x.reshape(4, -1)`
the second dim has a quarter of a block, for each of the first. Microbatch k of n has the examples
k, k + n, k + 2n, ... So its first half consists of the examples k, k + n, ... of the first half of
the batch, if it can be divided into halves.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm, prod
from typing import Literal

import jax
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import concatenate_p, pad_p, slice_p
from jax.lax import split_p

from autopar.ir.graph import aval_of
from autopar.primitives.factors import OpFactors

type Blocks = int | Fraction
"""A number of blocks, a fraction if a dim has a part of the batch."""


def _simplified(blocks: Blocks) -> Blocks:
    return blocks if blocks.denominator > 1 else int(blocks)


@dataclass(frozen=True, slots=True)
class ExamplesFactor:
    """The factor of an equation that runs over the examples.

    Attributes:
        number: the number of the factor.
        blocks: the number of blocks within the factor; None if all rows are equal.
        regular: whether the equation has the same factors for other sizes of the batch, and only
            this one grows.
        sizes: the trip counts of all factors.
    """

    number: int
    blocks: Blocks | None
    regular: bool
    sizes: tuple[int, ...]

    def dim_of(self, dims: Iterable[tuple[int, ...]]) -> tuple[int, Blocks | None] | None:
        """Return the dim of an array that has the examples, and the number of its blocks.

        Args:
            dims: the factors of each dim.

        Returns:
            None if no dim has the examples in blocks.
        """
        for dim, factors in enumerate(dims):
            if self.number not in factors:
                continue
            major = factors[: factors.index(self.number)]
            if major and not self.regular:
                return None
            count = prod(self.sizes[factor] for factor in major)
            if self.blocks is None:  # rows that differ from block to block are not all equal
                return dim, count if count > 1 else None
            return dim, _simplified(self.blocks * count)
        return None


def examples_factor(
    factors: OpFactors, larger: OpFactors, dim: tuple[int, ...], blocks: Blocks | None
) -> ExamplesFactor | None:
    """Return the factor of the examples; None if there is none.

    Args:
        factors: the factors of an equation.
        larger: its factors for a larger batch.
        dim: the factors of the dim of an operand that has a row per example.
        blocks: the number of blocks in that dim; None if all rows are equal.
    """
    if not dim:
        return None
    alike = (factors.operands, factors.results) == (larger.operands, larger.results)
    sizes = zip(factors.sizes, larger.sizes, strict=True) if alike else ()
    grown = [number for number, (size, other) in enumerate(sizes) if size != other]
    regular = len(grown) == 1 and grown[0] in dim
    if not regular:
        return ExamplesFactor(dim[0], blocks, False, factors.sizes) if blocks in (1, None) else None
    number = grown[0]
    if blocks is None:
        return ExamplesFactor(number, None, regular, factors.sizes)
    major = prod(factors.sizes[each] for each in dim[: dim.index(number)])
    inner = Fraction(blocks) / major
    if any(size % inner.numerator for size in (factors.sizes[number], larger.sizes[number])):
        return None
    return ExamplesFactor(number, _simplified(inner), regular, factors.sizes)


def common_blocks(several: Iterable[Blocks | None]) -> Blocks | Literal["none"] | None:
    """Return the number of blocks that fits several dims; "none" if they differ."""
    numbers = set(several) - {None}
    if len(numbers) > 1:
        return "none"
    return numbers.pop() if numbers else None


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Sizes along the dim that an equation joins or cuts.

    Attributes:
        operands: size of each operand.
        bounds: numbers of rows before a cut; for `pad` those that it adds, or leaves out, before
            and behind the operand.
        results: size of each result.
    """

    operands: tuple[int, ...]
    bounds: tuple[int, ...]
    results: tuple[int, ...]

    def blocks(self, unit: Blocks) -> tuple[tuple[Blocks, ...], ...] | None:
        """Return all sizes as numbers of blocks of `unit` rows; None if these have no rows."""
        groups = (self.operands, self.bounds, self.results)
        if unit == 0:
            return None
        return tuple(
            tuple(_simplified(Fraction(size) / unit) for size in group) for group in groups
        )


def _pieces(eqn: JaxprEqn, dim: int) -> _Pieces | None:
    """Return the pieces of an equation that joins or cuts `dim`; None if it does neither."""
    params = eqn.params
    if (eqn.primitive is concatenate_p and params["dimension"] == dim) or (
        eqn.primitive is split_p and params["axis"] == dim
    ):
        bounds = ()
    elif eqn.primitive is slice_p and (params["strides"] or {dim: 1})[dim] == 1:
        bounds = (params["start_indices"][dim],)
    elif eqn.primitive is pad_p and params["padding_config"][dim][2] == 0:
        bounds = tuple(abs(int(rows)) for rows in params["padding_config"][dim][:2])
    else:
        return None
    operands = eqn.invars[:1] if eqn.primitive is pad_p else eqn.invars
    sizes = tuple(aval_of(atom).shape[dim] for atom in operands)
    return _Pieces(sizes, bounds, tuple(aval_of(var).shape[dim] for var in eqn.outvars))


def blocks_of_pieces(
    eqn: JaxprEqn, larger: JaxprEqn, rows: Mapping[int, tuple[int, Blocks | None]]
) -> Sequence[tuple[int, Blocks | None]] | None:
    """Return where the examples are in the results of an equation that joins or cuts blocks.

    Two arrays of examples, joined by `concatenate`, are two blocks. A slice of one of them is a
    block again, and half of that is half a block.

    Args:
        eqn: the equation.
        larger: the same equation for a larger batch.
        rows: dim of the examples and number of its blocks, for each operand that has a row per
            example.

    Returns:
        The dim of the examples and the number of blocks of each result. None if the equation does
        neither, or cuts a larger batch elsewhere.
    """
    dims = {dim for dim, _ in rows.values()}
    if len(dims) != 1:
        return None
    dim = dims.pop()
    small, large = _pieces(eqn, dim), _pieces(larger, dim)
    if small is None or large is None or rows.keys() != set(range(len(small.operands))):
        return None
    units: set[tuple[Blocks, Blocks]] = {
        (Fraction(small.operands[k]) / blocks, Fraction(large.operands[k]) / blocks)
        for k, (_, blocks) in rows.items()
        if blocks is not None
    } or {(_common_size(small), _common_size(large))}
    if len(units) != 1:
        return None
    unit, larger_unit = units.pop()
    counts = small.blocks(unit)
    if counts is None or counts != large.blocks(larger_unit) or 0 in counts[-1]:
        return None
    adds_rows = eqn.primitive not in (slice_p, split_p) and (
        any(small.bounds) or small.operands != small.results
    )
    equal_rows = not adds_rows and all(b is None for _, b in rows.values())
    return [(dim, None if equal_rows else blocks) for blocks in counts[-1]]


def blocks_of_strides(
    eqn: JaxprEqn, larger: JaxprEqn, rows: Mapping[int, tuple[int, Blocks | None]]
) -> Sequence[tuple[int, Blocks | None]] | None:
    """Return where the examples are in the result of an equation that takes every n-th row.

    `x[0::2]` has a row of each pair of neighbouring examples, as `x.reshape(-1, 2)[:, 0]` has. Its
    transpose puts rows of zeros between the rows of a cotangent.

    Args:
        eqn: the equation.
        larger: the same equation for a larger batch.
        rows: as in `blocks_of_pieces`.

    Returns:
        The dim of the examples and the number of blocks. None for other equations, and if a block
        does not consist of whole runs of n rows.
    """
    if rows.keys() != {0}:
        return None
    dim, blocks = rows[0]
    takes = all(_takes_rows_of_runs(each, dim, blocks) for each in (eqn, larger))
    return [(dim, blocks)] if takes else None


def _takes_rows_of_runs(eqn: JaxprEqn, dim: int, blocks: Blocks | None) -> bool:
    """Return whether an equation takes a row of each run of neighbours, or is the transpose."""
    params, size = eqn.params, aval_of(eqn.invars[0]).shape[dim]
    if eqn.primitive is slice_p and params["strides"]:
        start, stride = params["start_indices"][dim], params["strides"][dim]
        is_whole = start < stride and aval_of(eqn.outvars[0]).shape[dim] * stride == size
        return stride > 1 and is_whole and Fraction(size) / (blocks or 1) % stride == 0
    if eqn.primitive is pad_p and blocks is not None:  # equal rows have no runs to keep together
        before, behind, between = params["padding_config"][dim]
        return min(before, behind) >= 0 and before + behind == between > 0
    return False


def parts_of_pieces(eqn: JaxprEqn, rows: Mapping[int, tuple[int, Blocks | None]]) -> int:
    """Return into how many equal parts a block has to be divided at the cuts of an equation.

    Args:
        eqn: an equation.
        rows: as in `blocks_of_pieces`.

    Returns:
        One if the equation neither joins nor cuts blocks.
    """
    parts = 1
    for k, (dim, blocks) in rows.items():
        pieces = _pieces(eqn, dim)
        if pieces is None or blocks is None or k >= len(pieces.operands):
            continue
        counts = pieces.blocks(Fraction(pieces.operands[k]) / blocks)
        parts = lcm(parts, *(count.denominator for group in counts or () for count in group))
    return parts


def _common_size(pieces: _Pieces) -> int:
    return gcd(*pieces.operands, *pieces.bounds, *pieces.results)


def blocks_apart(dim: int, blocks: int, value: jax.Array) -> jax.Array:
    """Return a value of shape (..., blocks x rows, ...) with shape (..., rows, blocks, ...)."""
    shape = value.shape
    divided = value.reshape(*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])
    return divided.swapaxes(dim, dim + 1)


def blocks_merged(dim: int, value: jax.Array) -> jax.Array:
    """Return the value that `blocks_apart` gives another shape."""
    swapped = value.swapaxes(dim, dim + 1)
    return swapped.reshape(*value.shape[:dim], -1, *value.shape[dim + 2 :])
