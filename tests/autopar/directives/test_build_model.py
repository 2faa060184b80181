"""Built schedules compute what the model does, with their collectives, on every backend."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import autopar
from autopar.directives import (
    BuiltModel,
    DirectiveError,
    DirectiveSchedule,
    ModelSchedule,
    Verify,
    build,
    create_schedule,
)
from autopar.lowering.target import target_mesh
from autopar.pipeline.partition import Task
from autopar.testing import assert_allclose
from autopar.tracing.trace import trace
from simulator.hardware.cluster import Cluster
from tests.autopar.directives.scheduled_models import (
    collectives,
    megatron,
    mlp_schedule,
    scheduled,
    sgd_step,
    tensor_parallel,
)
from tests.models import Dropping, Transformer, TutorialMLP
from tests.tiers import fast, tiers

TOKENS = np.arange(32).reshape(4, 8) * 7 % 32


def abstract(sch: ModelSchedule, built: BuiltModel) -> Any:
    """Return the shapes and shardings of the parameters."""
    return jax.tree.map(
        lambda p, sharding: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding),
        sch.params,
        built.shardings,
    )


@pytest.mark.parametrize("ways", fast([1, 2, 4, 8], [1, 4]))
def test_the_tutorials_schedule_verifies_if_it_decomposes_before_it_shards(
    ways: int,
) -> None:
    """The tutorial, `experiments/tutorials/slapo_mlp.py`, shards before it decomposes."""
    sch = mlp_schedule(mesh=ways)
    x = jax.random.normal(jax.random.key(1), (2, 8, 32))
    with Verify(sch, [x]):
        sch["linear1"].decompose()
        tensor_parallel(sch)
        sch.trace(flatten=True)
        regions = sch.find(lambda x, bias: jax.nn.gelu(bias + x, approximate=False))
        assert len(regions) == 1
        sch.fuse(regions, name="BiasGeLU")


@pytest.mark.parametrize("backend", ["manual", "gspmd"])
def test_column_and_row_layers_need_one_all_reduce_per_direction(
    backend: Any,
) -> None:
    sch = mlp_schedule()
    tensor_parallel(sch)
    built = build(sch, backend)
    x = jnp.ones((2, 8, 32))
    params = built.init(TutorialMLP(32).init, jax.random.key(0), x)
    assert params["params"]["linear1"]["kernel"].sharding.spec == P(None, "x")
    assert collectives(jax.jit(built.apply).lower(params, x).compile()) == {"all-reduce": 1}
    loss = jax.jit(jax.grad(lambda p, x: jnp.sum(built.apply(p, x) ** 2), (0, 1)))
    assert collectives(loss.lower(params, x).compile()) == {"all-reduce": 2}


@pytest.mark.parametrize("backend", ["manual", "gspmd", "auto"])
def test_every_backend_trains_with_one_all_reduce(backend: Any) -> None:
    """Without a gradient of the input, only the forward pass needs an all_reduce.

    The layers are large, because "auto" gathers small weights instead of summing activations.
    """
    sch = mlp_schedule(hidden=1024)
    tensor_parallel(sch)
    built = build(sch, backend)

    def step(params: Any, x: Any) -> Any:
        return jax.grad(lambda p: jnp.sum(built.apply(p, x) ** 2))(params)

    step = autopar.parallelize(step, method=built.method, batch_argnums=())
    executable = step.get_executable(sch.params, jax.ShapeDtypeStruct((2, 8, 1024), jnp.float32))
    assert collectives(executable.tasks[Task(0, "S")].compiled) == {"all-reduce": 1}


@pytest.mark.parametrize("backend", ["manual", "gspmd", "auto"])
def test_every_backend_trains_as_one_device_does(backend: Any) -> None:
    model, x = TutorialMLP(32), jax.random.normal(jax.random.key(1), (8, 32))
    params = model.init(jax.random.key(0), x)
    sch = scheduled(model, x)
    tensor_parallel(sch)
    built = build(sch, backend)

    def step(params: Any, x: Any, apply: Any = built.apply) -> Any:
        grads = jax.grad(lambda p: jnp.mean(apply(p, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), grads

    parallel = autopar.parallelize(step, method=built.method)
    updated, gradients = parallel(params, x)
    assert_allclose((updated, gradients), step(params, x, model.apply), atol=1e-6)
    assert updated["params"]["linear1"]["kernel"].sharding.spec == P(None, "x")
    specs = {
        value.path: value.spec for value in parallel.get_executable(params, x).plan.stages[0].inputs
    }
    assert specs["0/params/linear2/kernel"] == (("x",), ())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["manual", "gspmd"])
def test_a_scheduled_transformer_needs_two_all_reduces_per_block_and_direction(
    backend: Any,
) -> None:
    sch = scheduled(Transformer(layers=1), TOKENS)
    megatron(sch)
    Verify(sch, [TOKENS], backend=backend).check()
    if backend == "manual":
        built = build(sch)
        loss = jax.jit(jax.grad(lambda p: jnp.mean(built.apply(p, TOKENS) ** 2)))
        assert collectives(loss.lower(abstract(sch, built)).compile()) == {"all-reduce": 4}


def test_the_planner_shards_values_that_a_schedule_leaves_open() -> None:
    """The schedule pins one parameter without syncs, and the rest is planned around it."""
    model, x = TutorialMLP(32), jax.random.normal(jax.random.key(1), (8, 32))
    params = model.init(jax.random.key(0), x)
    sch = scheduled(model, x)
    sch["linear1"].shard("kernel", axis=0)
    built = build(sch, "auto")
    step = autopar.parallelize(lambda params, x: built.apply(params, x), method=built.method)
    assert_allclose(step(params, x), model.apply(params, x), atol=1e-5)
    specs = {
        value.path: value.spec for value in step.get_executable(params, x).plan.stages[0].inputs
    }
    assert specs["0/params/linear1/kernel"] == (("x",), ())


def test_verify_checks_the_planned_step_of_the_auto_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Verify plans, compiles and runs the loss and its gradients with the schedule's pins."""
    x = jax.random.normal(jax.random.key(1), (8, 32))
    sch = scheduled(TutorialMLP(32), x)
    sch["linear1"].shard("kernel", axis=1)
    sch["linear2"].shard("kernel", axis=1)
    steps = []

    def record_step(*args: Any, **options: Any) -> Any:
        step = autopar.parallelize(*args, **options)
        steps.append(step)
        return step

    monkeypatch.setattr("autopar.directives.verify.parallelize", record_step)
    Verify(sch, [x], backend="auto").check()
    executable = steps[0].get_last_executable()
    specs = {value.path.partition("/")[2]: value.spec for value in executable.plan.stages[0].inputs}
    assert specs["0/params/linear1/kernel"] == specs["0/params/linear2/kernel"] == ((), ("x",))


@pytest.mark.parametrize(
    ("op", "axis", "spec"),
    [
        ("all_reduce", None, ((), ())),
        ("reduce_scatter", 0, (("x",), ())),
        ("reduce_scatter", 1, ((), ("x",))),
    ],
)
def test_the_planner_keeps_the_layouts_of_the_schedules_syncs(
    op: str, axis: int | None, spec: Any
) -> None:
    model, x = TutorialMLP(32), jax.random.normal(jax.random.key(1), (8, 32))
    params = model.init(jax.random.key(0), x)
    sch = scheduled(model, x)
    sch["linear1"].shard("kernel", axis=1).shard("bias", axis=0).sync("fwd_post", "all_gather")
    sch["linear2"].shard("kernel", axis=0).sync("fwd_post", op, axis=axis)
    built = build(sch, "auto")
    step = autopar.parallelize(lambda params, x: built.apply(params, x), method=built.method)
    assert_allclose(step(params, x), model.apply(params, x), atol=1e-5)
    (stage,) = step.get_executable(params, x).plan.stages
    sync_specs = [constraint.spec for constraint in stage.constraints if constraint.name == "name"]
    assert sync_specs == [((), ()), spec]


def test_two_axes_split_the_batch_and_the_layers() -> None:
    sch = scheduled(Transformer(layers=1), TOKENS, mesh=(2, 4))
    megatron(sch, "y")
    Verify(sch, [TOKENS], batch_axis="x").check()
    sch = scheduled(Transformer(layers=1), TOKENS[:3], mesh=(2, 4))
    with pytest.raises(
        DirectiveError,
        match=r"arg0 has shape \(3, 8\): its first dim can't be split evenly over the 2",
    ):
        build(sch, batch_axis="x")


def test_a_function_with_a_custom_derivative_runs_on_one_mesh_after_another() -> None:
    def model(params: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("up"):
            return jax.nn.relu(x @ params["up"]["w"])

    x = jax.random.normal(jax.random.key(0), (4, 8))
    for mesh in (4, (2, 4)):
        sch = create_schedule(model, {"up": {"w": jnp.ones((8, 16))}}, [x], mesh)
        sch["up"].shard("w", axis=1)
        Verify(sch, [x]).check()


def test_a_loss_that_cancels_is_compared_at_the_scale_of_its_terms() -> None:
    """The loss cancels to rounding errors, which differ on shards."""

    def model(params: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("up"):
            x = x @ params["up"]["w"]
        with jax.named_scope("down"):
            return x @ params["down"]["w"]

    draw = np.random.default_rng(0)
    x, up, down = (
        draw.standard_normal(shape).astype(np.float32) for shape in ((4, 8), (8, 16), (16, 32))
    )
    slope = (x @ up).T @ np.random.default_rng(1).standard_normal((4, 32))
    down -= (slope * np.sum(slope * down) / np.sum(slope**2)).astype(np.float32)
    sch = create_schedule(model, {"up": {"w": up}, "down": {"w": down}}, [x], 4)
    sch["up"].shard("w", axis=1)
    sch["down"].shard("w", axis=0).sync("fwd_post", "all_reduce")
    Verify(sch, [x], params={"up": {"w": up}, "down": {"w": down}}).check()


def test_a_model_runs_with_other_batch_sizes_than_the_examples() -> None:
    model = TutorialMLP(32)
    x = jax.random.normal(jax.random.key(1), (6, 32))
    params = model.init(jax.random.key(0), x)
    sch = scheduled(model, x[:2])
    tensor_parallel(sch)
    built = build(sch)
    assert_allclose(built.apply(params, x), model.apply(params, x), atol=1e-5)
    with pytest.raises(DirectiveError, match="is called with"):
        built.apply(params, x, x)


@pytest.mark.parametrize("remat", tiers([True, False]))
def test_checkpointed_modules_are_recomputed(remat: bool) -> None:
    """Remat by the schedule or by the model adds matrix products and keeps the gradients."""

    def products(sch: ModelSchedule) -> int:
        apply = build(sch).apply
        return str(
            jax.make_jaxpr(jax.grad(lambda p: jnp.mean(apply(p, TOKENS) ** 2)))(sch.params)
        ).count("dot_general[")

    sch, plain = (
        scheduled(Transformer(layers=1, remat=layers_remat), TOKENS)
        for layers_remat in (remat, False)
    )
    megatron(sch)
    megatron(plain)
    if not remat:
        sch["block_*"].checkpoint("nothing_saveable")
    Verify(sch, [TOKENS]).check()
    assert products(sch) > products(plain)


def named_layers(params: Any, x: jax.Array) -> jax.Array:
    with jax.named_scope("layers"):
        x = checkpoint_name(jnp.sin(x @ params["first"]), "first")
        return checkpoint_name(jnp.sin(x @ params["second"]), "second")


@pytest.mark.parametrize(
    ("policy", "recomputes"),
    [
        (None, True),
        ("everything_saveable", False),
        (("save_only_these_names", "first", "second"), True),
        (("save_any_names_but_these", "first"), True),
        (
            (
                "save_from_both_policies",
                "nothing_saveable",
                ("save_anything_except_these_names", "first"),
            ),
            False,
        ),
        (lambda *_, **__: True, False),
    ],
    ids=lambda value: "function" if callable(value) else str(value),
)
def test_checkpoint_policies_are_names_combinations_or_functions(
    policy: Any, recomputes: bool
) -> None:
    """A policy that saves everything recomputes nothing; the policy survives JSON."""
    params, x = {"first": jnp.ones((8, 8)), "second": jnp.ones((8, 8))}, jnp.ones((4, 8))
    sch = create_schedule(named_layers, params, [x], mesh=2)
    sch["layers"].checkpoint(policy)
    replayed = create_schedule(
        named_layers,
        params,
        [x],
        2,
        DirectiveSchedule.from_json(sch.schedule.to_json()),
        functions=sch.functions,
    )
    assert replayed.schedule == sch.schedule
    apply = build(replayed).apply
    text = str(jax.make_jaxpr(jax.grad(lambda p: jnp.sum(apply(p, x))))(params))
    # two products forward; backward one for each gradient but that of x
    assert (text.count("dot_general[") > 5) == recomputes
    Verify(replayed, [x], params=params).check()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            "save_only_these_names",
            r"is made from names: give it as a tuple with them, \('save_only_these_names', ...\)",
        ),
        (("save_only_these_names",), "is made from names"),
        (("save_only_these_names", ("a",)), "save_only_these_names takes names, as strings"),
        (
            ("save_from_both_policies", "dots_saveable"),
            "save_from_both_policies takes two policies",
        ),
        (
            ("offload_dot_with_no_batch_dims", "device"),
            "takes the memory kinds to offload from and to",
        ),
        (
            ("everything_saveable", "a"),
            "is none of jax.checkpoint_policies: expected everything_saveable",
        ),
        ("SaveOnlyTheseNames", "is none of jax.checkpoint_policies"),
        ("module:policy", "is a function that is not known here; give it by functions="),
    ],
)
def test_an_invalid_checkpoint_policy_is_refused_when_it_is_given(
    policy: Any, message: str
) -> None:
    with pytest.raises(DirectiveError, match=message):
        mlp_schedule()["linear1"].checkpoint(policy)


def test_sequence_parallel_regions_gather_and_reduce_scatter() -> None:
    """Norms and residuals run on parts of the sequence, as in Megatron-LM."""
    sch = scheduled(Transformer(layers=1), TOKENS)
    for column in ("q", "k", "v"):
        sch["block_0/attention"][column].shard("kernel", axis=1).shard("bias", axis=0)
    sch["block_0/up"].shard("kernel", axis=1).shard("bias", axis=0)
    sch["embed"].sync("fwd_post", "scatter", axis=1)
    for entry in ("attention", "up"):
        sch["block_0"][entry].sync("fwd_pre", "all_gather", axis=1)
    for row in ("attention/out", "down"):
        sch["block_0"][row].shard("kernel", axis=0).sync("fwd_post", "reduce_scatter", axis=1)
    sch["norm"].sync("fwd_post", "SR->RR")
    Verify(sch, [TOKENS]).check()
    built = build(sch)
    forward = collectives(jax.jit(built.apply).lower(abstract(sch, built), TOKENS).compile())
    assert forward["all-gather"] == 3
    assert forward["reduce-scatter"] == 2


def test_a_vocabulary_parallel_embedding_sums_the_lookups_of_all_devices() -> None:
    sch = scheduled(Transformer(layers=1), TOKENS)
    sch["embed"].shard("embedding", axis=0).sync("fwd_post", "all_reduce")
    sch["norm"].sync("bwd_post", "all_reduce")
    Verify(sch, [TOKENS]).check()


def three_scopes(params: Any, x: jax.Array) -> jax.Array:
    with jax.named_scope("first"):
        x = jnp.tanh(x @ params["first"])
    with jax.named_scope("second"):
        x = jnp.sin(x)
    with jax.named_scope("third"):
        return x @ params["third"]


@pytest.mark.parametrize(
    ("first", "third", "expected"),
    [
        ({"op": "all_gather"}, None, {"all-gather": 1}),
        ({"op": "RS->RR"}, None, {"all-gather": 1}),
        (
            {"op": "RS->SR"},
            {"op": "all_gather", "axis": 0, "backward": "scatter"},
            {"all-to-all": 1, "all-gather": 1},
        ),
        (
            {"op": lambda x: jax.lax.all_gather(x, "x", axis=1, tiled=True, to="invarying")},
            None,
            {"all-gather": 1},
        ),
        (None, {"op": "all_gather", "axis": 1, "backward": "scatter"}, {"all-gather": 1}),
        ({"op": "all_gather"}, {"op": "scatter", "axis": 0}, {"all-gather": 1}),
    ],
    ids=["all_gather", "reshard to whole", "all_to_all", "function", "before", "scatter"],
)
def test_every_change_of_layout_keeps_values_and_gradients(
    first: Any, third: Any, expected: dict[str, int]
) -> None:
    x = jax.random.normal(jax.random.key(0), (4, 8))
    sch = create_schedule(
        three_scopes, {"first": jnp.ones((8, 16)), "third": jnp.ones((16, 8))}, [x], mesh=4
    )
    sch.shard("first", axis=1)
    for path, mode, sync in (("first", "fwd_post", first), ("third", "fwd_pre", third)):
        if sync is not None:
            op, options = sync["op"], {key: value for key, value in sync.items() if key != "op"}
            sch[path].sync(mode, op, **options)
    Verify(sch, [x]).check()
    built = build(sch)
    assert collectives(jax.jit(built.apply).lower(abstract(sch, built), x).compile()) == expected


def test_functions_are_scheduled_by_their_named_scopes() -> None:
    def model(params: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("up"):
            x = jnp.tanh(x @ params["up"]["w"])
        with jax.named_scope("down"):
            return x @ params["down"]["w"]

    x = jax.random.normal(jax.random.key(0), (4, 8))
    params = {"up": {"w": jnp.ones((8, 16))}, "down": {"w": jnp.ones((16, 8))}}
    sch = create_schedule(model, params, [x], mesh=4)
    with Verify(sch, [x], params=params, rtol=1e-5):
        sch["up"].shard("w", axis=1)
        sch["down"].shard("w", axis=0).sync("fwd_post", "all_reduce")
    assert list(sch.named_schedules()) == ["", "up", "down"]
    assert {"shard", "sync", "fuse"} <= set(sch.list_primitives())


def test_dropout_on_shards_draws_as_one_device_does() -> None:
    def apply(params: Any, x: jax.Array, key: jax.Array) -> Any:
        return Dropping().apply(params, x, rngs={"dropout": key})

    x, key = jax.random.normal(jax.random.key(0), (4, 8)), jax.random.key(1)
    params = jax.eval_shape(Dropping().init, {"params": key, "dropout": key}, x)
    sch = create_schedule(apply, params, [x, key], mesh=4)
    with Verify(sch, [x, key]):
        sch["up"].shard("kernel", axis=1).shard("bias", axis=0)
        sch["down"].shard("kernel", axis=0).sync("fwd_post", "all_reduce")


def test_nnx_modules_take_the_same_directives() -> None:
    class Layers(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)])

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layers[1](nnx.gelu(self.layers[0](x)))

    model, x = Layers(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (4, 8))
    sch = create_schedule(model, nnx.state(model), [x], mesh=4)
    with Verify(sch, [x]):
        sch["layers.0"].shard("kernel", axis=1).shard("bias", axis=0).sync("bwd_post", "all_reduce")
        sch["layers.1"].shard("kernel", axis=0).sync("fwd_post", "all_reduce")
    assert "(1): Linear(bias=float32[8], kernel=float32[16, 8])" in sch.mod
    built = build(sch)
    state = built.init(lambda: nnx.state(Layers(nnx.Rngs(0))))
    assert state["layers"][0]["kernel"][...].sharding.spec == P(None, "x")
    assert_allclose(built.apply(state, x), model(x), atol=1e-5)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_schedule_cuts_a_pipeline_and_shards_its_stages(
    sharded: bool,
) -> None:
    model = TutorialMLP(32)
    x = jax.random.normal(jax.random.key(1), (8, 32))
    params = model.init(jax.random.key(0), x)
    sch = scheduled(model, x)
    sch["linear1"].cut_pipeline_stage()
    if sharded:
        sch["linear2"].shard("kernel", axis=0).sync("fwd_post", "all_reduce")
    built = build(sch, "auto")
    parallel = autopar.parallelize(sgd_step(built.apply), method=built.method)
    assert_allclose(parallel(params, x), sgd_step(model.apply)(params, x), atol=1e-5)
    first, second = parallel.get_executable(params, x).plan.stages
    if sharded:
        assert {v.spec for v in second.inputs if v.path.endswith("linear2/kernel")} == {
            (("x",), ())
        }
    assert not any("linear2" in value.path for value in first.inputs)


def test_each_stage_of_a_pipeline_has_a_mesh_of_the_schedules_shape() -> None:
    model, x = TutorialMLP(32), jax.random.normal(jax.random.key(1), (8, 32))
    params = model.init(jax.random.key(0), x)
    sch = scheduled(model, x, mesh=(2, 2))
    sch["linear1"].cut_pipeline_stage()
    sch["linear2"].shard("kernel", axis=0, mesh_axis="y").sync(
        "fwd_post", "all_reduce", mesh_axis="y"
    )
    built = build(sch, "auto", "x", num_micro_batches=2, devices=8)
    parallel = autopar.parallelize(sgd_step(built.apply), method=built.method)
    assert_allclose(parallel(params, x), sgd_step(model.apply)(params, x), atol=1e-5)
    plan = parallel.get_executable(params, x).plan
    assert plan.num_micro_batches == 2
    assert [(stage.devices, stage.mesh_shape) for stage in plan.stages] == [
        ((0, 1, 2, 3), (2, 2)),
        ((4, 5, 6, 7), (2, 2)),
    ]


@pytest.mark.parametrize(
    ("mesh", "count", "masked"),
    tiers([((2, 2), 2, True), ((1, 4), 8, False), ((2, 2), 2, False), ((1, 4), 8, True)]),
)
def test_a_step_on_shards_accumulates_gradients_over_microbatches(
    mesh: tuple[int, int], count: int, masked: bool
) -> None:
    """Microbatches have several examples over two axes, or one each over one axis."""
    model, x = TutorialMLP(32), jax.random.normal(jax.random.key(1), (8, 4, 32))
    params = model.init(jax.random.key(0), x)
    sch = scheduled(model, x, mesh=mesh)
    tensor_parallel(sch)
    sch["linear1"].checkpoint()
    built = build(sch, batch_axis="x", num_micro_batches=count)

    def step(params: Any, x: Any, apply: Any = built.apply) -> Any:
        def loss(params: Any) -> jax.Array:
            errors, mask = apply(params, x) ** 2, x > 0
            return jnp.sum(errors * mask) / jnp.sum(mask) if masked else jnp.mean(errors)

        return autopar.value_and_grad(loss)(params)

    parallel = autopar.parallelize(step, method=built.method)
    assert_allclose(
        parallel(params, x),
        jax.jit(partial(step, apply=model.apply))(params, x),
        rtol=1e-4,
        atol=1e-6,
    )
    assert parallel.get_executable(params, x).plan.num_micro_batches == count
    assert "shard_map" in str(jax.make_jaxpr(step)(params, x))


def test_devices_are_refused_without_a_pipeline() -> None:
    with pytest.raises(DirectiveError, match="the schedule has no cut_pipeline_stage; give a mesh"):
        build(mlp_schedule(), "auto", devices=8)


def test_named_mesh_axes_are_refused_in_a_pipeline() -> None:
    sch = mlp_schedule(jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,)))
    sch["linear1"].shard("kernel", axis=1).sync("fwd_post", "all_gather").cut_pipeline_stage()
    with pytest.raises(
        DirectiveError,
        match=r"axis tp: each stage has a mesh of its own, whose axes are called x, y",
    ):
        build(sch, "auto")


def test_pipelines_and_sync_functions_are_refused_on_other_backends() -> None:
    sch = mlp_schedule()
    sch["linear1"].cut_pipeline_stage()
    with pytest.raises(DirectiveError, match="backend='auto'"):
        build(sch)
    sch = mlp_schedule()
    tensor_parallel_with_function(sch)
    with pytest.raises(DirectiveError, match="backend='manual'"):
        build(sch, "gspmd")
    Verify(sch, [jnp.ones((2, 8, 32))]).check()


def tensor_parallel_with_function(sch: Any) -> None:
    sch["linear1"].shard("kernel", axis=1).shard("bias", axis=0)
    sch["linear2"].shard("kernel", axis=0).sync("fwd_post", lambda x: jax.lax.psum(x, "x"))


def test_a_schedule_on_an_abstract_mesh_is_planned_once_for_all_devices() -> None:
    """One plan suits every set of devices and every name of axes; parameters need devices."""
    model, x = TutorialMLP(32), jax.random.normal(jax.random.key(1), (8, 32))
    params = model.init(jax.random.key(0), x)
    sch = scheduled(model, x, mesh=AbstractMesh((4,), ("tp",)))
    tensor_parallel(sch)
    mesh = jax.make_mesh((4,), ("tp",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    abstract_built, concrete_built = build(sch), build(sch, mesh=mesh)
    cluster = Cluster.load("dgx_a100_80").first_devices(4)
    plan = autopar.plan_step(
        abstract_built.apply, (params, x), method=abstract_built.method, cluster=cluster
    )
    assert plan.stages[0].axis_names == ("tp",)
    for apply in (abstract_built.apply, concrete_built.apply):
        run = autopar.parallelize(apply, method=autopar.PlanMethod(plan), donate_argnums=())
        assert_allclose(run(params, x), model.apply(params, x), atol=1e-5)
    with pytest.raises(
        ValueError, match=r"has no devices to run on; give a jax\.sharding\.Mesh of its axes"
    ):
        abstract_built.init(model.init, jax.random.key(0), x)
    with pytest.raises(DirectiveError, match=r"for a mesh of axes \{'tp': 4\}, not \{'x': 2\}"):
        build(sch, mesh=jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]))


@pytest.mark.parametrize("backend", ["manual", "gspmd"])
def test_fingerprints_do_not_depend_on_devices(backend: Any) -> None:
    """A plan for an absent cluster runs on devices of this machine, because steps are equal."""
    x = jnp.ones((8, 32))
    cluster = Cluster.load("dgx_a100_80")
    fingerprints = set()
    for mesh in (AbstractMesh((4,), ("x",)), 4, target_mesh(cluster, (4,), ("x",))):
        sch = scheduled(TutorialMLP(32), x, mesh=mesh)
        tensor_parallel(sch)
        fingerprints.add(trace(build(sch, backend).apply, (sch.params, x), (1,)).fingerprint)
    assert len(fingerprints) == 1
