"""FLOP and bytes of single equations are those counted by hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.ir.array_sizes import array_bytes, hlo_dtype
from autopar.ir.flatten import flatten
from autopar.primitives import kernel_of
from simulator.work import Kernel


def _kernel(
    name: str,
    fun: Callable[..., Any],
    *shapes: tuple[int, ...],
    shards: Any = None,
    dtype: Any = np.float32,
) -> Kernel:
    """Return the kernel of the primitive `name` in `fun`, for whole operands or for `shards`."""
    jaxpr = flatten(jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)))
    (eqn,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == name]
    results = [atom.aval.shape for atom in eqn.outvars]
    return kernel_of(eqn, 0.0, [*shards, *results] if shards else None)


def _conv(x: Any, w: Any, **options: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=numbers, **options)


def test_a_convolution_takes_a_window_of_all_channels_per_element_of_its_result() -> None:
    kernel = _kernel("conv_general_dilated", _conv, (4, 8, 8, 16), (3, 3, 16, 32))
    assert (kernel.kind, kernel.flops) == ("conv", 2 * (4 * 4 * 4 * 32) * (3 * 3 * 16))
    grouped = _kernel(
        "conv_general_dilated",
        lambda x, w: _conv(x, w, feature_group_count=4),
        (4, 8, 8, 16),
        (3, 3, 4, 32),
    )
    assert grouped.flops == kernel.flops / 4


@pytest.mark.parametrize("argument", [0, 1])
@pytest.mark.parametrize("groups", [1, 4])
def test_gradients_of_a_convolution_have_its_flops(argument: int, groups: int) -> None:
    def conv(x: Any, w: Any) -> Any:
        return _conv(x, w, feature_group_count=groups)

    x, w = (4, 8, 8, 16), (3, 3, 16 // groups, 32)
    forward = _kernel("conv_general_dilated", conv, x, w)
    out = jax.eval_shape(conv, jnp.ones(x), jnp.ones(w)).shape
    gradient = _kernel(
        "conv_general_dilated",
        lambda x, w, g: jax.linear_transpose(
            lambda y: conv(*((y, w), (x, y))[argument]), (x, w)[argument]
        )(g),
        *(x, w, out),
    )
    assert gradient.flops == forward.flops


def test_a_shard_of_a_convolution_has_its_share_of_the_flops() -> None:
    whole, shapes = (
        _kernel("conv_general_dilated", _conv, (4, 8, 8, 16), (3, 3, 16, 32)),
        ((4, 8, 8, 16), (3, 3, 16, 32)),
    )
    for shards in (
        ((2, 8, 8, 16), shapes[1]),
        (shapes[0], (3, 3, 16, 16)),
        ((4, 8, 8, 8), (3, 3, 8, 32)),
    ):
        assert (
            _kernel("conv_general_dilated", _conv, *shapes, shards=shards).flops == whole.flops / 2
        )


def test_a_product_of_complex_numbers_takes_four_of_real_ones() -> None:
    for name, fun, shapes in (
        ("dot_general", jnp.matmul, ((8, 16), (16, 4))),
        ("conv_general_dilated", _conv, ((4, 8, 8, 16), (3, 3, 16, 32))),
    ):
        real = _kernel(name, fun, *shapes)
        assert _kernel(name, fun, *shapes, dtype=np.complex64).flops == 4 * real.flops


def test_a_ragged_product_takes_each_row_with_all_matrices() -> None:
    """XLA:GPU computes it so."""
    sizes = np.array([5, 3], np.int32)
    kernel = _kernel(
        "ragged_dot_general", lambda x, y: lax.ragged_dot(x, y, sizes), (8, 16), (2, 16, 4)
    )
    assert kernel.flops == 2 * (2 * 8 * 16 * 4)


def test_overlapping_windows_read_elements_again() -> None:
    def pool(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 4), (1, 2), "SAME")

    assert _kernel("reduce_window_max", pool, (8, 16)).flops == 8 * 16 * 2


def test_transforms_and_decompositions_take_more_than_one_per_element() -> None:
    assert _kernel("fft", jnp.fft.fft, (4, 16)).flops == 5 * 64 * 4
    assert _kernel("sort", lambda x: jnp.sort(x, 0), (4, 16)).flops == 64 * 2
    assert _kernel("cholesky", lax.linalg.cholesky, (2, 6, 6)).flops == pytest.approx(2 * 6**3 / 3)


def test_random_keys_have_a_size() -> None:
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
    assert (array_bytes(key.shape, key.dtype), hlo_dtype(key.dtype)) == (24, "u32")
    assert (array_bytes((3,), np.dtype(bool)), hlo_dtype(np.dtype(bool))) == (3, "pred")
