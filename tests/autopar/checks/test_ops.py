"""Operations of every kind are planned with sharded operands, and equal one device."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.testing import assert_allclose
from tests.tiers import slow

_x = np.random.default_rng(0).normal(size=(16, 144)).astype(np.float32)
_w = np.random.default_rng(1).normal(size=(144,)).astype(np.float32)


@jax.custom_jvp
def _cube(x: jax.Array) -> jax.Array:
    return x**3


_cube.defjvp(lambda primals, tangents: (_cube(*primals), 3 * primals[0] ** 2 * tangents[0]))


@jax.custom_vjp
def _clipped(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


_clipped.defvjp(lambda x: (_clipped(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -0.1, 0.1),))


def _gradient(fun: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.grad(lambda x: (fun(x) ** 2).sum())(x)


OPS: dict[str, Callable[[jax.Array], Any]] = {
    "dropout": lambda x: nn.Dropout(0.5, deterministic=False).apply(
        {}, x, rngs={"dropout": jax.random.key(0)}
    ),
    "gather": lambda x: x[:, jnp.arange(0, 144, 3)],
    "gather of rows": lambda x: x[jnp.arange(16) % 5],
    "scatter": lambda x: x.at[:, jnp.arange(12)].set(0.0),
    "scatter-add": lambda x: jnp.zeros((4, 144)).at[jnp.arange(16) % 4].add(x),
    "gradient of gather": _gradient(lambda x: x[:, jnp.arange(0, 144, 3)]),
    "argmax": lambda x: (x.argmax(0), x.argmax(1)),
    "matrix-vector": lambda x: x @ _w,
    "reshape": lambda x: x.reshape(16, 8, 18) + 1,
    "reshape and merge": lambda x: x.reshape(4, 4, 144).transpose(1, 0, 2).reshape(-1),
    "argsort": lambda x: jnp.argsort(x, axis=1),
    "sort": lambda x: jnp.sort(x, axis=0),
    "top_k": lambda x: jax.lax.top_k(x, 3),
    "cumsum": lambda x: (jnp.cumsum(x, 0), jnp.cumsum(x, 1)),
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "custom_jvp": _gradient(_cube),
    "custom_vjp": _gradient(_clipped),
    "checkpoint": _gradient(jax.checkpoint(lambda x: jnp.sin(jnp.cos(x) @ x.T))),
    "einsum with two batch dims": lambda x: jnp.einsum(
        "abij,abjk->abik", *2 * (x.reshape(4, 4, 12, 12),)
    ),
    "integers": lambda x: (
        (x * 10).astype(jnp.int32) // 3 % 5,
        jnp.bitwise_xor(x.astype(jnp.int32), 5),
    ),
    "booleans": lambda x: (
        (x > 0) & ~(x > 1),
        (x > 0).any(0),
        (x > -9).all(1),
        jnp.where(x > 0, x, -x),
    ),
}


def all_operations(x: jax.Array) -> dict[str, Any]:
    return {name: operation(x) for name, operation in OPS.items()}


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=["rows", "columns"])
@pytest.mark.parametrize(
    "operation", [all_operations, *slow(*OPS.values())], ids=["all", *OPS.keys()]
)
def test_an_operation_on_a_sharded_operand_equals_one_device(operation, spec):
    options = autopar.ShardingOptions(pins={"0": spec})
    planned = autopar.parallelize(
        operation,
        method=autopar.ShardParallel(4, options=options),
        batch_argnums=(),
        donate_argnums=(),
    )
    assert_allclose(planned(_x), jax.jit(operation)(_x), rtol=1e-3, atol=1e-3)
    (value,) = planned.get_last_executable().plan.stages[0].inputs
    assert value.spec == ((("x",), ()) if spec == P("x") else ((), ("x",)))


def test_a_donated_operand_is_reused():
    planned = autopar.parallelize(
        lambda x: x + 1, method=autopar.DataParallel(4), batch_argnums=(0,), donate_argnums=0
    )
    (x,) = planned.preshard_dynamic_args(_x)
    assert_allclose(planned(x), _x + 1)
    assert x.is_deleted()
