"""Linen modules, nnx modules and functions with named scopes take the same directives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from autopar.directives import ModelSchedule, Verify, build, create_schedule
from autopar.testing import assert_allclose
from tests.autopar.directives.scheduled_models import collectives, scheduled, tensor_parallel
from tests.models import TutorialMLP

WIDTH = 32
X = jax.random.normal(jax.random.key(0), (4, WIDTH))


class NnxMLP(nnx.Module):
    """`TutorialMLP` as an nnx module."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear1 = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.linear2 = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear2(nnx.gelu(self.linear1(x), approximate=False))


def mlp(params: Any, x: jax.Array) -> jax.Array:
    """`TutorialMLP` as a function with named scopes."""
    with jax.named_scope("linear1"):
        x = x @ params["linear1"]["kernel"] + params["linear1"]["bias"]
    x = jax.nn.gelu(x, approximate=False)
    with jax.named_scope("linear2"):
        return x @ params["linear2"]["kernel"] + params["linear2"]["bias"]


def linen_schedule() -> ModelSchedule:
    return scheduled(TutorialMLP(WIDTH), X)


def nnx_schedule() -> ModelSchedule:
    model = NnxMLP(nnx.Rngs(0))
    return create_schedule(model, nnx.state(model), [X], mesh=4)


def function_schedule() -> ModelSchedule:
    layer = {"kernel": jnp.ones((WIDTH, WIDTH)), "bias": jnp.ones(WIDTH)}
    return create_schedule(mlp, {"linear1": layer, "linear2": layer}, [X], mesh=4)


KINDS = pytest.mark.parametrize(
    "make", [linen_schedule, nnx_schedule, function_schedule], ids=["linen", "nnx", "function"]
)


@KINDS
def test_all_directives_work_on_all_kinds_of_model(make: Callable[[], ModelSchedule]) -> None:
    sch = make()
    tensor_parallel(sch)
    sch["linear*"].decompose()
    sch["linear2"].checkpoint()
    sch["linear1"].annotate("kernel", split_by="column")
    sch.trace(leaf_modules=["linear2"])
    (region,) = sch.find(lambda x, bias: jax.nn.gelu(bias + x, approximate=False))
    assert region.inputs == ("linear1/dot_general", "linear1/bias")
    sch.fuse(region, name="BiasGeLU")
    sch["linear1"].replace(
        lambda x, kernel: jnp.dot(x, kernel), sch["linear1"].find("linear1/dot_general")
    )
    assert "BiasGeLU_0(linear1/bias, linear1/dot_general)" in sch.mod
    assert "linear2(...)" in sch.mod
    Verify(sch, [X]).check()
    run = jax.jit(build(sch).apply)
    params = jax.tree.map(lambda p: jnp.ones(p.shape, p.dtype), sch.params)
    assert collectives(run.lower(params, X).compile()) == {"all-reduce": 1}


@KINDS
def test_schedules_of_one_kind_are_replayed_on_another(make: Callable[[], ModelSchedule]) -> None:
    """Directives apply to modules of the same names; nnx stores kernels as linen does."""
    original = linen_schedule()
    tensor_parallel(original)
    sch = make()
    replayed = sch.replay(original.schedule, sch.args)
    assert replayed.schedule == original.schedule
    Verify(replayed, [X]).check()


def test_a_module_replaces_a_module() -> None:
    sch = linen_schedule()
    sch["linear2"].replace(nn.Dense(WIDTH))
    sch["linear1"].shard("kernel", axis=-1).shard("bias", axis=-1).sync("fwd_post", "all_gather")
    assert "kernel, axis=1" in str(sch.schedule)
    Verify(sch, [X]).check()


def test_building_a_schedule_does_not_change_the_model() -> None:
    model = TutorialMLP(WIDTH)
    params = model.init(jax.random.key(0), X)
    before = str(jax.make_jaxpr(model.apply)(params, X))
    sch = scheduled(model, X)
    tensor_parallel(sch)
    sch["linear1"].replace(lambda params, x: x @ params["kernel"] + params["bias"])
    np.testing.assert_allclose(build(sch).apply(params, X), model.apply(params, X), atol=1e-5)
    assert str(jax.make_jaxpr(model.apply)(params, X)) == before


def test_parameters_are_initialized_shard_by_shard() -> None:
    """A device initializes 1 MiB of two 4 MiB kernels in less memory than one whole kernel."""
    model, x = TutorialMLP(1024), jnp.ones((2, 1024))
    sch = scheduled(model, x, mesh=8)
    tensor_parallel(sch)
    built = build(sch)
    compiled = (
        jax.jit(model.init, out_shardings=built.shardings).lower(jax.random.key(0), x).compile()
    )
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.output_size_in_bytes < 1.1 * 2**20
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < 4 * 2**20
    params = built.init(model.init, jax.random.key(0), x)
    expected = model.init(jax.random.key(0), x)
    assert_allclose(params, expected, rtol=0, atol=1e-6)


class CalledTwice(nn.Module):
    """A module that reads in its second call what is computed from its first one."""

    def setup(self) -> None:
        self.up = nn.Dense(WIDTH)
        self.down = nn.Dense(WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = self.down(nn.relu(self.up(x)))
        return x


def test_each_call_of_a_module_is_recomputed() -> None:
    sch = scheduled(CalledTwice(), X)
    sch["up"].shard("kernel", axis=1).shard("bias", axis=0)
    sch["down"].shard("kernel", axis=0).sync("fwd_post", "all_reduce")
    sch["up"].checkpoint()
    Verify(sch, [X]).check()
    built = build(sch)
    gradient = jax.make_jaxpr(jax.grad(lambda params: jnp.sum(built.apply(params, X))))
    assert str(gradient(sch.params)).count("remat") == 2


class Vmapped(nnx.Module):
    """`NnxMLP` with layers that compute one example."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear1 = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.linear2 = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.vmap(lambda row: self.linear2(nnx.relu(self.linear1(row))))(x)


def vmapped_function(params: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(mlp, in_axes=(None, 0))(params, x)


@pytest.mark.parametrize("kind", ["nnx", "function"])
def test_modules_under_vmap_have_their_own_paths(kind: str) -> None:
    if kind == "nnx":
        model = Vmapped(nnx.Rngs(0))
        sch = create_schedule(model, nnx.state(model), [X], mesh=4)
    else:
        layer = {"kernel": jnp.ones((WIDTH, WIDTH)), "bias": jnp.ones(WIDTH)}
        params = {"linear1": layer, "linear2": layer}
        sch = create_schedule(vmapped_function, params, [X], mesh=4)
    tensor_parallel(sch)
    sch["linear1"].checkpoint()
    Verify(sch, [X]).check()
