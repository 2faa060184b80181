"""Equal bodies of jax.checkpoint are differentiated once, and the traced step stays the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core.primitives import remat_p

import autopar
from autopar.ir.graph import params_text, source_line
from autopar.ir.scope_renaming import renaming_scope, with_renamed_scopes
from autopar.layering import layered_functions
from autopar.layering.equal_bodies import with_shared_bodies
from autopar.testing import assert_allclose
from autopar.tracing.step_traces import TraceOptions
from autopar.tracing.trace import trace

WIDTH = 8


def block(x, w, name="block", factor=2.0):
    @jax.checkpoint
    def recomputed(x, w):
        with jax.named_scope(name), jax.named_scope("product"):
            return jnp.tanh(factor * x @ w)

    return recomputed(x, w)


def step_of(factors):
    """Return a step with one recomputed block per factor."""

    def step(weights, x):
        def loss(weights):
            y = x
            for k, (w, factor) in enumerate(zip(weights, factors, strict=True)):
                y = block(y, w, f"block_{k}", factor)
            return jnp.mean(y**2)

        value, gradients = autopar.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    return step


def args(count):
    random = np.random.default_rng(0)
    weights = [random.standard_normal((WIDTH, WIDTH)).astype(np.float32) for _ in range(count)]
    return weights, random.standard_normal((16, WIDTH)).astype(np.float32)


def equations(factors):
    """Return the primitives, parameters, values, name stacks and lines of a traced step."""
    option = autopar.AutoLayerOption(2)
    step = trace(
        step_of(factors), args(len(factors)), (1,), 4, TraceOptions(layers=option, marked=True)
    )
    number = {}

    def name(atom):
        return str(atom) if hasattr(atom, "val") else number.setdefault(atom, len(number))

    return [
        (
            eqn.primitive.name,
            params_text(eqn),
            [name(atom) for atom in (*eqn.invars, *eqn.outvars)],
            str(eqn.source_info.name_stack),
            source_line(eqn),
        )
        for eqn in step.jaxpr.eqns
    ]


FACTORS = pytest.mark.parametrize("factors", [[2.0] * 4, [2.0, 3.0, 2.0, 3.0], [0.0, -0.0]])


@FACTORS
def test_steps_are_traced_as_without_sharing(monkeypatch, factors):
    shared = equations(factors)
    monkeypatch.setattr(layered_functions, "with_shared_bodies", list)
    assert equations(factors) == shared


@FACTORS
def test_bodies_are_shared_if_only_their_scopes_differ(factors):
    def forward(weights, x):
        for k, (w, factor) in enumerate(zip(weights, factors, strict=True)):
            x = block(x, w, f"block_{k}", factor)
        return x

    jaxpr = jax.make_jaxpr(forward)(*args(len(factors)))
    eqns = with_shared_bodies(jaxpr.eqns)
    bodies = [id(eqn.params["jaxpr"]) for eqn in eqns if eqn.primitive is remat_p]
    first = {repr(factor): body for factor, body in reversed([*zip(factors, bodies, strict=True)])}
    assert bodies == [first[repr(factor)] for factor in factors]
    assert len(set(bodies)) == len(first)


def test_a_body_that_swaps_two_scopes_keeps_its_names():
    def forward(x):
        for names in (("a", "b"), ("b", "a")):

            @jax.checkpoint
            def swapped(x, names=names):
                for name in names:
                    with jax.named_scope(name):
                        x = jnp.sin(x)
                return x

            x = swapped(x)
        return x

    eqns = with_shared_bodies(jax.make_jaxpr(forward)(1.0).eqns)
    stack = eqns[1].source_info.name_stack
    for inner, name in zip(eqns[1].params["jaxpr"].eqns, ("b", "a"), strict=True):
        assert str(with_renamed_scopes(stack + inner.source_info.name_stack)) == name


def test_a_scope_with_two_new_names_is_no_renaming():
    def forward(x):
        for names in (("a", "a"), ("b", "c")):

            @jax.checkpoint
            def body(x, names=names):
                for name in names:
                    with jax.named_scope(name):
                        x = jnp.sin(x)
                return x

            x = body(x)
        return x

    jaxpr = jax.make_jaxpr(forward)(1.0)
    assert with_shared_bodies(jaxpr.eqns) == jaxpr.eqns


def test_renamings_keep_transformations_and_the_scopes_before_them():
    (eqn,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    empty = eqn.source_info.name_stack
    before = empty.extend("block").transform("jvp")
    renaming = f"decoder/{renaming_scope({'jvp': 'x', 'block': 'other'})}"
    stack = before.extend(renaming).extend("block").transform("jvp")
    expected = before.extend("decoder").extend("other").transform("jvp")
    assert with_renamed_scopes(stack) == expected


def test_a_pipeline_of_shared_blocks_computes_what_one_device_does():
    factors = [2.0, 2.0, 3.0, 2.0]
    step = step_of(factors)
    method = autopar.PipeshardParallel(
        num_micro_batches=2,
        layer_option=autopar.AutoLayerOption(2),
        stage_option=autopar.UniformStageOption(2),
        devices=2,
    )
    parallel = autopar.parallelize(step, method=method)
    assert_allclose(parallel(*args(4)), jax.jit(step)(*args(4)))
