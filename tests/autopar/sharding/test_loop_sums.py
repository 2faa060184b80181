"""Gradients of weights that a loop reads are completed once, behind the loop."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import autopar
from autopar.ir.flatten import flatten
from autopar.report import planned_collectives
from autopar.sharding.loop_sums import summed_iterations
from simulator import Cluster, simulate, work_of

A100 = Cluster.load("dgx_a100_80")
LENGTH, WIDTH, BATCH = 8, 256, 64


def rnn_loss(params, x):
    def cell(h, x_t):
        return jnp.tanh(h @ params["w"] + x_t @ params["u"] + params["b"]), None

    h, _ = lax.scan(cell, jnp.zeros((x.shape[0], WIDTH)), x.swapaxes(0, 1))
    return jnp.mean(h**2)


def rnn_step(params, x):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(rnn_loss)(params, x))


def rnn_args():
    array = jax.ShapeDtypeStruct
    weights = array((WIDTH, WIDTH), "float32")
    params = {"w": weights, "u": weights, "b": array((WIDTH,), "float32")}
    return params, array((BATCH, LENGTH, WIDTH), "float32")


def sums_of(fun, *args):
    jaxpr = flatten(jax.make_jaxpr(fun)(*args).jaxpr)
    return summed_iterations(jaxpr.eqns, jaxpr.outvars), jaxpr


def products_in(jaxpr, sums):
    return [sums.get(e.outvars[0]) for e in jaxpr.eqns if e.primitive.name == "dot_general"]


@pytest.mark.parametrize(
    "method", [autopar.DataParallel, autopar.Zero2Parallel, autopar.Zero3Parallel]
)
def test_gradients_of_an_rnn_are_completed_once_as_compiled(method):
    plan = autopar.plan_step(rnn_step, rnn_args(), method=method(8), cluster=A100)
    planned = Counter()
    for kind, num_bytes, _ in planned_collectives(autopar.planned_step(rnn_step, rnn_args(), plan)):
        planned[kind] += num_bytes
    program = autopar.compile_step(rnn_step, rnn_args(), plan, A100, donate_argnums=(0,))
    compiled = work_of(program.bodies["0S"]).collectives
    gradients = 4 * (2 * WIDTH**2 + WIDTH)
    completed = planned["all_reduce"] + planned["reduce_scatter"]
    assert completed == pytest.approx(gradients, rel=0.01)
    in_program = compiled.get("all_reduce", 0.0) + compiled.get("reduce_scatter", 0.0)
    assert in_program == pytest.approx(gradients, rel=0.01)
    assert plan.predicted_seconds == pytest.approx(simulate(program, A100).makespan, rel=0.15)


def test_only_what_a_loop_adds_up_counts_once():
    def fun(w, xs):
        def body(carry, x):
            total, largest, read, state = carry
            part = x @ w
            total = total + part.T  # only added up
            largest = jnp.maximum(largest, part)  # not a sum
            read = read + part  # a sum that the next iteration reads
            return (total, largest, read, jnp.tanh(state + read)), part

        zeros = jnp.zeros((4, 4))
        return lax.scan(body, (zeros, zeros, zeros, zeros), xs)

    array = jax.ShapeDtypeStruct
    sums, jaxpr = sums_of(fun, array((4, 4), "float32"), array((6, 4, 4), "float32"))
    assert products_in(jaxpr, sums) == [None]  # the product has other readers, too

    def only_sum(w, xs):
        return lax.scan(lambda total, x: (total + (x @ w).T, None), jnp.zeros((4, 4)), xs)[0]

    sums, jaxpr = sums_of(only_sum, array((4, 4), "float32"), array((6, 4, 4), "float32"))
    assert products_in(jaxpr, sums) == [6]


def test_nested_loops_multiply_and_a_sum_that_is_read_does_not_count():
    def nested(w, xs):
        def outer(total, x):
            part, _ = lax.scan(lambda t, y: (t + y @ w, None), jnp.zeros((4, 4)), x)
            return total + part, None

        return lax.scan(outer, jnp.zeros((4, 4)), xs)[0]

    array = jax.ShapeDtypeStruct
    w = array((4, 4), "float32")
    sums, jaxpr = sums_of(nested, w, array((3, 5, 4, 4), "float32"))
    assert products_in(jaxpr, sums) == [15]

    def is_read(w, xs):
        def body(total, x):
            return total + x @ w, jnp.sum(total)

        return lax.scan(body, jnp.zeros((4, 4)), xs)

    sums, _ = sums_of(is_read, w, array((5, 4, 4), "float32"))
    assert not sums


def test_a_loop_of_unknown_length_counts_once():
    def fun(w, n):
        return lax.fori_loop(0, n, lambda i, total: total + w @ w, jnp.zeros((4, 4)))

    sums, _ = sums_of(fun, jax.ShapeDtypeStruct((4, 4), "float32"), 3)
    assert not sums
