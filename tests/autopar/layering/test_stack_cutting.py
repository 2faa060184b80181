"""A jaxpr that computes with pieces of its inputs computes the same numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.ir.array_cuts import Cut, CutTree
from autopar.ir.evaluate import evaluate, unchanged
from autopar.ir.flatten import flatten
from autopar.ir.graph import aval_of, read
from autopar.ir.joined_array import JoinedArray
from autopar.layering.equation_cuts import roots
from autopar.layering.stack_cutting import cut_stacks

SIZES = (1, 3, 2)


def scanned(stack, vector):
    carry, sums = lax.scan(lambda c, w: (c @ w, c.sum()), jnp.ones(4), stack)
    return carry, sums * vector[:, 0]


FUNCTIONS = {
    "update": lambda stack, vector: (stack - 0.1 * jnp.exp(stack) + 1, vector),
    "moments": lambda stack, vector: (0.9 * jnp.zeros_like(stack) + stack**2, vector * 2),
    "sum of all": lambda stack, vector: jnp.sqrt(jnp.sum(stack**2) + jnp.sum(vector)),
    "largest": lambda stack, vector: jnp.max(jnp.abs(stack)) - jnp.min(vector),
    "any and all": lambda stack, vector: (jnp.any(stack > 1), jnp.all(stack < 9)),
    "norm of each": lambda stack, vector: (
        stack / jnp.linalg.norm(stack, axis=(1, 2))[:, None, None]
    ),
    "transposed": lambda stack, vector: jnp.moveaxis(stack, 0, 1) * 2,
    "flat": lambda stack, vector: stack.reshape(-1) @ jnp.ones(96),
    "merged dims": lambda stack, vector: jnp.tanh(stack.reshape(24, 4)),
    "products": lambda stack, vector: jnp.einsum("lij,lkj->lik", stack, stack),
    "slices": lambda stack, vector: (stack[2], stack[:, 1:3], stack[::2]),
    "order": lambda stack, vector: (jnp.sort(stack, axis=1), jnp.cumsum(stack, axis=0)),
    "reversed": lambda stack, vector: stack[::-1] + stack,
    "gathered": lambda stack, vector: stack[jnp.array([0, 2, 5])],
    "joined": lambda stack, vector: jnp.concatenate([stack, stack], axis=0) * 2,
    "positions": lambda stack, vector: stack * jnp.arange(6.0)[:, None, None],
    "noise": lambda stack, vector: stack + jax.random.normal(jax.random.key(1), stack.shape),
    "condition": lambda stack, vector: jnp.where(vector > 0, vector, 2 * vector),
    "branch": lambda stack, vector: lax.cond(vector[0, 0] > 0, lambda: stack, lambda: -stack),
    "loop": scanned,
    "norm by a loop": lambda stack, vector: lax.map(jnp.sum, stack),
    "decomposition": lambda stack, vector: jnp.linalg.qr(stack[:, :, :4])[1] ** 2,
    "scatter": lambda stack, vector: stack.at[1].set(0.0).at[:, 0].add(1.0),
    "returned": lambda stack, vector: (stack, stack),
}


def inputs():
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in ((6, 4, 4), (6, 1))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_pieces_give_what_the_whole_arrays_give(name):
    args = inputs()
    expected, actual = jax.jit(lambda *args: (FUNCTIONS[name](*args), by_pieces(name, args)))(*args)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-5, atol=1e-5)


def by_pieces(name, args):
    """Return the results of a function, computed from the pieces of its first argument."""
    jaxpr = flatten(jax.make_jaxpr(FUNCTIONS[name])(*args))
    seeds = {jaxpr.invars[0]: Cut(0, SIZES)}
    cut = cut_stacks(jaxpr, seeds, in_pieces=jaxpr.invars, out_pieces=jaxpr.outvars)
    arguments = CutTree(jax.tree.structure(args), ("stack", "vector"), cut.inputs)
    result = CutTree(jax.tree.structure(list(jaxpr.outvars)), ("",) * len(cut.outputs), cut.outputs)
    assert arguments.cuts[0] == Cut(0, SIZES)
    env = dict(zip(cut.jaxpr.invars, arguments.pieces(args), strict=True))
    env.update(zip(cut.jaxpr.constvars, cut.jaxpr.consts, strict=True))
    for var in cut.jaxpr.invars:
        assert env[var].shape == aval_of(var).shape
    evaluate(enumerate(cut.jaxpr.eqns), env, unchanged, unchanged)
    results = [read(atom, env) for atom in cut.jaxpr.outvars]
    return result.joined(results, lambda pieces, dim: jnp.concatenate(pieces, dim))


@pytest.mark.parametrize(
    "name", ["update", "moments", "sum of all", "norm of each", "products", "flat", "merged dims"]
)
def test_nothing_has_the_size_of_the_whole_stack_if_all_can_be_cut(name):
    jaxpr = flatten(jax.make_jaxpr(FUNCTIONS[name])(*inputs()))
    seeds = {jaxpr.invars[0]: Cut(0, SIZES)}
    cut = cut_stacks(jaxpr, seeds, in_pieces=jaxpr.invars, out_pieces=jaxpr.outvars).jaxpr
    values = [*cut.invars, *(var for eqn in cut.eqns for var in eqn.outvars)]
    assert max(aval_of(var).size for var in values) == 3 * 4 * 4


def test_the_moments_of_a_stack_are_cut_as_the_stack_is():
    def update(stack, moment, rate):
        moment = 0.9 * moment + stack
        return stack - rate * moment, moment

    stack = jnp.ones((6, 4))
    jaxpr = flatten(jax.make_jaxpr(update)(stack, stack, 0.1))
    cut = cut_stacks(
        jaxpr,
        {jaxpr.invars[0]: Cut(0, SIZES)},
        in_pieces=jaxpr.invars,
        out_pieces=jaxpr.outvars,
    )
    assert cut.inputs == (Cut(0, SIZES), Cut(0, SIZES), None)
    assert cut.outputs == (Cut(0, SIZES), Cut(0, SIZES))


def test_roots_are_the_inputs_whose_slices_suffice():
    def fun(stack, other, batch):
        cast = jnp.moveaxis(stack * 2, 1, 0).astype(jnp.bfloat16)
        return cast, jnp.cumsum(other, axis=0), cast + batch

    jaxpr = flatten(
        jax.make_jaxpr(fun)(jnp.ones((4, 6)), jnp.ones((6, 4)), jnp.ones((6, 4), jnp.bfloat16))
    )
    stack, other, batch = jaxpr.invars
    cast, summed, both = jaxpr.outvars
    assert roots(jaxpr, cast, 0) == {stack}
    assert roots(jaxpr, summed, 0) == {summed}
    assert roots(jaxpr, both, 0) == {stack, batch}
    assert other not in roots(jaxpr, both, 0)


def test_a_joined_array_is_its_pieces_one_after_another():
    whole = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    joined: Any = JoinedArray(tuple(Cut(1, (1, 3)).split(jnp.asarray(whole))), 1)
    assert (joined.shape, joined.dtype, joined.starts) == (whole.shape, whole.dtype, (0, 1))
    assert (np.asarray(joined) == whole).all()
    assert (jnp.asarray(joined) == whole).all()
    assert (2 * joined - 1 == 2 * whole - 1).all()
    assert joined.mean() == whole.mean()
    assert (joined[1] == whole[1]).all()
    assert Cut(1, (1, 3)).split(joined) == list(joined.pieces)
    assert [piece.shape for piece in Cut(0, (2, 1)).split(joined)] == [(2, 4), (1, 4)]
