"""Products that sum over no dim are elementwise products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.ir.flatten import flatten

PRODUCTS = {
    "i,j->ij": [(2,), (3,)],
    "ij,->ij": [(2, 3), ()],
    "ij,j->ij": [(2, 3), (3,)],
    "j,ij->ji": [(3,), (2, 3)],
    "bhqk,h->bhqk": [(2, 3, 4, 5), (3,)],
    "bi,bj->bij": [(2, 3), (2, 4)],
    "ibj,kjb->bkji": [(2, 3, 4), (5, 4, 3)],
    "bij,kbjl->blkij": [(2, 3, 4), (5, 2, 4, 6)],
}


def primitives(fun, *args):
    return [eqn.primitive.name for eqn in flatten(jax.make_jaxpr(fun)(*args)).eqns]


@pytest.mark.parametrize("subscripts", PRODUCTS)
def test_a_product_without_sums_is_elementwise(subscripts):
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=shape).astype(np.float32) for shape in PRODUCTS[subscripts]]

    def product(*operands):
        return jnp.einsum(subscripts, *operands)

    flat = flatten(jax.make_jaxpr(product)(*operands))
    assert "dot_general" not in {eqn.primitive.name for eqn in flat.eqns}
    (result,) = jax.extend.core.jaxpr_as_fun(flat)(*operands)
    np.testing.assert_array_equal(result, np.einsum(subscripts, *operands))


def test_it_has_the_dtype_of_the_product():
    def product(x, y):
        numbers = (((), ()), ((0,), (0,)))
        return lax.dot_general(x, y, numbers, preferred_element_type=jnp.float32)

    flat = flatten(jax.make_jaxpr(product)(jnp.ones((2, 3), jnp.bfloat16), jnp.ones(2, jnp.int32)))
    assert [var.aval.str_short() for var in flat.outvars] == ["float32[2,3]"]


def test_a_mask_of_heads_takes_no_transposes():
    def masked(weights, mask):
        return jnp.einsum("bhqk,h->bhqk", weights, mask)

    assert primitives(masked, jnp.ones((2, 3, 4, 4)), jnp.ones(3)) == ["broadcast_in_dim", "mul"]


def test_only_a_transpose_that_undoes_another_one_is_left_out():
    x = jnp.ones((2, 3, 4))
    assert primitives(lambda x: x.transpose(1, 2, 0).transpose(2, 0, 1), x) == []
    turned = primitives(lambda x: x.transpose(1, 2, 0).transpose(1, 2, 0), x)
    assert turned == ["transpose", "transpose"]


def test_a_mask_of_heads_takes_little_time_in_a_plan():
    def step(params, x, *mask):
        def loss(params):
            heads = x.reshape(*x.shape[:2], 12, 64)
            weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", heads, heads))
            for values in mask:
                weights = jnp.einsum("bhqk,h->bhqk", weights, values)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, heads)
            return jnp.mean((mixed.reshape(x.shape) @ params) ** 2)

        return jax.grad(loss)(params)

    def seconds(*shapes):
        args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        method = autopar.ShardParallel((8,))
        plan = autopar.plan_step(
            step, args, method=method, cluster="dgx_a100_80", batch_argnums=(1,)
        )
        return plan.predicted_seconds

    shapes = (768, 768), (64, 512, 768)
    assert seconds(*shapes, (12,)) < 1.5 * seconds(*shapes)
