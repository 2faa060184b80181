"""`parallelize` computes the results of one device for every method; its errors say how to fix."""

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar import api
from autopar.pipeline.partition import Task
from autopar.testing import assert_allclose
from simulator.hardware.cluster import Cluster
from tests.steps import mlp_args, mlp_step, serial

METHODS = [
    autopar.ShardParallel,
    autopar.DataParallel,
    autopar.Zero2Parallel,
    autopar.Zero3Parallel,
]
# Adam's first step divides by tiny second moments
CLOSE = {"rtol": 2e-3, "atol": 2e-3}


@settings(max_examples=5)
@given(
    method=st.sampled_from(METHODS),
    devices=st.sampled_from([1, 2, 4, 8, (2, 2), (2, 4), (4, 2), (1, 8)]),
    sizes=st.lists(st.sampled_from([3, 8, 16, 24, 40]), min_size=1, max_size=3).map(tuple),
    rows=st.integers(1, 3),
    count=st.sampled_from([1, 1, 2]),
)
def test_every_method_equals_one_device_in_value_and_state(method, devices, sizes, rows, count):
    args = mlp_args(sizes, batch_size=8 * rows * count)
    planned = autopar.parallelize(
        mlp_step, method=method(devices=devices, num_micro_batches=count), donate_argnums=()
    )
    assert_allclose(planned(*args), serial(mlp_step, *args), **CLOSE)


def test_three_steps_with_donated_state_equal_one_device():
    state, batch = mlp_args()
    expected = state
    planned = autopar.parallelize(mlp_step, method=autopar.ShardParallel(devices=(2, 4)))
    for _ in range(3):
        expected, loss = serial(mlp_step, expected, batch)
        state, value = planned(state, batch)
        assert_allclose(value, loss, **CLOSE)
    assert_allclose(state.params, expected.params, **CLOSE)
    assert len(planned._executables) == 1


def test_arguments_may_be_numpy_and_jax_arrays_on_any_device():
    state, batch = mlp_args()
    expected = serial(mlp_step, state, batch)
    planned = autopar.parallelize(mlp_step, method=autopar.DataParallel(), donate_argnums=())
    moved = jax.device_put((state, batch), jax.devices()[3])
    assert_allclose(planned(state, batch), expected, **CLOSE)
    assert_allclose(planned(*moved), expected, **CLOSE)
    assert_allclose(planned(jax.tree.map(np.asarray, state), batch), expected, **CLOSE)
    assert_allclose(planned(*planned.preshard_dynamic_args(state, batch)), expected, **CLOSE)


def test_results_are_distributed_and_turn_into_numpy():
    planned = autopar.parallelize(mlp_step, method=autopar.Zero3Parallel())
    state, _ = planned(*mlp_args())
    kernel = state.params["params"]["Dense_1"]["kernel"]
    assert len(kernel.sharding.device_set) == 8
    assert kernel.addressable_shards[0].data.size == kernel.size // 8
    assert np.array(kernel).shape == (64, 64)


def test_each_structure_shape_and_dtype_compiles_once():
    planned = autopar.parallelize(
        mlp_step, method=autopar.DataParallel(devices=2), donate_argnums=()
    )
    small, large = mlp_args(batch_size=8), mlp_args(batch_size=16)
    first = planned.get_executable(*small)
    planned(*small)
    planned(*large)
    assert planned.get_executable(*small) is first
    assert planned.get_executable(*large) is not first


def test_shapes_compile_ahead_of_time():
    args = mlp_args()
    planned = autopar.parallelize(mlp_step, donate_argnums=())
    ahead = planned.get_executable(*jax.eval_shape(lambda *args: args, *args))
    assert_allclose(planned(*args), serial(mlp_step, *args), **CLOSE)
    assert planned.get_executable(*args) is ahead


def test_a_train_state_is_donated_and_other_arguments_are_not():
    state, batch = mlp_args()
    planned = autopar.parallelize(mlp_step, method=autopar.DataParallel())
    state, batch = planned.preshard_dynamic_args(state, batch)
    planned(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(batch))


def test_numbers_and_functions_are_static():
    @autopar.parallelize(batch_argnums=(0,), method=autopar.DataParallel(devices=2))
    def f(x, power, how):
        assert isinstance(power, int)
        return how(x) ** power

    x = np.arange(4.0, dtype=np.float32)
    np.testing.assert_allclose(f(x, 2, jnp.negative), x**2)
    np.testing.assert_allclose(f(x, 3, jnp.negative), -(x**3))
    np.testing.assert_allclose(f(x, 3, jnp.abs), x**3)


def test_static_and_donated_arguments_can_be_named():
    f = autopar.parallelize(
        lambda x, k: x * k,
        static_argnums=1,
        donate_argnums=(0,),
        batch_argnums=(0,),
        method=autopar.DataParallel(2),
    )
    (x,) = f.preshard_dynamic_args(np.ones(4, np.float32), 3)
    np.testing.assert_allclose(f(x, 3), 3 * np.ones(4))
    assert x.is_deleted()


def test_static_values_that_compute_differently_have_programs_of_their_own():
    @dataclass(frozen=True)
    class Config:
        value: Any

    @autopar.parallelize(static_argnums=1, batch_argnums=(0,), method=autopar.DataParallel(2))
    def f(x, k):
        for _ in range(2):
            k = k.value if isinstance(k, Config) else k[0] if isinstance(k, tuple) else k
        return (
            x + (0 if isinstance(k, int) else 1) + 2 * isinstance(k, bool) + 4 * (str(k)[0] == "-")
        )

    x = np.zeros(4, np.float32)
    nan = float("nan")
    numbers = [
        1,
        1.0,
        True,
        0.0,
        -0.0,
        0,
        False,
        nan,
        np.float32(1),
        complex(0.0, -0.0),
        complex(0.0, 0.0),
    ]
    for value in [
        wrap(number) for wrap in (lambda v: v, lambda v: (v,), Config) for number in numbers
    ]:
        np.testing.assert_array_equal(f(x, value), f.fun(x, value))
        np.testing.assert_array_equal(
            f(x, value), f.fun(x, value)
        )  # the executable of the call before
    assert len(f._executables) == 32
    assert f.get_executable(x, nan) is f.get_executable(x, float("nan"))
    assert f.get_executable(x, Config(nan)) is f.get_executable(x, Config(nan))
    assert f.get_executable(x, (1, "a")) is f.get_executable(x, (1, "a"))


def test_a_number_in_the_place_of_an_array_of_the_same_value_has_its_own_program():
    f = autopar.parallelize(lambda x, k: x * k, batch_argnums=(0,), method=autopar.DataParallel(2))
    x = jnp.ones(4, jnp.int32)
    for k in (2, np.float32(2), jnp.float32(2), 2, 2.0):
        assert f(x, k).dtype == f.fun(x, k).dtype


def test_a_static_number_warns_at_its_third_value():
    def f(x, rate):
        return x * rate

    changing = autopar.parallelize(f, batch_argnums=(0,), method=autopar.DataParallel(2))
    x = np.ones(4, np.float32)
    for rate in (0.1, 0.2, 0.1, 0.2):
        changing(x, rate)
    with pytest.warns(
        UserWarning, match=r"argument 1 \(rate\) has been 0.1, 0.2, 0.3.*jnp.asarray\(rate\)"
    ) as caught:
        changing(x, 0.3)
    assert caught[0].filename == __file__
    changing(x, 0.4)
    meant = autopar.parallelize(
        f, static_argnums=1, batch_argnums=(0,), method=autopar.DataParallel(2)
    )
    for rate in (0.1, 0.2, 0.3, jnp.float32(0.4).item()):
        meant(x, rate)
    arrays = autopar.parallelize(f, batch_argnums=(0,), method=autopar.DataParallel(2))
    for rate in (0.1, 0.2, 0.3):
        arrays(x, jnp.float32(rate))
    assert len(arrays._executables) == 1


def test_only_the_programs_that_were_used_last_are_kept(monkeypatch):
    monkeypatch.setattr(api, "MOST_PROGRAMS", 2)
    f = autopar.parallelize(
        lambda x, k: x * k, static_argnums=1, batch_argnums=(0,), method=autopar.DataParallel(2)
    )
    x = np.ones(4, np.float32)
    first, second = (weakref.ref(f.get_executable(x, k)) for k in (1, 2))
    compiled = weakref.ref(second().tasks[Task(0, "S")].compiled)
    f(x, 1)
    f(x, 3)  # evicts the executable for 2
    gc.collect()
    assert second() is None
    assert compiled() is None
    assert f.get_executable(x, 1) is first()
    np.testing.assert_array_equal(f(x, 2), 2 * x)


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        jax.vmap,
        jax.grad,
        jax.make_jaxpr,
        jax.checkpoint,
        lambda f: lambda x: jax.eval_shape(f, x),
        lambda f: autopar.parallelize(f, batch_argnums=(0,)),
    ],
)
def test_a_parallelized_step_that_is_transformed_says_to_take_its_fun(transform):
    @autopar.parallelize(batch_argnums=(0,), method=autopar.DataParallel(2))
    def loss(x):
        return jnp.sum(x**2)

    x = np.ones((8, 8), np.float32)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"loss is parallelized.*loss\.fun"):
            transform(lambda x: jnp.sum(loss(x)))(x)
        loss(x)  # from now on there is a compiled program, which tracers must not reach either


def test_a_parallelized_step_is_not_planned_as_a_step():
    step = autopar.parallelize(mlp_step)
    plan = autopar.plan_step(mlp_step, mlp_args(), cluster="p3.16xlarge")
    for use in (
        lambda: autopar.parallelize(step),
        lambda: autopar.plan_step(step, mlp_args(), cluster="p3.16xlarge"),
        lambda: autopar.simulate(step, mlp_args(), plan, "p3.16xlarge"),
        lambda: autopar.compile_step(step, mlp_args(), plan, "p3.16xlarge"),
    ):
        with pytest.raises(TypeError, match=r"fun is .*\.fun"):
            use()


def test_an_argument_that_cannot_be_static_is_refused():
    f = autopar.parallelize(lambda x, names: x, batch_argnums=(0,))
    with pytest.raises(TypeError, match=r"argument 1 .* can't be hashed"):
        f(np.ones(8), {"a": "text"})


def test_meshes_are_taken_as_a_mesh_a_shape_a_number_or_a_list():
    devices = jax.devices()
    explicit = jax.make_mesh((2, 2), ("rows", "columns"))
    for given_devices, shape in [
        (explicit, (2, 2)),
        ((2, 2), (2, 2)),
        (4, (4,)),
        (devices[4:], (4,)),
        (None, (8,)),
    ]:
        planned = autopar.parallelize(
            mlp_step, method=autopar.DataParallel(devices=given_devices), donate_argnums=()
        )
        assert planned.get_executable(*mlp_args()).meshes[0].devices.shape == shape
    planned = autopar.parallelize(
        mlp_step, method=autopar.DataParallel(devices=devices[4:]), donate_argnums=()
    )
    state, _ = planned(*mlp_args())
    assert state.step.sharding.device_set == set(devices[4:])


def test_a_mesh_larger_than_the_machine_says_how_to_get_virtual_devices():
    planned = autopar.parallelize(mlp_step, method=autopar.ShardParallel(devices=(4, 4)))
    with pytest.raises(
        ValueError, match=r"needs 16 devices, but only 8(.|\n)*force_host_platform_device_count=16"
    ):
        planned(*mlp_args())


@pytest.mark.parametrize("devices", ["all", (), (2, "x"), (0,)])
def test_devices_that_make_no_sense_are_refused(devices):
    with pytest.raises(ValueError, match=r"expected a jax\.sharding\.Mesh, a mesh shape"):
        autopar.parallelize(mlp_step, method=autopar.ShardParallel(devices=devices))(*mlp_args())


def test_a_method_must_be_a_method():
    method: Any = "data"
    with pytest.raises(TypeError, match=r"'data', expected .*ShardParallel"):
        autopar.parallelize(mlp_step, method=method)(*mlp_args())


def test_errors_in_a_running_step_are_not_hidden():
    planned = autopar.parallelize(mlp_step, method=autopar.DataParallel(), donate_argnums=())
    state, batch = mlp_args()
    planned(state, batch)
    with pytest.raises(autopar.ShardingError, match="1/x has shape"):
        planned(state, {"x": batch["x"][:3], "y": batch["y"][:3]})
    with pytest.raises(TypeError):
        planned(state)


def test_a_saved_plan_runs_without_solving(tmp_path, monkeypatch):
    args = mlp_args()
    planned = autopar.parallelize(
        mlp_step, method=autopar.ShardParallel(devices=(2, 4)), donate_argnums=()
    )
    planned.get_executable(*args).plan.save(tmp_path / "plan.json")
    monkeypatch.setattr("autopar.sharding.solve_within_memory.solve", None)
    again = autopar.parallelize(
        mlp_step,
        method=autopar.PlanMethod(autopar.Plan.load(tmp_path / "plan.json")),
        donate_argnums=(),
    )
    assert_allclose(again(*args), serial(mlp_step, *args), **CLOSE)
    assert again.get_executable(*args).plan == planned.get_executable(*args).plan


def test_an_executable_has_its_memory_program_and_hlo():
    executable = autopar.parallelize(
        mlp_step, method=autopar.DataParallel(devices=2)
    ).get_executable(*mlp_args())
    state, batch = mlp_args()
    state_bytes = sum(jnp.asarray(leaf).nbytes for leaf in jax.tree.leaves(state))
    batch_bytes = sum(leaf.nbytes for leaf in batch.values())
    (memory,) = executable.memory
    assert memory.arguments == state_bytes + batch_bytes // 2
    assert executable.get_total_allocation_size() == memory.total >= state_bytes
    assert str(executable.program) == "mesh 0: 0S0"
    assert "all-reduce" in executable.get_hlo_text()


def test_gradients_are_reduced_in_one_collective():
    executable = autopar.parallelize(
        mlp_step, method=autopar.DataParallel(devices=4)
    ).get_executable(*mlp_args())
    assert executable.get_hlo_text().count(" all-reduce(") == 1


def test_predictions_need_no_devices():
    args = jax.eval_shape(lambda: mlp_args((256, 256), batch_size=64))
    cluster = Cluster.load("dgx_a100_80").with_size(hosts=2)
    plan = autopar.plan_step(
        mlp_step, args, method=autopar.DataParallel(), cluster=cluster, mesh_shape=(16,)
    )
    timeline = autopar.simulate(mlp_step, args, plan, cluster)
    assert 0 < timeline.makespan < 1e-2
    (memory,) = timeline.memory
    assert memory.total < cluster.device.memory_bytes
    state, batch = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arg)) for arg in args
    )
    # parameters and optimizer state are replicated
    assert memory.roles["parameters"] + memory.roles.get("optimizer", 0) == state
    assert memory.roles["inputs"] == batch // 16


def test_a_mesh_larger_than_the_cluster_is_refused():
    with pytest.raises(ValueError, match=r"needs 16 devices, but cluster 'p3\.16xlarge' has 8"):
        autopar.plan_step(mlp_step, mlp_args(), cluster="p3.16xlarge", mesh_shape=(16,))


def test_init_and_shutdown():
    autopar.init()
    autopar.shutdown()
    with pytest.raises(ValueError, match=r"'slurm'.*'local'.*'ray'"):
        autopar.init(cluster="slurm")


def test_memory_is_a_constraint_by_default():
    # 1.6 GB with Adam
    args = jax.eval_shape(lambda: mlp_args((8192, 8192), batch_size=64, features=8192))
    cluster = Cluster.load("p3.16xlarge")
    small = cluster.model_copy(
        update={"device": cluster.device.model_copy(update={"memory_gb": 2.0})}
    )
    with pytest.raises(autopar.MemoryBudgetError, match="per device"):
        autopar.plan_step(
            mlp_step, args, method=autopar.DataParallel(), cluster=small, mesh_shape=(8,)
        )
    plan = autopar.plan_step(mlp_step, args, cluster=small, mesh_shape=(8,))
    assert plan.predicted_bytes < small.device.usable_bytes
    tight = autopar.ShardParallel(memory_budget=1e6)
    with pytest.raises(autopar.MemoryBudgetError, match=r"0\.001 GB"):
        autopar.plan_step(mlp_step, args, method=tight, cluster=cluster, mesh_shape=(8,))


def test_a_state_may_carry_a_random_key_and_steps_may_print(capfd):
    @autopar.parallelize(method=autopar.ShardParallel(devices=(2, 2)))
    def step(state, batch):
        key, now = jax.random.split(state["key"])
        kept = jax.random.bernoulli(now, 0.5, batch.shape)
        jax.debug.print("step")
        return {"key": key, "w": state["w"] + jnp.where(kept, batch, 0).sum(0)}

    state = {"key": jax.random.key(0), "w": jnp.zeros(8)}
    batch = np.ones((16, 8), np.float32)
    expected = step.fun(state, batch)
    actual = step(state, batch)
    np.testing.assert_allclose(actual["w"], expected["w"])
    assert (
        jax.random.key_data(actual["key"]).tolist() == jax.random.key_data(expected["key"]).tolist()
    )
    assert capfd.readouterr().out.count("step") >= 2


@pytest.mark.parametrize(
    "method",
    [
        autopar.Zero3Parallel((2,)),
        autopar.ShardParallel((2,), num_micro_batches=2),
        autopar.PipeshardParallel(2, num_micro_batches=2, layer_option=autopar.AutoLayerOption(2)),
    ],
)
def test_gradients_of_integers_are_returned(method):
    def step(params, batch):
        def loss(params):
            return jnp.mean((jnp.tanh(batch @ params["in"]) @ params["out"]) ** 2)

        return autopar.grad(loss, allow_int=True)(params)

    params = {"in": jnp.ones((8, 16)), "out": jnp.ones((16, 8)), "seen": jnp.arange(4)}
    batch = np.ones((16, 8), np.float32)
    gradients = autopar.parallelize(step, method=method, donate_argnums=())(params, batch)
    expected = step(params, batch)
    assert gradients.pop("seen").dtype == expected.pop("seen").dtype == jax.dtypes.float0
    assert_allclose(gradients, expected, rtol=1e-6)


def test_equations_that_every_device_computes_whole_are_warnings():
    def step(key, batch):
        return jax.lax.rng_bit_generator(key, (8,))[1] + batch

    args = (jnp.zeros(4, jnp.uint32), jnp.ones(8))
    plan = autopar.plan_step(step, args, cluster="p3.16xlarge", mesh_shape=(4,))
    assert plan.warnings == (
        "1 x rng_bit_generator: computed whole on every device, there is no better rule for it in"
        " autopar/primitives",
    )
    assert "rng_bit_generator" in str(plan)
