"""The rows of a microbatch in arrays that a step creates, such as random bits for each example.

A counter of examples, or random bits for them, is not computed from the batch. So the rows of a
microbatch follow from their positions in the whole batch. `iota_rows`, `random_bits_rows` and
`random_split_rows` compute what `iota`, `random_bits` and `random_split` have in these rows for the
whole batch. JAX's partitionable threefry computes an element's random bits from the key and the
element's index in the array alone, which makes that exact. Other generators can only draw other
bits for each microbatch, from the key with a position folded in.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from math import gcd, prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core.primitives import iota_p, random_bits_p, random_split_p
from jax.extend.random import threefry2x32_p

from autopar.ir.graph import aval_of
from autopar.ir.keys import impl_of
from autopar.microbatch.example_blocks import Blocks
from autopar.primitives import PrimitiveRecord, register
from autopar.primitives.factors import Dims, FactorBuilder, OpFactors

type Words = tuple[jax.Array, jax.Array]
"""Unsigned integers of 64 bits as their high and low 32 bits."""

_HALF = 16
_WORD = 32


class _Traced(Primitive):
    """A primitive that runs as the operations of a Python function.

    It occurs in steps that run in microbatches, until they are lowered.
    """

    def __init__(self, original: Primitive, fun: Callable[..., jax.Array]) -> None:
        super().__init__(f"{original.name}_rows")
        self._fun = fun

    def bind(self, *operands: Any, **params: Any) -> jax.Array:
        """Return the result of the function."""
        return self._fun(*operands, **params)


def row_numbers(
    positions: jax.Array, rows: int, blocks: Blocks = 1, size: int | None = None
) -> jax.Array:
    """Return where the rows of a microbatch are in an array of the whole batch.

    The array may have several rows per example, or one for several neighbouring examples, which
    are in the same microbatch. It may consist of blocks, each with the rows of all examples
    (`autopar.microbatch.example_blocks`).

    Args:
        positions: the positions of the microbatch's examples in the batch.
        rows: the number of rows that the microbatch has.
        blocks: the number of blocks; a fraction if the array has a part of the batch.
        size: the number of rows for the whole batch; needed for several blocks.

    Returns:
        An array of shape `(rows,)` of uint32.
    """
    if blocks != 1:
        assert size is not None
        count, parts = blocks.numerator, blocks.denominator
        first = lax.iota(jnp.uint32, count) * jnp.uint32(size // count)
        of_block = row_numbers(positions[: positions.shape[0] // parts], rows // count)
        return (first[:, None] + of_block).reshape(rows)
    groups = gcd(positions.shape[0], rows)
    examples, rows_per_group = positions.shape[0] // groups, rows // groups
    numbers = positions.astype(jnp.uint32)
    if examples > 1:
        numbers = numbers.reshape(groups, examples)[:, 0] // examples
    if rows_per_group > 1:
        within = lax.iota(jnp.uint32, rows_per_group)
        numbers = (numbers[:, None] * rows_per_group + within).reshape(rows)
    return numbers


def _row_numbers_of(
    positions: jax.Array, shape: Sequence[int], dim: int, blocks: Blocks, size: int
) -> jax.Array:
    """Return `row_numbers` along `dim`, broadcast to `shape`."""
    numbers = row_numbers(positions, shape[dim], blocks, size)
    return lax.broadcast_in_dim(numbers, shape, (dim,))


def element_numbers(
    positions: jax.Array, shape: Sequence[int], dim: int, whole: Sequence[int], blocks: Blocks = 1
) -> Words:
    """Return the numbers of a microbatch's elements in the array of the whole batch.

    Args:
        positions: the positions of the microbatch's examples in the batch.
        shape: the shape of the microbatch's array.
        dim: the dim with a row per example.
        whole: the shape of the whole batch's array.
        blocks: the number of blocks in `dim`.

    Returns:
        Two arrays of `shape` of uint32, the high and low words.
    """
    zeros = jnp.zeros(shape, jnp.uint32)
    total: Words = zeros, zeros
    for at in range(len(shape)):
        number = (
            _row_numbers_of(positions, shape, dim, blocks, whole[dim])
            if at == dim
            else lax.broadcasted_iota(jnp.uint32, shape, at)
        )
        stride = prod(whole[at + 1 :])
        if prod(whole) < 2**_WORD:
            total = total[0], total[1] + number * jnp.uint32(stride)
        else:
            total = _sum(total, _product(number, stride))
    return total


def _element_numbers_of(
    positions: jax.Array, shape: Sequence[int], dim: int, size: int, blocks: Blocks
) -> Words:
    """Return `element_numbers` in an array that differs in the size of `dim`."""
    whole = (*shape[:dim], size, *shape[dim + 1 :])
    return element_numbers(positions, shape, dim, whole, blocks)


def _sum(a: Words, b: Words) -> Words:
    low = a[1] + b[1]
    return a[0] + b[0] + (low < a[1]).astype(jnp.uint32), low


def _product(number: jax.Array, factor: int) -> Words:
    """Return the product of integers of 32 bits and one of 64 bits."""
    half = jnp.uint32(2**_HALF - 1)
    factor_low = factor & (2**_WORD - 1)
    a, b = number & half, number >> _HALF
    c, d = jnp.uint32(factor_low & (2**_HALF - 1)), jnp.uint32(factor_low >> _HALF)
    low, cross, other, high = a * c, a * d, b * c, b * d
    middle = (low >> _HALF) + (cross & half) + (other & half)
    carried = (cross >> _HALF) + (other >> _HALF) + (middle >> _HALF)
    upper = number * jnp.uint32(factor >> _WORD)
    return high + carried + upper, (low & half) | (middle << _HALF)


def _threefry(keys: jax.Array, numbers: Words) -> Words:
    """Return the two words of random bits of each element, for each key."""
    data = jax.random.key_data(keys)
    shape = (*keys.shape, *numbers[0].shape)

    def of_keys(word: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(word, shape, tuple(range(keys.ndim)))

    high, low = (jnp.broadcast_to(word, shape) for word in numbers)
    return tuple(threefry2x32_p.bind(of_keys(data[..., 0]), of_keys(data[..., 1]), high, low))


def _iota_rows(
    positions: jax.Array,
    *,
    dtype: Any,
    shape: Sequence[int],
    dimension: int,
    size: int,
    blocks: Blocks,
    **_: Any,
) -> jax.Array:
    return _row_numbers_of(positions, shape, dimension, blocks, size).astype(dtype)


def _random_bits_rows(
    keys: jax.Array,
    positions: jax.Array,
    *,
    bit_width: int,
    shape: Sequence[int],
    dim: int,
    size: int,
    blocks: Blocks,
    folds: bool,
    **_: Any,
) -> jax.Array:
    dtype = jnp.dtype(f"uint{bit_width}")
    if folds:
        return _for_each_key(partial(jax.random.bits, shape=shape, dtype=dtype), keys, positions)
    high, low = _threefry(keys, _element_numbers_of(positions, shape, dim, size, blocks))
    if bit_width > _WORD:
        return (high.astype(dtype) << _WORD) | low.astype(dtype)
    return (high ^ low).astype(dtype)


def _random_split_rows(
    keys: jax.Array,
    positions: jax.Array,
    *,
    shape: Sequence[int],
    dim: int,
    size: int,
    blocks: Blocks,
    folds: bool,
    **_: Any,
) -> jax.Array:
    if folds:
        return _for_each_key(partial(jax.random.split, num=tuple(shape)), keys, positions)
    words = _threefry(keys, _element_numbers_of(positions, shape, dim, size, blocks))
    return jax.random.wrap_key_data(jnp.stack(words, -1), impl=jax.random.key_impl(keys))


def _for_each_key(
    draw: Callable[[jax.Array], jax.Array], keys: jax.Array, positions: jax.Array
) -> jax.Array:
    """Return what `draw` draws for each key, folded with the position of the first example.

    No two microbatches, and no two devices that accumulate locally, have the same first example.
    """
    first = positions[0]

    def folded(key: jax.Array) -> jax.Array:
        return draw(jax.random.fold_in(key, first))

    for _ in range(keys.ndim):
        folded = jax.vmap(folded)
    return folded(keys)


iota_rows_p = _Traced(iota_p, _iota_rows)
random_bits_rows_p = _Traced(random_bits_p, _random_bits_rows)
random_split_rows_p = _Traced(random_split_p, _random_split_rows)

ROWS_OF = {
    iota_p: iota_rows_p,
    random_bits_p: random_bits_rows_p,
    random_split_p: random_split_rows_p,
}
"""The primitive of the rows of a microbatch, by the primitive that creates the whole array."""

_ORIGINAL: dict[Primitive, Primitive] = {rows: whole for whole, rows in ROWS_OF.items()}
_ADDED = ("dim", "size", "blocks", "folds")


def rows_of(
    eqn: JaxprEqn, positions: Any, dim: int, size: int, folds: bool, blocks: Blocks = 1
) -> JaxprEqn:
    """Return the equation of a microbatch's rows of what `eqn` creates.

    Args:
        eqn: an equation with one of the primitives in `ROWS_OF`, traced for the microbatch.
        positions: the variable with the positions of the microbatch's examples.
        dim: the dim of the created array with a row per example, without the dims of keys.
        size: the size of that dim for the whole batch.
        folds: whether to fold a position into the key instead of drawing the rows exactly.
        blocks: the number of blocks in that dim.
    """
    return eqn.replace(
        primitive=ROWS_OF[eqn.primitive],
        invars=[*eqn.invars, positions],
        params=dict(eqn.params) | dict(zip(_ADDED, (dim, size, blocks, folds), strict=True)),
    )


def whole_of(eqn: JaxprEqn) -> JaxprEqn:
    """Return the equation that `rows_of` was given; other equations are returned unchanged."""
    if eqn.primitive not in _ORIGINAL:
        return eqn
    params = {key: value for key, value in eqn.params.items() if key not in _ADDED}
    return eqn.replace(
        primitive=_ORIGINAL[eqn.primitive], invars=list(eqn.invars[:-1]), params=params
    )


def created_by(eqn: JaxprEqn) -> Primitive:
    """Return the primitive of an equation; for the rows of an array, the one that creates it."""
    return _ORIGINAL.get(eqn.primitive, eqn.primitive)


def dim_of_examples(eqn: JaxprEqn, larger: JaxprEqn) -> int | None:
    """Return the dim in which `larger`, the same equation for a larger batch, creates more rows.

    None if there are none or several such dims, or if all rows are equal. The dims of keys do not
    count.

    Args:
        eqn: an equation with one of the primitives in `ROWS_OF`.
        larger: the equation in the trace for a larger batch.
    """
    sizes = zip(eqn.params["shape"], larger.params["shape"], strict=True)
    grown = [dim for dim, (rows, more) in enumerate(sizes) if rows != more]
    if len(grown) != 1 or (eqn.primitive is iota_p and eqn.params["dimension"] not in grown):
        return None
    return grown[0]


def folds_position(eqn: JaxprEqn) -> bool:
    """Return whether an equation draws other random bits than for the whole batch."""
    return eqn.primitive in _ORIGINAL and bool(eqn.params["folds"])


def is_exact_by_row(eqn: JaxprEqn) -> bool:
    """Return whether the rows of what `eqn` creates can be computed alone."""
    if eqn.primitive is iota_p:
        return True
    return generator_of(eqn) == "threefry2x32" and bool(eqn.ctx.threefry_partitionable)


def why_whole(eqn: JaxprEqn) -> str:
    """Return why what `eqn` creates for the whole batch can't be created for a microbatch alone."""
    if eqn.primitive in (random_bits_p, random_split_p) and not is_exact_by_row(eqn):
        generator = generator_of(eqn) or "of the user"
        if generator == "threefry2x32":
            return (
                "draws the random bits of all examples together, because jax_threefry_partitionable"
                " is off; turn it on, or use rng='fold_in' in the method, which draws other bits,"
                " from a key for each microbatch"
            )
        return (
            f"draws the random bits of all examples together, by the PRNG implementation"
            f" {generator}; use keys of threefry, as jax.random.key(seed, impl='threefry2x32'), or"
            " rng='fold_in' in the method, which draws other bits, from a key for each microbatch"
        )
    return "depends on the size of the batch or on an example's position in it"


def generator_of(eqn: JaxprEqn) -> str:
    """Return the name of the PRNG implementation of an equation's keys; "" if it has no name."""
    try:
        return impl_of(aval_of(eqn.invars[0]).dtype)
    except ValueError:
        return ""


def _factors(eqn: JaxprEqn) -> OpFactors:
    """Shard the rows along the examples, and the other dims freely."""
    build = FactorBuilder()
    shape, dim, blocks = eqn.params["shape"], eqn.params["dim"], eqn.params["blocks"]
    *keys, positions = eqn.invars
    key_dims = [build.dims(aval_of(atom).shape) for atom in keys]
    num_blocks, parts = Fraction(blocks).as_integer_ratio()
    count = aval_of(positions).shape[0] // parts
    rows = shape[dim] // num_blocks
    groups = gcd(count, rows)
    group = build.new(groups)
    part = build.new(parts, "whole") if parts > 1 else ()
    examples: Dims = (part + group + build.new(count // groups, "whole"),)
    created = tuple(
        build.new(num_blocks) + group + build.new(rows // groups) if at == dim else build.new(size)
        for at, size in enumerate(shape)
    )
    keyed = tuple(factors for dims in key_dims for factors in dims)
    return build.build([*key_dims, examples], [(*keyed, *created)])


for _primitive in ROWS_OF.values():
    register(_primitive, PrimitiveRecord(factors=_factors, is_recomputed=False))
