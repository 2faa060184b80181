"""Pattern search finds every subgraph that computes the pattern, however it is written."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from autopar.directives import DirectiveError, Verify, build, create_schedule
from autopar.testing import assert_allclose
from tests.autopar.directives.scheduled_models import (
    layer_norm,
    mlp_schedule,
    scheduled,
    tensor_parallel,
)
from tests.models import Attention, Transformer

X = jax.random.normal(jax.random.key(0), (2, 8, 16))
BIAS = jax.random.normal(jax.random.key(1), (16,))


def bias_gelu(x: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.gelu(bias + x, approximate=False)


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)


def find_in(
    fun: Callable[..., Any], pattern: Callable[..., Any], *args: Any, **options: Any
) -> list[Any]:
    args = args or (X,)
    return create_schedule(lambda p, *args: fun(p, *args), BIAS, args, mesh=1).find(
        pattern, **options
    )


@pytest.mark.parametrize(
    "fun",
    [
        lambda b, x: jax.nn.gelu(x + b, approximate=False),
        lambda b, x: jax.nn.gelu(b + x, approximate=False),
        lambda b, x: jax.nn.gelu(jnp.broadcast_to(b, x.shape) + x, approximate=False),
        lambda b, x: jax.nn.gelu(x + b.reshape(1, 1, -1), approximate=False) * 3,
        lambda b, x: jax.jit(lambda y: jax.nn.gelu(y, approximate=False))(jax.jit(jnp.add)(x, b)),
        lambda b, x: 0.5 * (x + b) * jax.lax.erfc(-(x + b) * np.float32(np.sqrt(0.5))),
    ],
    ids=["in order", "commuted", "broadcast", "reshaped", "jitted", "by hand"],
)
def test_a_pattern_matches_equivalent_equations(fun: Callable[..., Any]) -> None:
    regions = find_in(fun, bias_gelu)
    assert len(regions) == 1
    assert regions[0].nodes[-1].startswith("mul")
    assert any(name.startswith("erfc") for name in regions[0].nodes)


@pytest.mark.parametrize(
    "fun",
    [
        lambda b, x: jax.nn.gelu(x + b),  # the tanh approximation
        lambda b, x: jax.nn.gelu(x * b, approximate=False),
        lambda b, x: jax.nn.gelu(x, approximate=False) + b,
        lambda b, x: (y := x + b, jax.nn.gelu(y, approximate=False)),  # the sum is used elsewhere
        lambda b, x: 0.5 * (x + b) * jax.lax.erfc(-(x + b) * np.float32(0.7)),  # another number
        lambda b, x: x + b,
    ],
    ids=["tanh gelu", "product", "other order", "escapes", "literal", "unrelated"],
)
def test_a_pattern_does_not_match_other_computations_or_values_used_elsewhere(
    fun: Callable[..., Any],
) -> None:
    assert find_in(fun, bias_gelu) == []


COMMUTED = {
    "sum": (lambda b, x: jnp.tanh(b) + x, lambda x, y: x + jnp.tanh(y)),
    "product": (lambda b, x: x * jnp.tanh(2 * b), lambda x, y: jnp.tanh(y * 2) * x),
    "larger": (lambda b, x: jnp.maximum(b, jnp.sin(x)), lambda x, y: jnp.maximum(jnp.sin(x), y)),
    "twice": (lambda b, x: b + x * b, lambda x, y: x * y + y),
    "summed": (lambda b, x: jnp.sum(x * jnp.sin(b), -1), lambda x, y: jnp.sum(jnp.sin(y) * x, -1)),
    "entropy": (
        lambda b, x: -jnp.sum(jax.nn.log_softmax(x) * b, -1),
        lambda x, y: -jnp.sum(y * jax.nn.log_softmax(x), -1),
    ),
}


@pytest.mark.parametrize(("fun", "pattern"), COMMUTED.values(), ids=list(COMMUTED))
def test_operands_of_any_shapes_commute_and_the_match_computes_the_pattern(
    fun: Callable[..., Any], pattern: Callable[..., Any]
) -> None:
    """One operand has a lower rank in the model than in the pattern."""
    sch = create_schedule(fun, BIAS, [X], mesh=1)
    (region,) = sch.find(pattern)
    assert set(region.inputs) == {"arg0", ""}
    sch.replace(pattern, region)
    Verify(sch, [X], params=BIAS).check()


@pytest.mark.parametrize(
    ("fun", "pattern"),
    [
        (lambda b, x: jnp.tanh(b)[:, None] + x, lambda x, y: x + jnp.tanh(y)),
        (
            lambda b, x: x + jnp.sum(jnp.tanh(jnp.broadcast_to(b, x.shape)), 0),
            lambda x, y: x + jnp.sum(jnp.tanh(y), 0),
        ),
        (lambda b, x: jnp.broadcast_to(jnp.sin(b), x.shape) @ x, lambda x, y: jnp.sin(y) @ x),
    ],
    ids=["along rows", "summed after", "multiplied after"],
)
def test_a_broadcast_that_changes_the_result_is_not_ignored(
    fun: Callable[..., Any], pattern: Callable[..., Any]
) -> None:
    """The array is square, so that shapes agree. A match must compute what it replaces."""
    x, b = X[0, :, :8], BIAS[:8]
    sch = create_schedule(fun, b, [x], mesh=1)
    regions = sch.find(pattern)
    assert all("" not in region.inputs for region in regions)
    if regions:
        sch.replace(pattern, regions)
    Verify(sch, [x], params=b).check()


def test_equations_of_a_linear_module_match_only_after_decompose() -> None:
    sch = mlp_schedule(mesh=1)
    assert sch.find(bias_gelu) == []
    sch["linear1"].decompose()
    (region,) = sch.find(bias_gelu)
    assert "linear1/add" in region.nodes
    assert "linear1/dot_general" in region.inputs


def test_trace_selects_the_modules_whose_equations_match() -> None:
    sch = scheduled(Transformer(), np.zeros((2, 8), int), mesh=1)
    count = len(sch.find(where=lambda node: node.eqn.primitive.name == "rsqrt"))
    assert count == 5
    sch.trace(leaf_modules=["block_0"])
    assert len(sch.find(r".*rsqrt")) == 3
    sch["block_1"].trace(flatten=False)
    assert sch["block_1"].find(".*rsqrt") == []
    assert sch["block_1"].find(".*add")
    assert "block_1/norm1(...)" in sch.mod


def test_functions_with_a_custom_derivative_match_as_a_whole() -> None:
    assert len(find_in(lambda b, x: jax.nn.relu(x - b), lambda x, b: jax.nn.relu(x - b))) == 1
    assert find_in(lambda b, x: jax.nn.relu6(x - b), lambda x, b: jax.nn.relu(x - b)) == []


def test_patterns_with_other_broadcast_dims_do_not_match() -> None:
    """The array is square. Subtracting the mean of rows differs from that of columns."""
    x = X[0, :, :8]
    rows = lambda _, x: x - jnp.mean(x, 1)[:, None]  # noqa: E731
    assert len(find_in(rows, lambda x: x - jnp.mean(x, 1)[:, None], x)) == 1
    assert find_in(rows, lambda x: x - jnp.mean(x, 1)[None, :], x) == []


def test_patterns_with_other_reshapes_or_directions_do_not_match() -> None:
    x = X[0, :, :8]
    halves, rows = (lambda x: jnp.sin(x.reshape(-1, 2)), lambda x: jnp.sin(x.reshape(2, -1)))
    assert len(find_in(lambda _, x: halves(x), halves, x, like=[x])) == 1
    assert find_in(lambda _, x: rows(x), halves, x, like=[x]) == []
    assert len(find_in(lambda _, x: jnp.flip(x, 0) + 1, lambda x: jnp.flip(x, 0) + 1, x)) == 1
    assert find_in(lambda _, x: jnp.flip(x, 1) + 1, lambda x: jnp.flip(x, 0) + 1, x) == []


def test_layer_norms_and_attention_are_found_and_replaced() -> None:
    tokens = np.arange(16).reshape(2, 8)
    model = Transformer(layers=1)
    sch = scheduled(model, tokens, mesh=2)
    norms = sch.find(layer_norm)
    assert [norm.inputs[1:] for norm in norms] == [
        (f"{path}/scale", f"{path}/bias") for path in ("block_0/norm1", "block_0/norm2", "norm")
    ]
    (core,) = sch.find(attention)
    calls = []

    def flash(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        calls.append(query.shape)
        return attention(query, key, value)

    with Verify(sch, [tokens], loss=lambda logits: jnp.sum(logits**2)):
        for name in ("q", "k", "v"):
            sch["block_0/attention"][name].shard("kernel", axis=1).shard("bias", axis=0)
        sch["block_0/attention/out"].shard("kernel", axis=0).sync("fwd_post", "all_reduce")
        sch["block_0/attention"].sync("bwd_post", "all_reduce")
        sch.replace(layer_norm, norms)
        sch.replace(flash, core)
    assert set(calls) == {(2, 8, 2, 4)}  # two of the four heads


def test_overlapping_matches_are_returned_once() -> None:
    regions = find_in(lambda b, x: ((x + b) + b) + b, lambda x, y, z: (x + y) + z)
    assert len(regions) == 1


def test_like_gives_the_shapes_of_a_patterns_arguments() -> None:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    w = jnp.ones((16, 4))
    sch = create_schedule(lambda w, x: jnp.tanh(x @ w), w, [X], mesh=1)
    with pytest.raises(DirectiveError, match="like="):
        sch.find(product)
    (region,) = sch.find(product, like=[X, w])
    assert region.inputs == ("arg0", "")
    assert sch.find(product, like=[X, jnp.ones((16, 8))]) == []


def test_a_module_is_replaced_by_a_function_of_its_parameters_and_inputs() -> None:
    sch = scheduled(Attention(4), X, mesh=2)
    with Verify(sch, [X]):
        for name in ("q", "k", "v"):
            sch[name].shard("kernel", axis=1).shard("bias", axis=0)
        sch["out"].shard("kernel", axis=0).sync("fwd_post", "all_reduce")
        sch["q"].replace(lambda params, x: x @ params["kernel"] + params["bias"])
    with pytest.raises(
        DirectiveError, match="no module of class 'Conv' inside; there are Attention, Dense"
    ):
        sch.replace_all("Conv", nn.Conv(3, (1,)))


def test_one_function_replaces_several_modules() -> None:
    """One product computes queries, keys and values, on shards and on one device."""

    def project(x: jax.Array, *params: jax.Array) -> tuple[jax.Array, ...]:
        kernels, biases = params[::2], params[1::2]
        projections = x @ jnp.concatenate(kernels, 1) + jnp.concatenate(biases)
        return tuple(jnp.split(projections, 3, -1))

    sch = scheduled(Attention(4), X, mesh=2)
    with Verify(sch, [X]):
        sch["[qkv]"].shard("kernel", axis=1).shard("bias", axis=0)
        sch["out"].shard("kernel", axis=0).sync("fwd_post", "all_reduce")
        sch.replace(project, sch["[qkv]"].subgraph())
    products = str(jax.make_jaxpr(build(sch).apply)(sch.params, X)).count("dot_general[")
    assert products == 4  # the model has 6


def test_every_module_of_a_class_is_replaced() -> None:
    sch = scheduled(nn.Sequential([nn.LayerNorm(), nn.Dense(16), nn.LayerNorm()]), X, mesh=1)
    sch.replace_all("LayerNorm", lambda _: lambda params, x: layer_norm(x, **params))
    Verify(sch, [X]).check()
    assert sch.find(".*rsqrt") == []


class Scaled(nn.Module):
    """A layer whose result is doubled, or two of them, one inside the other."""

    inner: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = Scaled(inner=False, name="within")(x) if self.inner else x
        return 2 * nn.Dense(x.shape[-1], name="layer")(x)


@pytest.mark.parametrize("type", [Scaled, "Scaled"])
def test_a_class_is_replaced_by_one_function_per_outermost_module(type: Any) -> None:
    sch = scheduled(nn.Sequential([Scaled(), nn.Dense(16), Scaled(inner=False)]), X, mesh=1)
    modules = []

    def make_replacement(handle: Any) -> Any:
        modules.append((handle.paths, sorted(handle["layer"].shapes)))
        outer = "within" in {path.rpartition("/")[2] for path in handle.named_schedules()}

        def twice(params: Any, x: jax.Array) -> jax.Array:
            x = twice(params["within"], x) if "within" in params else x
            return 2 * (x @ params["layer"]["kernel"] + params["layer"]["bias"])

        assert outer == (handle.paths == ("layers_0",))
        return twice

    sch.replace_all(type, make_replacement)
    assert modules == [(("layers_0",), ["bias", "kernel"]), (("layers_2",), ["bias", "kernel"])]
    Verify(sch, [X]).check()


def test_one_module_replaces_every_module_of_a_class() -> None:
    sch = scheduled(nn.Sequential([nn.LayerNorm(), nn.Dense(16), nn.LayerNorm()]), X, mesh=1)
    sch.replace_all(nn.LayerNorm, nn.LayerNorm(use_fast_variance=False))
    Verify(sch, [X]).check()
    assert "replace" in sch["layers_0"].mod
    with pytest.raises(
        DirectiveError,
        match="no module of class Conv inside; there are Dense, LayerNorm, Sequential",
    ):
        sch.replace_all(nn.Conv, nn.Conv(3, (1,)))
    with pytest.raises(
        DirectiveError,
        match=r"given the handle of each module.*; one function for all is `lambda _: f",
    ):
        sch.replace_all("Dense", lambda params, x: x @ params["kernel"])
    with pytest.raises(
        DirectiveError,
        match=r"returns None for Handle\(layers_1\), expected a module or a function",
    ):
        sch.replace_all("Dense", lambda _: None)  # type: ignore[arg-type, return-value]


def test_a_regular_expression_matches_modules_too() -> None:
    """A module matches as a whole unless equations inside it match."""
    sch = scheduled(Transformer(layers=2), np.zeros((2, 8), int), mesh=1)
    (attention,) = sch.find("block_0/attention")
    assert attention == sch["block_0/attention"].subgraph()
    assert [region.nodes[0].rpartition("/")[0] for region in sch.find("block_./(up|down)")] == [
        *("block_0/up", "block_0/down", "block_1/up", "block_1/down")
    ]
    assert {"block_0/up/dot_general", "block_0/up/add"} <= {
        name for region in sch.find("block_0/up") for name in region.nodes
    }
    sch["block_0/up"].decompose()
    assert [len(region.nodes) for region in sch.find("block_0/up/add|block_0/up")] == [1]
    sch.trace(leaf_modules=["block_1"])
    assert sch.find("block_1/up") == []
    sch["block_0"].trace(flatten=False)
    assert len(sch.find("block_0/attention")) == 1
    assert sch.find("block_0/attention/q") == []
    sch.fuse(sch.find("block_0/attention"))
    assert sch.find("block_0/attention") == []


def test_where_limits_the_matches() -> None:
    sch = scheduled(Transformer(layers=2), np.zeros((2, 8), int), mesh=1)
    assert len(sch.find(layer_norm)) == 5
    assert len(sch.find(layer_norm, where=lambda node: node.within("block_1"))) == 2
    assert len(sch.find("block_./up", where=lambda node: node.within("block_1"))) == 1
    with pytest.raises(DirectiveError, match="like= is for a function that is to be found"):
        sch.find(".*add", like=[X])
    with pytest.raises(DirectiveError, match="no regular expression"):
        sch.find("(")


def test_a_search_may_have_no_match_but_fusing_or_replacing_nothing_is_refused() -> None:
    sch = mlp_schedule(mesh=1)
    regions = sch.find("tanh")
    assert regions == []
    with pytest.raises(
        DirectiveError, match="fuse: no subgraph was given, perhaps because find had no match"
    ):
        sch.fuse(regions)
    with pytest.raises(
        DirectiveError, match="replace: no subgraph was given, perhaps because find had no match"
    ):
        sch.replace(jnp.tanh, regions)
    assert sch.schedule.directives == ()


def test_a_fused_region_is_a_separate_function_of_the_program() -> None:
    sch = mlp_schedule(mesh=2)
    tensor_parallel(sch)
    sch["linear1"].decompose()
    sch.fuse(sch.find(bias_gelu), name="BiasGeLU")
    built = build(sch)
    params = jax.tree.map(lambda spec: jnp.zeros(spec.shape), sch.params)
    text = jax.jit(built.apply).lower(params, jnp.zeros((2, 8, 32))).as_text()
    assert "@BiasGeLU_0" in text
    assert_allclose(built.apply(params, jnp.ones((2, 8, 32))), jnp.zeros((2, 8, 32)))
    with pytest.raises(DirectiveError, match="fused or replaced already"):
        sch.fuse(
            sch["linear1"].find("linear1/add")
            or [sch.subgraph_of([sch.graph.by_name["linear1/add"]])]
        )
