"""Functions that use each primitive with a sharding rule, with arguments of drawn sizes.

Arrays have small integers, so that sums are exact in any order.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from autopar.primitives.ragged_products import grouped_dot_p

type Sizes = Callable[[], int]
type Built = tuple[Callable[..., Any], tuple[Any, ...]]
type Case = Callable[[Sizes], Built]


def ints(*shape: int, low: int = -3, high: int = 4, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(low, high, shape).astype(dtype)


def indices(*shape: int, below: int) -> np.ndarray:
    return ints(*shape, low=0, high=below, dtype=np.int32)


def _on(fun: Callable[..., Any], rank: int = 2, **options: Any) -> Case:
    """Return the case of `fun` of one array."""
    return lambda size: (fun, (ints(*(size() for _ in range(rank)), **options),))


def _matrices(fun: Callable[..., Any], count: int = 1) -> Case:
    """Return the case of `fun` of (batches of) symmetric positive definite 4 by 4 matrices."""

    def case(size: Sizes) -> Built:
        half = ints(size(), 4, 4)
        return fun, (half @ half.swapaxes(-1, -2) + 9 * np.eye(4, dtype=np.float32),) * count

    return case


def _pallas_exp(x: Any) -> Any:
    """Compute exp row by row, in a kernel."""

    def kernel(x: Any, out: Any) -> None:
        out[...] = jnp.exp(x[...])

    spec = pl.BlockSpec((1, x.shape[1]), lambda row: (row, 0))
    return pl.pallas_call(
        kernel, x, grid=(len(x),), in_specs=[spec], out_specs=spec, interpret=True
    )(x)


def _dot(numbers: tuple) -> Callable[[Any, Any], Any]:
    return lambda x, y: lax.dot_general(x, y, numbers)


def _matmul(size: Sizes) -> Built:
    m, k, n = size(), size(), size()
    return jnp.matmul, (ints(m, k), ints(k, n))


def _batched_matmul(size: Sizes) -> Built:
    b, m, k, n = size(), size(), size(), size()
    return _dot((((2,), (1,)), ((0,), (0,)))), (ints(b, m, k), ints(b, k, n))


def _two_batch_dims(size: Sizes) -> Built:
    a, b, k = size(), size(), size()
    return lambda x, y: jnp.einsum("akbi,bjak->abij", x, y), (ints(a, k, b, 2), ints(b, 3, a, k))


def _ragged(size: Sizes) -> Built:
    k, n = size(), size()
    sizes = np.array([3, 0, 2, 2], np.int32)  # the last row is in no group
    return lambda x, y: lax.ragged_dot(x, y, sizes), (ints(8, k), ints(4, k, n))


def _ragged_gradient(size: Sizes) -> Built:
    """Return the gradient with respect to the weights, whose contracted dim is ragged."""
    fun, (x, y) = _ragged(size)
    return lambda y, out: jax.vjp(lambda y: fun(x, y), y)[1](out), (y, ints(8, y.shape[-1]))


def _grouped(*, is_gradient: bool) -> Case:
    """Return the case of a product of rows in any order, some of them in no group."""

    def case(size: Sizes) -> Built:
        numbers = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(
                ((0 if is_gradient else 1,), (0 if is_gradient else 1,)),
                ((), ()),
            ),
            lhs_ragged_dimensions=[0],
            rhs_group_dimensions=[] if is_gradient else [0],
        )
        params = {"ragged_dot_dimension_numbers": numbers, "num_groups": 4}
        params |= {"precision": None, "preferred_element_type": np.dtype(np.float32)}
        group = np.array([2, 0, 3, 0, 4, 2, 0, 3], np.int32)
        k, n = size(), size()
        rhs = ints(8, n) if is_gradient else ints(4, k, n)
        return lambda *operands: grouped_dot_p.bind(*operands, **params), (ints(8, k), rhs, group)

    return case


def _ragged_batches(size: Sizes) -> Built:
    b, k, n = size(), size(), size()
    sizes = np.tile(np.array([3, 0, 5], np.int32), (b, 1))
    return jax.vmap(lax.ragged_dot), (ints(b, 8, k), ints(b, 3, k, n), sizes)


def _conv(
    groups: int = 1, gradient: int | None = None, channels: int | None = None, **options: Any
) -> Case:
    """Return the case of a 2-D convolution of NHWC images by a 3x3 kernel.

    With `gradient` it is the gradient for that argument.
    """

    def case(size: Sizes) -> Built:
        examples, depth, features = (
            size(),
            channels or size(),
            size() * (groups if groups > 1 else 1),
        )
        image, kernel = ints(examples, 5, 6, depth), ints(3, 3, depth // groups, features)

        def conv(x: Any, w: Any) -> Any:
            strides = options.get("window_strides", (1, 1))
            rest = {k: v for k, v in options.items() if k != "window_strides"}
            numbers = ("NHWC", "HWIO", "NHWC")
            padding = ((2, 1), (1, 2)) if "lhs_dilation" in rest else "SAME"
            return lax.conv_general_dilated(
                x,
                w,
                strides,
                padding,
                dimension_numbers=numbers,
                feature_group_count=groups,
                **rest,
            )

        if gradient is None:
            return conv, (image, kernel)
        out = jax.eval_shape(conv, image, kernel)
        return lambda x, w, g: jax.vjp(conv, x, w)[1](g)[gradient], (
            image,
            kernel,
            ints(*out.shape),
        )

    return case


def _batch_groups(groups: int) -> Case:
    def case(size: Sizes) -> Built:
        examples, depth, features = size(), size(), size()

        def conv(x: Any, w: Any) -> Any:
            numbers = ("NHWC", "HWIO", "NHWC")
            return lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=numbers, batch_group_count=groups
            )

        return conv, (ints(examples * groups, 4, 4, depth), ints(3, 3, depth, features * groups))

    return case


def _pool(fun: Callable[[Any], Any]) -> Case:
    return lambda size: (fun, (ints(size(), 8, 8, size()),))


def _window(init: Any, combine: Callable[..., Any], strides: int = 2) -> Callable[[Any], Any]:
    return lambda x: lax.reduce_window(
        x, init, combine, (1, 3, 3, 1), (1, strides, strides, 1), "SAME"
    )


_max_pool = _window(-jnp.inf, lax.max)


def _max_pool_twice_differentiated(x: Any) -> Any:
    return jax.jvp(_max_pool, (x,), (2 * x,))[1]


def _spread(x: Any) -> Any:
    """Scatter the sum of each window to the position of its largest element."""
    pool = {"window_dimensions": (1, 2, 2, 1), "window_strides": (1, 2, 2, 1)}
    padding, zero = ((0, 0),) * 4, np.float32(0)
    sums = lax.reduce_window(x, 0.0, lax.add, padding="VALID", **pool)
    select, scatter = (
        jax.make_jaxpr(f)(zero, zero) for f in (lambda a, b: a >= b, lambda a, b: a + b)
    )
    return lax.select_and_scatter_p.bind(
        x,
        sums,
        zero,
        select_jaxpr=select.jaxpr,
        select_consts=(),
        scatter_jaxpr=scatter.jaxpr,
        scatter_consts=(),
        padding=padding,
        **pool,
    )


def _lookup(fun: Callable[..., Any], *rest: int, below: int | None = None) -> Case:
    """Return the case of `fun(x, i)` with a drawn number of indices into the first dim of `x`."""

    def case(size: Sizes) -> Built:
        rows, columns, count = size(), size(), size()
        return fun, (ints(rows, columns), indices(count, *rest, below=below or rows))

    return case


def _update(fun: Callable[..., Any], second: bool = False) -> Case:
    """Return the case of `fun(x, i, u)`, which updates rows (or columns) `i` of `x` with `u`."""

    def case(size: Sizes) -> Built:
        rows, columns, count = size(), size(), size()
        i = indices(count, below=columns if second else rows)
        return fun, (ints(rows, columns), i, ints(rows, count) if second else ints(count, columns))

    return case


def _along_axis(size: Sizes) -> Built:
    rows, columns, count = size(), size(), size()
    return lambda x, i: jnp.take_along_axis(x, i, 1), (
        ints(rows, columns),
        indices(rows, count, below=columns),
    )


def _along_axis_gradient(size: Sizes) -> Built:
    fun, (x, i) = _along_axis(size)
    return lambda x, i, g: jax.vjp(lambda x: fun(x, i), x)[1](g), (x, i, ints(*i.shape))


def _windows_of_rows(x: Any, i: Any) -> Any:
    """Return two columns of a row for each index, so that the second dim is sliced in part."""
    return jax.vmap(lambda k: lax.dynamic_slice(x, (k, k), (1, min(2, x.shape[1]))))(i)


def _dynamic_update(size: Sizes) -> Built:
    rows, columns = size(), size()
    return lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), (
        ints(rows, columns),
        ints(1, columns),
        2,
    )


def _concatenate(size: Sizes) -> Built:
    rows = size()
    return lambda x, y: jnp.concatenate([x, y], 1), (ints(rows, size()), ints(rows, size()))


def _reshape(to: Callable[[int, int], tuple[int, ...]]) -> Case:
    def case(size: Sizes) -> Built:
        a, b = size(), size()
        return lambda x: x.reshape(to(a, b)), (ints(a, b),)

    return case


def _broadcast_pair(size: Sizes) -> Built:
    rows, columns = size(), size()
    return lax.mul, (ints(rows, 1), ints(1, columns))


CASES: dict[str, Case] = {
    # pointwise
    "mul: dims of size one": _broadcast_pair,
    "sub: a scalar": _on(lambda x: x - 2.0),
    "select_n: a scalar predicate": _on(lambda x: lax.select_n(x[0, 0] > 0, x, 2 * x)),
    "clamp: scalar bounds": _on(lambda x: lax.clamp(-1.0, x, 2.0)),
    "clamp: bounds per element": _on(lambda x: lax.clamp(-abs(x), x, x)),
    # shape
    "bitcast_convert_type: same width": _on(lambda x: lax.bitcast_convert_type(x, np.uint32)),
    "bitcast_convert_type: narrower": _on(lambda x: lax.bitcast_convert_type(x, np.uint16)),
    "bitcast_convert_type: wider": lambda size: (
        lambda x: lax.bitcast_convert_type(x, np.uint32),
        (ints(size(), 2, dtype=np.uint16),),
    ),
    "broadcast_in_dim: new dims": _on(
        lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], 4, x.shape[1]))
    ),
    "broadcast_in_dim: stretched dim": _on(
        lambda x: lax.broadcast_in_dim(x[:1], (3, *x.shape), (1, 2))
    ),
    "concatenate": _concatenate,
    "dynamic_slice: rows": lambda size: (
        lambda x, i: lax.dynamic_slice(x, (i, 0), (1, x.shape[1])),
        (ints(size(), size()), 1),
    ),
    "dynamic_update_slice": _dynamic_update,
    "iota: first dim": _on(lambda x: lax.broadcasted_iota(np.float32, x.shape, 0) + x),
    "iota: last dim": _on(lambda x: lax.broadcasted_iota(np.int32, x.shape, 1) + x),
    "pad: one dim": _on(lambda x: lax.pad(x, 1.0, ((0, 0, 0), (1, 2, 1)))),
    "pad: cut": _on(lambda x: lax.pad(x, 1.0, ((0, -1, 0), (0, 0, 0)))),
    "reshape: merge": _reshape(lambda a, b: (a * b,)),
    "reshape: split": _reshape(lambda a, b: (a // 2, 2, b) if a % 2 == 0 else (a, b, 1)),
    "reshape: regroup": _reshape(
        lambda a, b: (2, a * b // 2) if a % 2 == 0 and b > 1 else (a * b, 1)
    ),
    "reshape: size one": _reshape(lambda a, b: (1, a, 1, b)),
    "reshape: an empty array": _on(lambda x: x[:, :0].reshape(x.shape[0], 0, 2)),
    "reshape: 144 to 8 by 18": lambda size: (lambda x: x.reshape(-1, 8, 18), (ints(size(), 144),)),
    "rev": _on(lambda x: jnp.flip(x, 0)),
    "slice: some rows": _on(lambda x: x[: max(1, x.shape[0] // 2)]),
    "slice: every other": _on(lambda x: x[:, ::2]),
    "split": lambda size: (lambda x: jnp.split(x, 2, 1), (ints(size(), 8),)),
    "squeeze": _on(lambda x: lax.squeeze(lax.expand_dims(x, (1,)), (1,))),
    "stack": _on(lambda x: jnp.stack([x, 2 * x], 1)),
    "tile": _on(lambda x: jnp.tile(x, (1, 4))),
    "transpose": _on(lambda x: x.transpose(2, 0, 1), 3),
    "unstack": lambda size: (lambda x: jnp.unstack(x, axis=1), (ints(size(), 3, size()),)),
    # reduce
    "argmax": _on(lambda x: jnp.argmax(x, 1)),
    "argmin": _on(lambda x: jnp.argmin(x, 0)),
    "reduce": _on(lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + b * b - b, (1,))),
    "reduce_and: truth": _on(lambda x: jnp.all(x > -3, 0)),
    "reduce_and: bits": _on(lambda x: lax.reduce_and_p.bind(x, axes=(0,)), dtype=np.int32),
    "reduce_max": _on(lambda x: x.max(1), low=-99, high=99),
    "reduce_min": _on(lambda x: x.min((0, 1)), low=-99, high=99),
    "reduce_or: truth": _on(lambda x: jnp.any(x > 2, 1)),
    "reduce_or: bits": _on(lambda x: lax.reduce_or_p.bind(x, axes=(0,)), dtype=np.int32),
    "reduce_prod": _on(lambda x: x.prod(1)),
    "reduce_sum: a dim": _on(lambda x: x.sum(1)),
    "reduce_sum: all": _on(lambda x: x.sum(), 3),
    "reduce_xor": _on(lambda x: lax.reduce_xor_p.bind(x, axes=(0,)), dtype=np.int32),
    "reduce_window": _pool(_window(1.0, lax.mul)),
    "reduce_window_max": _pool(_max_pool),
    "reduce_window_min": _pool(_window(jnp.inf, lax.min)),
    "reduce_window_sum": _pool(_window(0.0, lax.add)),
    "reduce_window_sum: of its gradient": _pool(
        jax.grad(lambda x: (_window(0.0, lax.add)(x) ** 2).sum())
    ),
    "select_and_gather_add": _pool(_max_pool_twice_differentiated),
    "select_and_scatter": _pool(_spread),
    "select_and_scatter_add": _pool(jax.grad(lambda x: (_max_pool(x) ** 2).sum())),
    # contract
    "dot_general: matrices": _matmul,
    "dot_general: batch": _batched_matmul,
    "dot_general: two batch dims": _two_batch_dims,
    "dot_general: matrix and vector": lambda size: (jnp.dot, (ints(size(), k := size()), ints(k))),
    "ragged_dot_general": _ragged,
    "ragged_dot_general: gradient": _ragged_gradient,
    "ragged_dot_general: batches": _ragged_batches,
    "grouped_dot": _grouped(is_gradient=False),
    "grouped_dot: gradient": _grouped(is_gradient=True),
    "conv_general_dilated": _conv(),
    "conv_general_dilated: strides": _conv(window_strides=(2, 1)),
    "conv_general_dilated: dilation": _conv(rhs_dilation=(2, 2)),
    "conv_general_dilated: transposed": _conv(lhs_dilation=(2, 2)),
    "conv_general_dilated: groups": _conv(groups=4, channels=8),
    "conv_general_dilated: depthwise": _conv(groups=8, channels=8),
    "conv_general_dilated: batch groups": _batch_groups(4),
    "conv_general_dilated: gradient of images": _conv(gradient=0, window_strides=(2, 2)),
    "conv_general_dilated: gradient of kernel": _conv(gradient=1, window_strides=(2, 2)),
    "conv_general_dilated: gradient of kernel, groups": _conv(gradient=1, groups=4, channels=8),
    # index
    "gather: rows": _lookup(lambda x, i: x[i]),
    "gather: columns": _lookup(lambda x, i: x[:, i % x.shape[1]]),
    "gather: out of bounds clipped": _lookup(lambda x, i: x.at[i].get(mode="clip"), below=12),
    "gather: arange": _on(lambda x: x[:, jnp.arange(2) % x.shape[1]]),
    "gather: matrix of indices": _lookup(lambda x, i: x[i], 2),
    "gather: elements": _lookup(lambda x, i: x[i, i % x.shape[1]]),
    "gather: along an axis": _along_axis,
    "gather: windows": _lookup(_windows_of_rows),
    "scatter": _update(lambda x, i, u: x.at[i].set(u, unique_indices=True)),
    "scatter: columns": _update(lambda x, i, u: x.at[:, i].set(u), second=True),
    "scatter: one row": _on(lambda x: x.at[0].set(2.0)),
    "scatter: rows promised in bounds": _update(
        lambda x, i, u: x.at[i].set(u, mode="promise_in_bounds")
    ),
    "scatter-add": _update(lambda x, i, u: x.at[i].add(u)),
    "scatter-add: columns": _update(lambda x, i, u: x.at[:, i].add(u), second=True),
    "scatter-add: elements": _lookup(lambda x, i: x.at[i, i % x.shape[1]].add(2.0)),
    "scatter-add: along an axis": _along_axis_gradient,
    "scatter-add: embedding gradient": _lookup(
        lambda x, i: jax.grad(lambda x: (x[i] ** 2).sum())(x), 2
    ),
    "scatter-add: out of bounds dropped": lambda size: (
        lambda x, i, u: x.at[i].add(u),
        (ints(4, 4), indices(rows := size(), below=12), ints(rows, 4)),
    ),
    "scatter-max": _update(lambda x, i, u: x.at[i].max(u)),
    "scatter-min": _update(lambda x, i, u: x.at[i].min(u)),
    "scatter-mul": _update(lambda x, i, u: x.at[i].mul(u)),
    "scatter-sub": _update(lambda x, i, u: x.at[i].subtract(u)),
    # order
    "approx_top_k": lambda size: (lambda x: lax.approx_max_k(x, 1), (ints(size(), size()),)),
    "cumlogsumexp": _on(lambda x: lax.cumlogsumexp(x, 1)),
    "cummax": _on(lambda x: lax.cummax(x, 0)),
    "cummin": _on(lambda x: lax.cummin(x, 1)),
    "cumprod": _on(lambda x: lax.cumprod(x, 1)),
    "cumsum": _on(lambda x: lax.cumsum(x, 0, reverse=True)),
    "fft: real": _on(jnp.fft.rfft),
    "fft: two dims": _on(jnp.fft.fft2, 3),
    "sort": _on(lambda x: jnp.sort(x, 0)),
    "sort: with its indices": _on(lambda x: jnp.argsort(x, 1)),
    "top_k": _on(lambda x: lax.top_k(x, min(2, x.shape[1]))),
    # linalg
    "cholesky": _matrices(jnp.linalg.cholesky),
    "eig": _matrices(jnp.linalg.eig),
    "eigh": _matrices(jnp.linalg.eigh),
    "hessenberg": _matrices(lax.linalg.hessenberg),
    "householder_product": _matrices(lambda a: lax.linalg.householder_product(a, a[..., 0])),
    "lu": _matrices(lax.linalg.lu),
    "lu_pivots_to_permutation": _matrices(
        lambda a: lax.linalg.lu_pivots_to_permutation(lax.linalg.lu(a)[1], 4)
    ),
    "qr": _matrices(jnp.linalg.qr),
    "schur": _matrices(lax.linalg.schur),
    "svd": _matrices(jnp.linalg.svd),
    "symmetric_product": _matrices(
        lambda a: lax.linalg.symmetric_product(a, a, alpha=1.0, beta=2.0)
    ),
    "triangular_solve": _matrices(lambda a, b: lax.linalg.triangular_solve(a, b), 2),
    "triangular_solve: right-hand sides": lambda size: (
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        (ints(4, 4) + 5 * np.eye(4, dtype=np.float32), ints(4, size())),
    ),
    "triangular_solve: left-hand sides": lambda size: (
        lax.linalg.triangular_solve,
        (ints(4, 4) + 5 * np.eye(4, dtype=np.float32), ints(size(), 4)),
    ),
    "tridiagonal": _matrices(lax.linalg.tridiagonal),
    "tridiagonal_solve": _matrices(
        lambda a: lax.linalg.tridiagonal_solve(a[..., 0], a[..., 1] + 20, a[..., 2], a)
    ),
    # pallas_kernels
    "pallas_call": _on(_pallas_exp),
    # random
    "random_gamma": lambda size: (
        lambda rows, shape: jax.vmap(jax.random.gamma)(jax.random.wrap_key_data(rows), shape),
        (ints(rows := size(), 2, low=0, dtype=np.uint32), ints(rows, 3, low=1)),
    ),
    "threefry2x32": lambda size: (
        lambda x: jax.extend.random.threefry2x32_p.bind(np.uint32(1), np.uint32(2), x, 2 * x),
        (ints(size(), size(), low=0, dtype=np.uint32),),
    ),
}
"""Cases named "primitive: variant". A case returns the function and its arguments for sizes."""

RANDOM: dict[str, Callable[[Any, Any], Any]] = {
    "random_bits": lambda key, _: jax.random.bits(key, (8, 4)),
    "random_clone": lambda _, rows: jax.random.key_data(
        jax.random.clone(jax.random.wrap_key_data(rows))
    ),
    "random_fold_in": lambda _, rows: jax.random.key_data(
        jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(rows), rows[:, 0])
    ),
    "random_seed": lambda _, rows: jax.random.key_data(jax.vmap(jax.random.key)(rows[:, 0])),
    "random_split": lambda key, _: jax.random.key_data(jax.random.split(key, 8)),
    "random_unwrap": lambda _, rows: jax.random.key_data(jax.random.wrap_key_data(rows)),
    "random_wrap": lambda _, rows: jax.vmap(jax.random.bits)(jax.random.wrap_key_data(rows)),
}
"""Functions that return eight rows of random numbers.

The first argument is a replicated key, the second one sharded rows of two integers for a key each.
"""
