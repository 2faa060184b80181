"""Flattened loops and branches keep their results, and lose equations that nothing reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.ir import control_flow
from autopar.ir.evaluate import evaluate
from autopar.ir.flatten import flatten
from autopar.ir.graph import fingerprint, read

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
W = jnp.eye(4) * 0.5 + 0.1


def _rnn(w, x, xs):
    def cell(c, x):
        c = jnp.tanh(c @ w + x)
        return c, (c.sum(), x * 2)

    return lax.scan(cell, x, xs)


def _scan_gradient(w, x):
    def loss(w):
        final, (sums, _) = _rnn(w, x, jnp.stack([x, 2 * x, -x]))
        return (final**2).sum() + sums.sum()

    return jax.value_and_grad(loss)(w)


def _nested(x):
    def outer(c, k):
        inner = lax.scan(lambda d, _: (d * k + c, d), c, None, length=2)
        return inner[0], inner[1].sum()

    return lax.scan(outer, x, jnp.arange(3.0))


def _branches(x):
    table = jnp.arange(4.0)
    return lax.switch(
        jnp.int32(x.sum() > 0) + 1,
        [jnp.sin, lambda y: y + table, lambda y: (y * 2 + table) * table],
        x,
    )


def _gradient_of_cond(x):
    return jax.grad(
        lambda x: lax.cond(x[0, 0] > 0, lambda y: (y**3).sum(), lambda y: y.sum(), x * 2)
    )(x)


def _checkpointed_layers(x):
    weights = jnp.stack([W, 2 * W, W.T])

    def loss(weights):
        layer = jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None))
        return lax.scan(layer, x, weights)[0].sum()

    return jax.grad(loss)(weights)


FUNCTIONS = {
    "scan": (lambda x: _rnn(W, x, jnp.stack([x, x])), (X,)),
    "reverse scan": (
        lambda x: lax.scan(lambda c, y: (c + y, c), x[0], x, reverse=True, unroll=2),
        (X,),
    ),
    "scan without operands": (
        lambda x: lax.scan(lambda c, _: (c + 1, c), 0, None, length=3)[1] + x[0, :3],
        (X,),
    ),
    "gradient of a scan": (_scan_gradient, (W, X)),
    "nested scans": (_nested, (X,)),
    "scan over checkpointed layers": (_checkpointed_layers, (X,)),
    "fori_loop": (lambda x: lax.fori_loop(0, 3, lambda i, c: c * i + x, x), (X,)),
    "while": (
        lambda x: lax.while_loop(
            lambda c: c[1].sum() < 9, lambda c: (c[0] + 1, c[1] + x * x), (0, x)
        ),
        (X,),
    ),
    "while for each row": (
        lambda x: jax.vmap(
            lambda y: lax.while_loop(
                lambda c: c[1].sum() < 99, lambda c: (c[0] + 1, c[1] * 2), (0, y)
            )
        )(x * x),
        (X,),
    ),
    "while that computes in its body what its condition does": (
        lambda x: lax.while_loop(lambda y: (y * 2).sum() < 99, lambda y: y * 2, x * x),
        (X,),
    ),
    "while in a scan": (
        lambda x: lax.scan(
            lambda c, y: (lax.while_loop(lambda d: d.sum() < 5, lambda d: d + 1, c + y), c), x[0], x
        ),
        (X,),
    ),
    "switch": (_branches, (X,)),
    "gradient of a cond": (_gradient_of_cond, (X,)),
    "map": (lambda x: lax.map(lambda y: jnp.dot(y, y), x), (X,)),
    "random keys": (
        lambda x: lax.scan(
            lambda k, y: (jax.random.split(k)[0], y + jax.random.normal(k)), jax.random.key(0), x
        )[1],
        (X,),
    ),
}


def run(jaxpr, *args):
    env = dict(zip(jaxpr.invars, args, strict=True)) | dict(
        zip(jaxpr.constvars, jaxpr.consts, strict=True)
    )
    evaluate(enumerate(jaxpr.eqns), env, before=lambda _, v: v, after=lambda _, v: v)
    return [read(atom, env) for atom in jaxpr.outvars]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_flat_control_flow_computes_the_same(name):
    function, args = FUNCTIONS[name]
    flat = flatten(jax.make_jaxpr(function)(*args))
    assert not {"scan", "while", "cond"} & {eqn.primitive.name for eqn in flat.eqns}
    bound = [var for eqn in flat.eqns for var in eqn.outvars]
    assert len(bound) == len(set(bound))
    for ours, theirs in zip(run(flat, *args), jax.tree.leaves(function(*args)), strict=True):
        assert jax.typeof(ours).dtype == jax.typeof(theirs).dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert fingerprint(flat) == fingerprint(flatten(jax.make_jaxpr(function)(*args)))


def test_unread_results_of_a_loop_are_removed_and_carries_stay():
    def function(x):
        _, (used, _) = lax.scan(
            lambda c, y: ((c[0] + c[1], c[1] * 2), (c[0], jnp.sin(y))), (x[0], x[1]), x
        )
        return used

    flat = flatten(jax.make_jaxpr(function)(X))
    names = [eqn.primitive.name for eqn in flat.eqns]
    assert "sin" not in names
    assert names.count("loop_stack") == 1
    assert names.count("loop_carry") == names.count("loop_result") == 2
    assert flatten(jax.make_jaxpr(lambda x: (function(x), x)[1])(X)).eqns == []


def test_a_loop_sees_the_outside_through_its_markers_only():
    """Liveness and resharding of the values that a loop reads then follow from the markers."""

    def function(x):
        y = jnp.sin(x)
        return lax.scan(lambda c, _: (c + jnp.sin(x), None), y, None, length=2)[0]

    flat = flatten(jax.make_jaxpr(function)(X))
    (start, end), *_ = control_flow.spans(flat.eqns).values()
    inside = {var for eqn in flat.eqns[start:end] for var in eqn.outvars}
    for eqn in flat.eqns[start + 1 : end]:
        if eqn.primitive not in control_flow.MARKERS:
            assert {atom for atom in eqn.invars if not hasattr(atom, "val")} <= inside


def test_repeats_multiply_through_nested_loops_and_divide_by_branches():
    def function(x):
        def body(c, y):
            c = lax.scan(lambda d, _: (jnp.sin(d), None), c, None, length=5)[0]
            return lax.cond(y.sum() > 0, jnp.cos, jnp.tanh, c), None

        return lax.scan(body, x[0], x)[0]

    flat = flatten(jax.make_jaxpr(function)(X))
    repeats = dict(
        zip([eqn.primitive.name for eqn in flat.eqns], control_flow.repeats(flat.eqns), strict=True)
    )
    assert (repeats["sin"], repeats["cos"], repeats["reduce_sum"], repeats["loop_slice"]) == (
        15,
        1.5,
        3,
        1,
    )
