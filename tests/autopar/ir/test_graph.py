"""Flattened jaxprs keep the results of the originals, and fingerprints depend on them alone."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from autopar.ir import graph
from autopar.ir.evaluate import evaluate
from autopar.ir.flatten import flatten


def run(jaxpr, *args):
    env = dict(zip(jaxpr.invars, args, strict=True)) | dict(
        zip(jaxpr.constvars, jaxpr.consts, strict=True)
    )
    evaluate(enumerate(jaxpr.eqns), env, before=lambda _, v: v, after=lambda _, v: v)
    return [graph.read(atom, env) for atom in jaxpr.outvars]


def names(jaxpr):
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def test_calls_are_inlined_and_each_variable_is_bound_once():
    inner = jax.jit(lambda x: jax.nn.relu(x) * 2)

    def f(x):
        return inner(inner(x)) + jax.nn.silu(x)

    x = jnp.array([-1.0, 0.0, 2.0])
    flat = flatten(jax.make_jaxpr(f)(x))
    assert not {"jit", "custom_jvp_call", "custom_vjp_call"} & set(names(flat))
    bound = [var for eqn in flat.eqns for var in eqn.outvars]
    assert len(bound) == len(set(bound))
    np.testing.assert_allclose(run(flat, x)[0], f(x), rtol=1e-6)


def test_inlined_calls_keep_their_derivative_rules():
    """The derivative of relu at 0 is 0 by its own rule; that of max would be 0.5."""
    x = jnp.array([-1.0, 0.0, 2.0])
    flat = flatten(jax.make_jaxpr(jax.grad(lambda x: jax.nn.relu(x).sum()))(x))
    np.testing.assert_array_equal(run(flat, x)[0], [0.0, 0.0, 1.0])


def test_a_linear_solve_becomes_its_solver():
    def f(matrix, side):
        return jnp.linalg.solve(matrix, side).sum()

    args = np.array([[3.0, 1.0], [0.5, 2.0]], np.float32), np.array([1.0, -1.0], np.float32)
    flat = flatten(jax.make_jaxpr(jax.grad(f, (0, 1)))(*args))
    assert "custom_linear_solve" not in names(flat)
    for got, expected in zip(run(flat, *args), jax.grad(f, (0, 1))(*args), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_constants_are_shared_and_keep_their_values():
    table = jnp.arange(6.0)
    f = jax.jit(lambda x: x + table)
    flat = flatten(jax.make_jaxpr(lambda x: f(x) * f(x + 1))(table))
    assert len(flat.constvars) <= 1
    np.testing.assert_allclose(run(flat, table)[0], (2 * table) * (2 * table + 1))


def test_a_checkpoint_keeps_its_recomputation_behind_a_barrier():
    @jax.checkpoint
    def layer(x):
        return jnp.sin(jnp.sin(x))

    x = jnp.ones(4)
    flat = flatten(jax.make_jaxpr(jax.value_and_grad(lambda x: layer(x).sum()))(x))
    assert names(flat).count("optimization_barrier") == 1
    assert names(flat).count("sin") == 3, "two forward, one of them again for the backward pass"
    np.testing.assert_allclose(
        run(flat, x)[1], jax.grad(lambda x: jnp.sin(jnp.sin(x)).sum())(x), rtol=1e-6
    )


def test_equal_equations_are_one():
    def f(x):
        y = jax.jit(lambda x: x.astype(jnp.float16))(x)
        return (
            y * x.astype(jnp.float16),
            jax.random.uniform(jax.random.key(0)),
            jax.random.uniform(jax.random.key(1)),
        )

    x = jnp.ones((2, 2))
    flat = flatten(jax.make_jaxpr(f)(x))
    halves = [eqn for eqn in flat.eqns if eqn.outvars[0].aval.dtype == jnp.float16]
    assert [eqn.primitive.name for eqn in halves] == ["convert_element_type", "mul"]
    assert names(flat).count("random_bits") == 2
    signs = flatten(jax.make_jaxpr(lambda x: (jnp.maximum(x, 0.0), jnp.maximum(x, -0.0)))(x))
    assert names(signs) == ["max", "max"]
    assert run(flat, x)[1:] == list(f(x)[1:])


def test_unused_equations_go():
    def f(x):
        jnp.exp(x)
        return x + 1

    assert names(flatten(jax.make_jaxpr(f)(1.0))) == ["add"]


def test_an_input_or_a_literal_may_be_an_output():
    flat = flatten(jax.make_jaxpr(lambda x: (x, 3.0))(1.0))
    assert flat.outvars[0] is flat.invars[0]
    assert isinstance(flat.outvars[1], Literal)


def test_fingerprints_differ_only_for_different_programs():
    def fingerprint(f, *args):
        return graph.fingerprint(flatten(jax.make_jaxpr(f)(*args)))

    x = jnp.ones((2, 3))
    f = lambda x: jax.nn.gelu(x) + 1  # noqa: E731
    assert fingerprint(f, x) == fingerprint(lambda y: jax.nn.gelu(y) + 1, x)
    assert fingerprint(f, x) != fingerprint(lambda x: jax.nn.gelu(x) + 2, x)
    assert fingerprint(f, x) != fingerprint(f, jnp.ones((3, 2)))
    assert fingerprint(f, x) != fingerprint(f, x.astype(jnp.bfloat16))
    assert fingerprint(lambda x: x.sum(0), jnp.ones((2, 2))) != fingerprint(
        lambda x: x.sum(1), jnp.ones((2, 2))
    )
    assert fingerprint(lambda x, y: x - y, x, x) != fingerprint(lambda x, y: y - x, x, x)


def test_fingerprints_do_not_depend_on_the_order_of_sets():
    jaxpr = flatten(jax.make_jaxpr(jnp.sin)(1.0))
    (eqn,) = jaxpr.eqns

    def fingerprint(numbers):
        inner = jaxpr.replace(eqns=[eqn.replace(params={"axes": frozenset(numbers)})])
        params = {"axes": frozenset(numbers), "jaxpr": inner, "all": {frozenset(numbers)}}
        return graph.fingerprint(jaxpr.replace(eqns=[eqn.replace(params=params)]))

    # the text of a set depends on its order, and for names on the hash seed of the process
    assert str(frozenset([0, 8])) != str(frozenset([8, 0]))
    assert fingerprint([0, 8]) == fingerprint([8, 0])
    assert fingerprint([0, 8]) != fingerprint([0, 1])
