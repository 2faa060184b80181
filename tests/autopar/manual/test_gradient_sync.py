"""`manual.value_and_grad` in shard_map gives the gradient of the mean over all devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, PartitionSpec

from autopar import manual
from autopar.testing import assert_allclose

P = PartitionSpec
MESH = Mesh(
    np.array(jax.devices()).reshape(4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2
)
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)


def mapped(function: Callable, **options: Any) -> Callable:
    """Map `function(w, x)` over devices; by default w is replicated and rows of x are split."""
    options = {"in_specs": (P(), P("data")), "out_specs": P()} | options
    return jax.jit(jax.shard_map(function, mesh=MESH, **options))


def test_pmean_of_a_gradient_is_too_large_by_the_number_of_devices() -> None:
    expected = jax.grad(loss)(W, X)
    averaged = mapped(lambda w, x: jax.lax.pmean(jax.grad(loss)(w, x), "data"))(W, X)
    np.testing.assert_allclose(averaged, 4 * expected, rtol=1e-4, atol=1e-6)  # no error is raised
    value, grad = mapped(manual.value_and_grad(loss, axis="data"))(W, X)
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(value, loss(W, X), rtol=1e-5)


@settings(max_examples=8)
@given(
    sizes=st.tuples(*[st.integers(1, 3)] * 3),
    layout=st.sampled_from(["replicated", "gathered", "columns"]),
    axis=st.sampled_from(["data", ("data", "tensor")]),
)
def test_gradients_of_replicated_and_sharded_parameters_equal_one_device(
    sizes: tuple[int, int, int], layout: str, axis: Any
) -> None:
    if layout == "columns":
        axis = "data"  # the parameters are split over the other axis
    batch, width, out = (8 * size for size in sizes)
    draw = np.random.default_rng(0)
    x, w, b = (
        draw.normal(size=shape).astype(np.float32)
        for shape in ((batch, width), (width, out), (out,))
    )

    def serial(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.gelu(x @ params["w"] + params["b"]) ** 2)

    def local(params: Any, x: jax.Array) -> jax.Array:
        match layout:
            case "gathered":
                return serial({**params, "w": manual.all_gather(params["w"], axis, 0)}, x)
            case "columns":
                return jax.lax.pmean(serial(params, x), "tensor")
            case _:
                return serial(params, x)

    specs = {
        "replicated": {"w": P(), "b": P()},
        "gathered": {"w": P(axis), "b": P()},
        "columns": {"w": P(None, "tensor"), "b": P("tensor")},
    }[layout]
    step = mapped(
        manual.value_and_grad(local, axis=axis), in_specs=(specs, P(axis)), out_specs=(P(), specs)
    )
    params = {"w": w, "b": b}
    assert_allclose(step(params, x), jax.value_and_grad(serial)(params, x), rtol=1e-3, atol=1e-6)


def test_a_parameter_that_is_used_twice_is_synchronized_once() -> None:
    step = mapped(manual.value_and_grad(loss, axis="data"))
    text = step.lower(W, X).as_text()
    assert text.count('"stablehlo.all_reduce"') == 2  # one of the gradient, one of the loss
    unsynchronized = mapped(jax.value_and_grad(lambda w, x: jax.lax.pmean(loss(w, x), "data")))
    assert unsynchronized.lower(W, X).as_text().count('"stablehlo.all_reduce"') == 3


def test_auxiliary_values_and_several_arguments_equal_those_of_jax() -> None:
    def with_aux(w: jax.Array, x: jax.Array) -> Any:
        return loss(w, x), x.sum(0)

    out_specs = ((P(), P("data")), (P(), P("data")))
    step = mapped(
        manual.value_and_grad(with_aux, argnums=(0, 1), has_aux=True, axis="data"),
        out_specs=out_specs,
    )
    (value, sums), (of_w, of_x) = step(W, X)
    expected_value, expected = jax.value_and_grad(loss, argnums=(0, 1))(W, X)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    np.testing.assert_allclose(sums.reshape(4, -1), X.reshape(4, 2, -1).sum(1), rtol=1e-5)
    np.testing.assert_allclose(of_w, expected[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(of_x, expected[1], rtol=1e-4, atol=1e-6)


def test_a_missing_forward_sync_is_named() -> None:
    rows = mapped(
        manual.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2), axis="data"),
        in_specs=(P("tensor", None), P("data", "tensor")),
    )
    with pytest.raises(
        ValueError,
        match=r"differs along the mesh axis tensor, .* averaged over data only; sum or average",
    ):
        rows(W, X)


def test_untracked_types_are_refused() -> None:
    step = mapped(manual.value_and_grad(loss, axis="data"), check_vma=False)
    with pytest.raises(ValueError, match="check_vma=True, its default; given check_vma=False"):
        step(W, X)
