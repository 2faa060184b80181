"""Products by vectors are reductions, which take the time of reading their operands."""

import jax
import jax.numpy as jnp
import pytest

import autopar

PRODUCTS = {
    "heads of attention": ("bthd,bthd->bth", (64, 512, 16, 64), (64, 512, 16, 64)),
    "states of a state space": ("btds,bts->btd", (8, 512, 2048, 16), (8, 512, 16)),
    "sum of all": ("btd,btd->", (64, 512, 1024), (64, 512, 1024)),
    "several keys": ("btnd,btd->btn", (16, 512, 16, 256), (16, 512, 256)),
    "weights of values": ("btn,btnd->btd", (16, 512, 16), (16, 512, 16, 256)),
    "an output": ("btd,de->bte", (64, 512, 1024), (1024, 1)),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_product_by_a_vector_takes_about_as_long_as_reading_it(name, dtype):
    subscripts, *shapes = PRODUCTS[name]

    def seconds(step):
        args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        method = autopar.ShardParallel((1,))
        plan = autopar.plan_step(step, args, method=method, cluster="dgx_a100_80")
        return plan.predicted_seconds

    def product(x, y):
        return jnp.einsum(subscripts, x, y)

    def sums(x, y):
        return jnp.sum(x, -1), jnp.sum(y, -1)

    assert seconds(product) < 1.5 * seconds(sums)
