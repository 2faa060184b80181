"""Steps with markers of Equinox, an axis of vmap, or a choice of platform are sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

import autopar

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
W = jnp.ones((4, 4))


def planned_whole(step) -> list[str]:
    """Run a step on a mesh, compare it with one device, and return the plan's warnings."""
    parallel = autopar.parallelize(step, method=autopar.DataParallel((8,)))
    results, expected = parallel(W, X), jax.jit(step)(W, X)
    for result, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-5)
    return [text for text in parallel.get_last_executable().plan.warnings if "whole" in text]


def test_collectives_over_an_axis_of_vmap_are_reductions() -> None:
    def step(w, x):
        def one(row):
            value = jnp.mean((row @ w) ** 2)
            return lax.pmean(value, "i"), lax.pmax(value, "i"), lax.pmin(row, "i")

        return jax.tree.map(lambda a: a[0], jax.vmap(one, axis_name="i")(x))

    assert planned_whole(step) == []
    names = set(autopar.report.primitives(step, W, X).primitive)
    assert {"reduce_sum", "reduce_max", "reduce_min"} <= names
    assert not names & {"psum", "pmax", "pmin"}


def test_a_choice_of_platform_is_planned() -> None:
    def step(w, x):
        return lax.platform_dependent(x @ w, cpu=jnp.sin, default=jnp.cos)

    assert planned_whole(step) == []


REFERENCES = {
    "nonbatchable": lambda x: x,
    "unvmap_any": lambda x: jnp.any(x > 0),
    "unvmap_all": lambda x: jnp.all(x > -9),
    "unvmap_max": jnp.max,
}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_marker_is_sharded_as_the_operation_that_it_is(name) -> None:
    marker = Primitive(name)
    operand = (lambda x: x > 0) if name in ("unvmap_any", "unvmap_all") else (lambda x: x)
    inner = {"unvmap_any": jnp.any, "unvmap_all": jnp.all}.get(name, REFERENCES[name])
    marker.def_impl(inner)
    marker.def_abstract_eval(
        lambda x: jax.core.ShapedArray(jax.eval_shape(inner, x).shape, x.dtype)
    )
    mlir.register_lowering(marker, mlir.lower_fun(inner, multiple_results=False))

    def step(w, x):
        return jnp.sum(x @ w), marker.bind(operand(x))

    assert planned_whole(step) == []


def test_a_primitive_under_vmap_is_what_its_implementation_computes() -> None:
    def mapped(x, y, *, prim, __axis_size, __batch_axes):
        return [jax.vmap(prim, __batch_axes, axis_size=__axis_size)(x, y)]

    vprim = Primitive("vprim")
    vprim.multiple_results = True
    vprim.def_impl(mapped)
    vprim.def_abstract_eval(
        lambda *avals, **params: [
            jax.core.ShapedArray(shape.shape, shape.dtype)
            for shape in jax.eval_shape(lambda *xs: mapped(*xs, **params), *avals)
        ]
    )
    mlir.register_lowering(vprim, mlir.lower_fun(mapped, multiple_results=True))

    def step(w, x):
        params = {"prim": jnp.outer, "__axis_size": len(x), "__batch_axes": (0, 1)}
        return vprim.bind(x @ w, x.T, **params)

    assert planned_whole(step) == []
    assert "vprim" not in set(autopar.report.primitives(step, W, X).primitive)


def test_equinox_has_these_markers() -> None:
    eqxi = pytest.importorskip("equinox.internal")

    def step(w, x):
        y = eqxi.nonbatchable(x @ w)
        return jnp.where(eqxi.unvmap_any(y > 0), y, -y), eqxi.unvmap_max(y)

    assert planned_whole(step) == []
