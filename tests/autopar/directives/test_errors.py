"""Errors of schedules say how to fix them, and wrong results name the directive at fault."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from autopar.directives import (
    DirectiveError,
    DirectiveSchedule,
    VerificationError,
    Verify,
    build,
    create_schedule,
)
from tests.autopar.directives.scheduled_models import mlp_schedule, scheduled, tensor_parallel
from tests.models import Transformer, TutorialMLP

X = jax.random.normal(jax.random.key(0), (2, 8, 32))


def test_the_error_of_a_missing_sync_names_the_directive_to_add() -> None:
    sch = mlp_schedule()
    sch["linear1"].shard("kernel", axis=1).shard("bias", axis=0)
    sch["linear2"].shard("kernel", axis=0)
    with pytest.raises(
        DirectiveError,
        match=r"linear2/dot_general is a partial sum over 'x' and goes into linear2/add",
    ):
        build(sch)
    with pytest.raises(
        DirectiveError, match=r"sch\['linear2'\].sync\('fwd_post', 'all_reduce', mesh_axis='x'\)"
    ):
        build(sch)


def test_the_error_of_a_split_value_that_must_be_whole_names_the_directive_to_add() -> None:
    sch = mlp_schedule()
    sch["linear1"].shard("kernel", axis=1).shard("bias", axis=0)
    sch["linear2"].shard("kernel", axis=1)
    with pytest.raises(
        DirectiveError,
        match=r"which is split as .*\n.*sch\['linear2'\].sync\('fwd_pre', 'all_gather'\)",
    ):
        build(sch)


def test_sharding_a_parameter_twice_is_refused() -> None:
    sch = mlp_schedule()
    sch["linear1"].shard("kernel", axis=1)
    with pytest.raises(DirectiveError, match="linear1/kernel is sharded twice"):
        sch["linear1"].shard("kernel", axis=0)


def test_a_dim_is_split_over_one_mesh_axis_and_two_dims_over_two_axes() -> None:
    sch = mlp_schedule(mesh=(2, 2))
    sch["linear1"].shard("kernel", axis=1, mesh_axis="y")
    with pytest.raises(
        DirectiveError,
        match=r"linear1/kernel is sharded twice: .*mesh_axis=y\) and .*mesh_axis=x\)",
    ):
        sch["linear1"].shard("kernel", axis=1, mesh_axis="x")
    sch["linear1"].shard("kernel", axis=0, mesh_axis="x").shard("bias", axis=0, mesh_axis="y")
    sch["linear1"].sync("fwd_post", "all_reduce", mesh_axis="x")
    sch["linear2"].shard("kernel", axis=0, mesh_axis="y").sync(
        "fwd_post", "all_reduce", mesh_axis="y"
    )
    Verify(sch, [X]).check()


@pytest.mark.parametrize(
    ("module", "op", "layout"),
    [
        (
            "linear1",
            "all_reduce",
            "linear1/add passes, but it is split as .*, not a partial sum over 'x'",
        ),
        ("linear2", "all_gather", "linear2/add passes, but it is whole, not split over 'x'"),
    ],
)
def test_the_error_of_a_sync_without_effect_has_the_layout_of_its_value(
    module: str, op: str, layout: str
) -> None:
    sch = mlp_schedule()
    sch["linear1"].shard("kernel", axis=1).shard("bias", axis=0)
    sch["linear2"].shard("kernel", axis=0)
    if module == "linear2":
        sch["linear2"].sync("fwd_post", "all_reduce")
        sch.sync("fwd_post", op)
    else:
        sch["linear1"].sync("fwd_post", op)
        sch["linear2"].sync("fwd_post", "all_reduce")
    with pytest.raises(DirectiveError, match=f"has nothing to do: {layout}"):
        build(sch)


def test_an_all_reduce_of_gradients_that_are_no_partial_sums_is_refused() -> None:
    sch = mlp_schedule()
    tensor_parallel(sch)
    sch["linear2"].sync("bwd_post", "all_reduce")
    with pytest.raises(DirectiveError, match="its gradients are no partial sums"):
        build(sch)


def test_an_axis_that_does_not_divide_is_refused() -> None:
    sch = mlp_schedule(mesh=4, hidden=30)
    with pytest.raises(
        DirectiveError,
        match=r"linear1/kernel has shape \(30, 30\): axis 1 can't be split .* 4 devices",
    ):
        sch["linear1"].shard("kernel", axis=1)


def test_errors_of_unknown_names_list_the_known_ones() -> None:
    sch = mlp_schedule()
    with pytest.raises(DirectiveError, match="no module 'linaer1' in the model; near it: linear1"):
        sch["linaer1"]
    with pytest.raises(
        DirectiveError, match="no parameter 'weight' in linear1, which has bias, kernel"
    ):
        sch["linear1"].shard("weight", axis=0)
    with pytest.raises(DirectiveError, match="'tp' is no axis of the mesh, which has 'x'"):
        sch["linear1"].shard("kernel", axis=0, mesh_axis="tp")
    with pytest.raises(DirectiveError, match="it has no axis 2"):
        sch["linear1"].shard("kernel", axis=2)
    with pytest.raises(DirectiveError, match="expected one of all_reduce"):
        sch["linear1"].sync("fwd_post", "psum")
    with pytest.raises(DirectiveError, match="compiler 'TorchScript', expected 'xla'"):
        sch.fuse(sch.find("mul"), compiler="TorchScript")
    with pytest.raises(DirectiveError, match=r"none of jax\.checkpoint_policies"):
        sch["linear1"].checkpoint("everything")


def test_contradicting_syncs_are_refused() -> None:
    sch = mlp_schedule()
    sch["linear2"].sync("fwd_post", "all_reduce")
    with pytest.raises(DirectiveError, match=r"linear2 has sync.*already"):
        sch["linear2"].sync("fwd_post", "reduce_scatter", axis=1)


def test_a_mean_in_place_of_a_sum_is_found_by_verify() -> None:
    sch = mlp_schedule()
    sch["linear1"].shard("kernel", axis=1).shard("bias", axis=0)
    sch["linear2"].shard("kernel", axis=0).sync("fwd_post", lambda x: jax.lax.pmean(x, "x"))
    with pytest.raises(
        VerificationError, match=r"differs by .* at fault is sync\(mode=fwd_post, .*\) of linear2"
    ):
        Verify(sch, [X]).check()


def test_a_function_that_computes_something_else_is_found_by_verify() -> None:
    sch = mlp_schedule()
    tensor_parallel(sch)
    sch["linear2"].decompose()
    sch["linear2"].replace(lambda x, b: x - b, sch["linear2"].find("linear2/add"))
    with (
        pytest.raises(VerificationError, match=r"at fault is replace\(.*\) of linear2"),
        Verify(sch, [X]),
    ):
        pass


def test_the_error_of_a_replacement_with_a_pending_sync_names_what_to_replace_instead() -> None:
    def on_shards(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x @ params["kernel"], "x") + params["bias"]

    sch = mlp_schedule()
    tensor_parallel(sch)
    sch["linear2"].replace(on_shards)
    with pytest.raises(
        DirectiveError,
        match=r"a sync is due inside of what is replaced, so that the function must be one of",
    ):
        build(sch)
    with pytest.raises(
        DirectiveError, match=r"unbound axis name: x(.|\n)*find\('linear2/dot_general'\)"
    ):
        build(sch)
    sch = mlp_schedule()  # the replacement that the error proposes works
    tensor_parallel(sch)
    sch["linear2"].decompose()
    sch["linear2"].replace(jnp.dot, sch["linear2"].find("linear2/dot_general"))
    Verify(sch, [X]).check()


def test_a_schedule_of_another_model_is_refused() -> None:
    sch = mlp_schedule()
    tensor_parallel(sch)
    with pytest.raises(DirectiveError, match="no module 'linear1'"):
        create_schedule(
            Transformer(),
            jax.eval_shape(Transformer().init, jax.random.key(0), np.zeros((2, 8), int)),
            [np.zeros((2, 8), int)],
            schedule=sch.schedule,
        )


class Gated(nn.Module):
    """Two models with the same modules and the same equation names."""

    product_first: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(16, name="layer")(x)
        gate, scale = jnp.tanh(x), self.param("scale", nn.initializers.ones, (16,))
        return (x * scale) * gate if self.product_first else (x * gate) * scale


@pytest.mark.parametrize("rows", [1, 4])
def test_a_fused_region_is_recognized_at_other_batch_sizes(rows: int) -> None:
    """With a batch of one, reshapes change nothing and broadcasts are not needed."""

    def model(params: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x.reshape(-1, 16) * params["scale"]) @ params["kernel"]

    params = {"scale": jnp.ones(16), "kernel": jnp.ones((16, 16))}
    sch = create_schedule(model, params, [jnp.ones((rows, 2, 16))], 2)
    sch.fuse(sch.find("tanh") + sch.find("mul"))
    for batch_size in (1, 2, 4):
        Verify(sch, [jnp.ones((batch_size, 2, 16))], params).check()


@pytest.mark.parametrize("directive", ["fuse", "replace"])
def test_equations_with_the_same_name_and_other_operands_are_refused(directive: str) -> None:
    def make_schedule(product_first: bool, rows: int, **options: Any) -> Any:
        x = jnp.zeros((rows, 16))
        params = jax.eval_shape(Gated(product_first).init, jax.random.key(0), x)
        return create_schedule(Gated(product_first), params, [x], 2, **options)

    sch = make_schedule(True, 4)
    (product,) = sch.find("mul")
    if directive == "fuse":
        sch.fuse(product)
    else:
        sch.replace(lambda x, scale: x * scale, product)
    schedule = DirectiveSchedule.from_json(sch.schedule.to_json())
    for rows in (4, 1):  # a batch of one needs no broadcast
        Verify(
            make_schedule(True, rows, schedule=schedule, functions=sch.functions),
            [jnp.ones((rows, 16))],
        ).check()
    with pytest.raises(
        DirectiveError,
        match="mul reads layer/add and tanh in this model, and layer/add and scale in the",
    ):
        make_schedule(False, 4, schedule=schedule, functions=sch.functions)


def test_schedules_of_models_are_values_that_survive_json() -> None:
    def make_schedule() -> DirectiveSchedule:
        sch = mlp_schedule()
        tensor_parallel(sch)
        sch["linear1"].decompose()
        sch.trace(leaf_modules=["linear2"])
        sch.fuse(sch.find(lambda x, b: jax.nn.gelu(x + b, approximate=False)), name="BiasGeLU")
        sch["linear2"].checkpoint("dots_saveable").annotate(
            "bias", replicated=True
        ).cut_pipeline_stage()
        return sch.schedule

    schedule = make_schedule()
    assert DirectiveSchedule.from_json(schedule.to_json()) == schedule == make_schedule()
    assert hash(schedule) == hash(make_schedule())
    assert "linear1: shard(param=kernel, axis=1, mesh_axis=x)" in str(schedule)
    replayed = create_schedule(
        TutorialMLP(64),
        jax.eval_shape(TutorialMLP(64).init, jax.random.key(0), jnp.zeros((1, 64))),
        [jnp.zeros((1, 64))],
        mesh=4,
        schedule=schedule,
    )
    assert replayed.schedule == schedule
    with pytest.raises(DirectiveError, match="'do' is 'shrad', expected one of shard"):
        DirectiveSchedule.from_json('[{"do": "shrad", "path": ""}]')
    with pytest.raises(DirectiveError, match="shard takes path, param, axis, mesh_axis"):
        DirectiveSchedule.from_json('[{"do": "shard", "path": ""}]')


def test_a_replayed_replacement_needs_its_function() -> None:
    sch = mlp_schedule(mesh=1)

    def double(params: dict, x: jax.Array) -> jax.Array:
        return x @ params["kernel"] + params["bias"]

    sch["linear1"].replace(double)
    params = jax.eval_shape(TutorialMLP(32).init, jax.random.key(0), X)
    with pytest.raises(DirectiveError, match="is not known here"):
        create_schedule(TutorialMLP(32), params, [X], mesh=1, schedule=sch.schedule)
    replayed = create_schedule(
        TutorialMLP(32), params, [X], mesh=1, schedule=sch.schedule, functions=sch.functions
    )
    Verify(replayed, [X]).check()


def test_regions_must_nest_and_be_runnable_as_one() -> None:
    sch = scheduled(Transformer(layers=1), np.zeros((2, 8), int), mesh=1)
    sch.fuse(
        sch.subgraph_of([sch.graph.by_name[f"block_0/{norm}/rsqrt"] for norm in ("norm1", "norm2")])
    )
    with pytest.raises(DirectiveError, match="can't run as one"):
        build(sch)
    sch = scheduled(Transformer(layers=1), np.zeros((2, 8), int), mesh=1)
    sch.fuse(
        sch.subgraph_of(
            [sch.graph.by_name[name] for name in ("block_0/norm1/rsqrt", "block_0/norm2/add")]
        )
    )
    sch["block_0/norm1"].checkpoint()
    with pytest.raises(DirectiveError, match="both claim block_0/norm1/rsqrt"):
        build(sch)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{nope", "which is a JSON list of directives: is not JSON: Expecting property name"),
        ('{"do": "shard"}', "a schedule is a JSON list of directives, not dict"),
        ("[3]", "3 is no directive: 'do' is None, expected one of shard"),
        ('[{"do": ["shard"], "path": ""}]', r"'do' is \['shard'\], expected one of shard"),
        (
            '[{"do": "shard", "path": "", "param": "w", "axis": "1", "mesh_axis": "x"}]',
            "axis of shard is '1' in .* integer",
        ),
        (
            '[{"do": "shard", "path": "", "param": "w", "axis": true, "mesh_axis": "x"}]',
            "axis of shard is True in",
        ),
        (
            '[{"do": "decompose", "path": 5}]',
            "path of decompose is 5 in .*: Input should be a valid string",
        ),
        ('[{"do": "decompose", "path": "", "to": 5}]', "decompose takes path"),
        ('[{"do": "decompose"}]', "decompose takes path"),
        (
            '[{"do": "fuse", "path": "", "nodes": "mul", "compiler": "xla", "name": "f"}]',
            "nodes of fuse is 'mul' in .* tuple",
        ),
        (
            '[{"do": "sync", "path": "", "mode": "fwd", "op": "all_reduce", "axis": null, '
            '"mesh_axis": "x"}]',
            "mode of sync is 'fwd'",
        ),
    ],
)
def test_invalid_json_of_a_schedule_is_refused_with_the_field(text: str, message: str) -> None:
    with pytest.raises(DirectiveError, match=message):
        DirectiveSchedule.from_json(text)


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        (1.0, "axis is 1.0, expected a whole number"),
        (None, "axis is None, expected a whole number"),
        (-3, "axis is -3, expected a whole number of at least -2"),
        (2, "it has no axis 2 to shard"),
    ],
)
def test_the_axis_of_a_shard_is_a_dim_of_the_parameter(axis: Any, message: str) -> None:
    with pytest.raises(DirectiveError, match=message):
        mlp_schedule()["linear1"].shard("kernel", axis=axis)


def test_options_of_a_sync_are_checked() -> None:
    handle = mlp_schedule()["linear1"]
    with pytest.raises(DirectiveError, match="sync backward 'scater', expected 'reduce_scatter'"):
        handle.sync("fwd_post", "all_gather", backward="scater")  # pyright: ignore
    with pytest.raises(DirectiveError, match="sync axis '0', expected the number of an array dim"):
        handle.sync("fwd_post", "all_gather", axis="0")  # pyright: ignore
    with pytest.raises(DirectiveError, match="None can't be called, expected a function"):
        handle.sync("fwd_post", None)  # pyright: ignore


@pytest.mark.parametrize("backend", ["manual", "auto"])
@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (lambda params, x: x[:1], r"returns float32\[1, 8, 32\] for linear1/add, which is float32"),
        (
            lambda params, x: (x @ params["kernel"]).astype(jnp.bfloat16),
            r"returns bfloat16\[2, 8, .*\] for linear1/add, which is float32\[2, 8, ",
        ),
        (lambda params, x: params["weight"], "fails for .*'weight'"),
    ],
)
def test_a_function_that_returns_other_arrays_is_no_replacement(
    backend: Any, replacement: Any, message: str
) -> None:
    sch = mlp_schedule()
    sch["linear1"].shard("kernel", axis=1).shard("bias", axis=0).replace(replacement)
    sch["linear2"].shard("kernel", axis=0).sync("fwd_post", "all_reduce")
    params = jax.tree.map(lambda aval: jnp.ones(aval.shape, aval.dtype), sch.params)
    with pytest.raises(DirectiveError, match=message):
        build(sch, backend).apply(params, X)


def test_a_sync_function_that_does_not_gather_is_refused() -> None:
    sch = mlp_schedule()
    sch["linear1"].shard("kernel", axis=1).shard("bias", axis=0)
    sch["linear1"].sync("fwd_post", lambda value: jax.lax.psum(value, "x"))
    params = jax.tree.map(lambda aval: jnp.ones(aval.shape, aval.dtype), sch.params)
    with pytest.raises(DirectiveError, match=r"the whole value over 'x' is float32\[2, 8, 32\]"):
        build(sch).apply(params, X)


def test_a_constant_is_no_pattern() -> None:
    with pytest.raises(DirectiveError, match="a pattern returns one array that it has computed"):
        mlp_schedule().find(lambda x: 3)


def test_arguments_of_a_model_are_a_sequence() -> None:
    params = jax.eval_shape(TutorialMLP(32).init, jax.random.key(0), X)
    with pytest.raises(DirectiveError, match="expected a list or a tuple of the model's arguments"):
        create_schedule(TutorialMLP(32), params, X)  # pyright: ignore
