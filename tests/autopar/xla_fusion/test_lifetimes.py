"""Values that are written to memory and their lifetimes, compared with small steps by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import autopar
from autopar.ir.graph import aval_of
from autopar.ir.step_graph import StepGraph
from autopar.tracing.trace import trace
from autopar.xla_fusion import is_relaid, lifetimes, stored_values

MATRIX = jax.ShapeDtypeStruct((8, 8), "float32")


def traced(fun, *args) -> StepGraph:
    return trace(fun, args or (MATRIX, MATRIX), ())


def results_of(step: StepGraph, name: str) -> list:
    return [eqn.outvars[0] for eqn in step.jaxpr.eqns if eqn.primitive.name == name]


def number(step: StepGraph, name: str, nth: int = 0) -> int:
    return [n for n, eqn in enumerate(step.jaxpr.eqns) if eqn.primitive.name == name][nth]


def test_operands_of_a_late_fusion_live_until_it_runs():
    def body(x, w):
        y = x @ w
        late = jnp.sin(y) * 2  # cheap, and read only after the second product
        return (x @ (y + 1)) * late

    step = traced(body)
    y = results_of(step, "dot_general")[0]
    assert not stored_values(step) & {*results_of(step, "sin")}
    assert lifetimes(step)[y] == (number(step, "dot_general"), number(step, "mul", 1))


@pytest.mark.parametrize(
    ("fun", "is_stored"), [(jnp.tanh, True), (jnp.exp, False), (lax.erf, True), (jnp.log, False)]
)
def test_only_expensive_values_are_stored_for_a_second_reader(fun, is_stored):
    def body(x, w):
        y = fun(x @ w)
        return (y + 1) @ w + (y * y)

    step = traced(body)
    value = step.jaxpr.eqns[1].outvars[0]
    assert (value in stored_values(step)) == is_stored


def test_views_need_no_memory_and_extend_the_lifetime_of_their_array():
    def body(x, w):
        y = (x @ w).reshape(4, 16).reshape(16, 4).T
        return y.T @ jnp.ones((4, 4)), jnp.sum(y @ x.reshape(16, 4))

    step = traced(body)
    alive = lifetimes(step)
    y = results_of(step, "dot_general")[0]
    assert not alive.keys() & {*results_of(step, "reshape"), *results_of(step, "transpose")}
    assert alive[y][1] == number(step, "dot_general", 2)


def test_a_scatter_that_is_added_to_an_array_runs_in_place():
    def body(x, rows):
        return jnp.zeros((8, 8)).at[rows].add(1.0) + jnp.sin(x)

    step = traced(body, MATRIX, jax.ShapeDtypeStruct((3,), "int32"))
    (scatter_result,) = results_of(step, "scatter-add")
    assert scatter_result not in lifetimes(step)
    assert not stored_values(step) & {*results_of(step, "sin")}


def test_the_operand_of_a_lookup_is_not_stored():
    def body(x, w):
        y = (x @ w).astype(jnp.float16).astype(jnp.float32)
        return y[0, :3]

    step = traced(body)
    assert not stored_values(step) & {*results_of(step, "convert_element_type")}


def test_operands_and_stacked_results_of_a_loop_live_until_its_end():
    def body(x, stack):
        def layer(h, w):
            h = jnp.tanh(h @ w)
            return h, h

        h, all_h = lax.scan(layer, x @ x, stack * 2)
        return h, all_h.sum()

    step = traced(body, MATRIX, jax.ShapeDtypeStruct((3, 8, 8), "float32"))
    alive = lifetimes(step)
    start, end = number(step, "loop"), number(step, "end")
    assert alive[results_of(step, "mul")[0]] == (number(step, "mul"), end)
    assert alive[results_of(step, "loop_stack")[0]] == (start, number(step, "reduce_sum"))
    assert not alive.keys() & {*results_of(step, "loop_carry")}
    assert alive[results_of(step, "dot_general")[0]][1] >= number(step, "loop_result")


@pytest.mark.parametrize(
    ("size", "stride", "expected"), [(3, 1, True), (1, 2, True), (1, 1, False)]
)
def test_a_convolution_copies_its_kernel_to_another_layout(size: int, stride: int, expected: bool):
    def body(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    images, kernel = (
        jax.ShapeDtypeStruct((2, 8, 8, 4), "float32"),
        jax.ShapeDtypeStruct((size, size, 4, 4), "float32"),
    )
    (eqn,) = traced(body, images, kernel).jaxpr.eqns
    assert is_relaid(eqn, 1) == expected
    assert not is_relaid(eqn, 0)


def test_the_sum_over_microbatches_is_stored_until_the_update():
    def body(w, x):
        return w - autopar.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)

    step = trace(body, (MATRIX, jax.ShapeDtypeStruct((16, 8), "float32")), (1,), 2)
    assert step.microbatching
    (_, mark), *_ = step.microbatching.marks
    (gradient_sum,) = [var for var in mark.outvars if aval_of(var).shape == (8, 8)]
    assert lifetimes(step)[gradient_sum] == (number(step, "accumulate"), number(step, "sub", -1))
