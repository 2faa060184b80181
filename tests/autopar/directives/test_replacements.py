"""Functions and modules replace modules and equations, and use their parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import autopar
from autopar.directives import DirectiveError, ModelSchedule, Verify, build, create_schedule
from autopar.testing import assert_allclose
from tests.autopar.directives.scheduled_models import (
    collectives,
    layer_norm,
    mlp_schedule,
    scheduled,
    tensor_parallel,
)
from tests.models import Transformer
from tests.tiers import tiers

WIDTH = 32
X = jax.random.normal(jax.random.key(0), (2, 8, WIDTH))
BACKENDS = pytest.mark.parametrize("backend", ["manual", "gspmd", "auto"])


class Linear(nn.Module):
    """A layer with a bias, whose equations differ from those of nn.Dense."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.ones, (x.shape[-1], WIDTH))
        return jnp.einsum("...k,kn->...n", x, kernel) + self.param(
            "bias", nn.initializers.ones, (WIDTH,)
        )


def linear(params: Any, x: jax.Array) -> jax.Array:
    return jnp.einsum("...k,kn->...n", x, params["kernel"]) + params["bias"]


def nnx_linear() -> nnx.Module:
    return nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))


REPLACEMENTS = pytest.mark.parametrize(
    "new",
    [lambda: linear, Linear, lambda: nn.Dense(WIDTH), nnx_linear],
    ids=["function", "linen", "Dense", "nnx"],
)


@BACKENDS
@REPLACEMENTS
def test_a_replaced_row_parallel_layer_has_one_all_reduce_before_its_bias(
    new: Any, backend: Any
) -> None:
    """The all_reduce is before the bias is added, as in the model's own layer."""
    sch = mlp_schedule()
    sch["linear2"].replace(new())
    tensor_parallel(sch)
    if backend == "manual":
        Verify(sch, [X]).check()
        forward = jax.jit(build(sch).apply).lower(sch.params, X).compile()
        assert collectives(forward) == {"all-reduce": 1}
    else:
        params = jax.tree.map(lambda p: jnp.full(p.shape, 0.1), sch.params)
        result = jax.jit(build(sch, backend).apply)(params, X)
        np.testing.assert_allclose(result, sch.fun(params, X), rtol=1e-4)


@REPLACEMENTS
def test_a_replacement_of_both_layers_is_sharded_as_they_are(new: Any) -> None:
    sch = mlp_schedule()
    sch["linear*"].replace(new())
    sch["linear2"].checkpoint()
    tensor_parallel(sch)
    Verify(sch, [X]).check()


@pytest.mark.parametrize(
    "new",
    tiers([nn.LayerNorm(use_fast_variance=False), nnx.LayerNorm(16, rngs=nnx.Rngs(0))]),
    ids=["linen", "nnx"],
)
def test_a_module_replaces_a_subgraph_and_gets_the_parameters_that_it_reads(new: Any) -> None:
    tokens = np.arange(16).reshape(2, 8)
    sch = scheduled(Transformer(layers=1), tokens, mesh=1)
    norms = sch.find(layer_norm)
    assert len(norms) == 3
    sch.replace(new, norms)
    assert [directive.path for directive in sch.schedule.directives] == [
        "block_0/norm1",
        "block_0/norm2",
        "norm",
    ]
    Verify(sch, [tokens]).check()


class Projections(nn.Module):
    """Queries, keys and values, computed by one product."""

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        kernels, biases = zip(
            *(_Parameters(name=name)(x.shape[-1]) for name in ("q", "k", "v")), strict=True
        )
        return tuple(jnp.split(x @ jnp.concatenate(kernels, 1) + jnp.concatenate(biases), 3, -1))


class _Parameters(nn.Module):
    @nn.compact
    def __call__(self, width: int) -> Any:
        return self.param("kernel", nn.initializers.ones, (width, width)), self.param(
            "bias", nn.initializers.ones, (width,)
        )


def test_a_module_replaces_several_modules() -> None:
    tokens = np.arange(16).reshape(2, 8)
    sch = scheduled(Transformer(layers=1), tokens, mesh=1)
    attention = sch["block_0/attention"]
    attention.replace(Projections(), attention["[qkv]"].subgraph())
    Verify(sch, [tokens]).check()


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (
            lambda: nn.Dense(WIDTH + 1),
            r"in place of Dense, fails for \(\{bias: float32\[32\], kernel: .*brings no parameters",
        ),
        (
            lambda: nn.LayerNorm(),
            r'"scale" in scope .*(.|\n)*A replacement brings no parameters of its own',
        ),
        (lambda: nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0)), "it needs a parameter scale"),
        (lambda: nnx.Linear(WIDTH, 8, rngs=nnx.Rngs(0)), r"its bias has shape \(8,\), not \(32,\)"),
        (
            lambda: nn.Dense(WIDTH, dtype=jnp.bfloat16),
            r"returns bfloat16\[2, 8, 32\] for linear1/add, which is float32",
        ),
    ],
    ids=["size", "linen", "nnx", "nnx size", "dtype"],
)
def test_a_module_that_does_not_fit_is_refused_when_it_is_given(new: Any, message: str) -> None:
    sch = mlp_schedule()
    with pytest.raises(DirectiveError, match=f"(?s){message}"):
        sch["linear1"].replace(new())


def test_a_replayed_schedule_takes_modules_by_name() -> None:
    sch = mlp_schedule()
    sch["linear2"].replace(Linear())
    tensor_parallel(sch)
    (name,) = sch.functions
    replayed = create_schedule(
        sch.fun, sch.params, sch.args, 4, sch.schedule, functions={name: Linear()}
    )
    Verify(replayed, [X]).check()


class Dropping(nnx.Module):
    """Layers with BatchNorm and dropout, whose state changes with each call."""

    def __init__(self, rngs: nnx.Rngs, **norm: Any) -> None:
        self.linear1 = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs, **norm)
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.linear2 = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        return self.linear2(self.drop(self.norm(self.linear1(x)), rngs=key))


def nnx_schedule(*args: Any, updates: bool = False, **norm: Any) -> ModelSchedule:
    model = Dropping(nnx.Rngs(0), **norm)
    return create_schedule(model, nnx.state(model), args, 4, updates=updates)


def shard_layers(sch: ModelSchedule) -> None:
    sch["linear1"].shard("kernel", axis=1).shard("bias", axis=0).sync("fwd_post", "all_gather")
    sch["linear2"].shard("kernel", axis=0).sync("fwd_post", "all_reduce")


def test_a_call_that_changes_state_is_refused_without_updates() -> None:
    with pytest.raises(
        DirectiveError,
        match=r"changes .*norm/mean, norm/var of its state, which would be lost.*updates=True",
    ):
        nnx_schedule(X)
    with pytest.raises(DirectiveError, match=r"changes drop/rngs/count of its state"):
        nnx_schedule(X, use_running_average=True)
    with pytest.raises(DirectiveError, match="updates=True is for nnx modules"):
        create_schedule(nn.Dense(3), {}, [X], updates=True)


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat])
def test_state_that_a_flax_transform_returns_unchanged_is_no_update(transform: Any) -> None:
    class Layers(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear1, self.linear2 = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))

        def __call__(self, x: jax.Array) -> jax.Array:
            run = transform(lambda layer, x: layer(x))
            return run(self.linear2, jnp.tanh(run(self.linear1, x)))

    model = Layers(nnx.Rngs(0))
    sch = create_schedule(model, nnx.state(model), [X], 4)
    tensor_parallel(sch)
    Verify(sch, [X]).check()


def test_updated_state_is_returned_beside_the_result() -> None:
    sch = nnx_schedule(X, updates=True)
    shard_layers(sch)
    Verify(sch, [X]).check()
    run, model = build(sch).apply, Dropping(nnx.Rngs(0))
    state = nnx.state(model)
    first, updates = run(state, X)
    assert int(updates["drop"]["rngs"]["count"][...]) == 1
    updated_model = nnx.merge(
        nnx.split(model)[0], nnx.merge_state(nnx.filter_state(state, nnx.Param), updates)
    )
    np.testing.assert_allclose(first, model(X), atol=1e-5)
    second, _ = run(nnx.state(updated_model), X)
    np.testing.assert_allclose(second, updated_model(X), atol=1e-5)
    assert not np.allclose(first, second)  # the mask and the statistics differ


@BACKENDS
def test_nnx_models_run_on_every_backend(backend: Any) -> None:
    """The model has dropout keys as arguments, a replaced module and a forked mask."""
    key = jax.random.key(3)
    sch = nnx_schedule(X, key, use_running_average=True)
    shard_layers(sch)
    sch["linear2"].replace(nnx_linear())
    model = Dropping(nnx.Rngs(0), use_running_average=True)
    result = jax.jit(build(sch, backend).apply)(nnx.state(model), X, key)
    np.testing.assert_allclose(result, model(X, key), atol=1e-5)
    with pytest.raises(
        DirectiveError,
        match=r"of the model itself, without the schedule, is not finite: .* Give params=",
    ):
        Verify(sch, [X, key], backend=backend).check()
    if backend == "auto":
        Verify(sch, [X, key], nnx.state(model), backend=backend).check()
    sch["drop"].fork_rng()
    assert build(sch, backend).same_draws == (backend != "manual")


def test_shards_of_an_nnx_model_draw_their_own_masks() -> None:
    key, sch = jax.random.key(3), nnx_schedule(X, jax.random.key(3), use_running_average=True)
    sch["linear1"].shard("kernel", axis=1).shard("bias", axis=0)
    for name in ("scale", "bias", "mean", "var"):
        sch["norm"].shard(name, axis=0)
    sch["linear2"].shard("kernel", axis=0).sync("fwd_post", "all_reduce")
    sch["drop"].fork_rng()
    run = build(sch).apply
    state = nnx.state(Dropping(nnx.Rngs(0), use_running_average=True))
    assert "u32[2,8,8]" in (text := str(jax.make_jaxpr(run)(state, X, key)))
    assert "u32[2,8,32]" not in text
    assert not np.allclose(run(state, X, key), sch.fun(state, X, key))


def test_an_nnx_model_is_cut_into_stages() -> None:
    x, key = X[0], jax.random.key(3)
    sch = nnx_schedule(x, key, use_running_average=True)
    sch["drop"].cut_pipeline_stage()
    sch["linear2"].shard("kernel", axis=0).sync("fwd_post", "all_reduce")
    built = build(sch, "auto")
    params, rest = nnx.split_state(
        nnx.state(Dropping(nnx.Rngs(0), use_running_average=True)), nnx.Param, ...
    )

    def step(params: Any, x: Any, key: Any, rest: Any, run: Any = built.apply) -> Any:
        loss = lambda params: jnp.mean(run(nnx.merge_state(params, rest), x, key) ** 2)  # noqa: E731
        value, gradients = autopar.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients), value

    parallel = autopar.parallelize(step, method=built.method)
    updated, value = parallel(params, x, key, rest)
    expected, loss = step(params, x, key, rest, sch.fun)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    assert_allclose(updated, expected, rtol=0, atol=1e-5)
    first, second = parallel.get_executable(params, x, key, rest).plan.stages
    assert not any("linear2" in value_plan.path for value_plan in first.inputs)
    assert {
        value_plan.spec for value_plan in second.inputs if "linear2/kernel" in value_plan.path
    } == {(("x",), ())}
