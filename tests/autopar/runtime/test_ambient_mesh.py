"""A step runs under a mesh of the user as without it. Planned steps leave out its constraints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.testing import assert_allclose

WEIGHTS = np.linspace(-1, 1, 36, dtype=np.float32).reshape(6, 6)
BATCH = np.linspace(-2, 2, 48, dtype=np.float32).reshape(8, 6)
WHOLE = autopar.ShardParallel(2, num_micro_batches=2)
STAGES = autopar.PipeshardParallel(
    4,
    num_micro_batches=2,
    layer_option=autopar.AutoLayerOption(2),
    stage_option=autopar.UniformStageOption(2),
)


def step_of(constrain):
    def step(weights, batch):
        def loss(weights):
            return jnp.mean(jnp.tanh(constrain(jnp.tanh(batch @ weights)) @ weights) ** 2)

        value, gradient = autopar.value_and_grad(loss)(weights)
        return weights - gradient, value

    return step


def constrained_rows(x):
    return jax.lax.with_sharding_constraint(x, P("rows"))


@pytest.mark.parametrize(
    ("method", "constrained"),
    [(WHOLE, False), (WHOLE, True), (STAGES, False), (STAGES, True)],
    ids=["whole", "whole, constrained", "stages", "stages, constrained"],
)
def test_a_step_runs_under_a_mesh_of_other_devices(method, constrained):
    mesh = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)
    constrain = constrained_rows if constrained else lambda x: x
    parallel = autopar.parallelize(step_of(constrain), method=method, donate_argnums=())
    with jax.set_mesh(mesh):
        for _ in range(2):
            results = parallel(WEIGHTS, BATCH)
        plan = parallel.get_executable(WEIGHTS, BATCH).plan
    assert_allclose(results, jax.jit(step_of(lambda x: x))(WEIGHTS, BATCH), rtol=1e-5)
    warned = [text for text in plan.warnings if "with_sharding_constraint" in text]
    assert len(warned) == constrained
    line = constrained_rows.__code__.co_firstlineno + 1
    assert all(f"{__file__}:{line};" in text for text in warned)


def test_a_step_that_is_left_to_xla_keeps_its_constraints():
    def constrain(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(("columns", "rows"))))

    mesh = jax.make_mesh((2, 2), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)
    texts = {}
    for method in autopar.ManualShardParallel(mesh), autopar.ShardParallel(mesh):
        parallel = autopar.parallelize(step_of(constrain), method=method, donate_argnums=())
        results = parallel(WEIGHTS, BATCH)
        assert_allclose(results, jax.jit(step_of(lambda x: x))(WEIGHTS, BATCH), rtol=1e-5)
        executable = parallel.get_executable(WEIGHTS, BATCH)
        texts[type(method)] = executable.get_hlo_text("annotated")
        loaded = autopar.Plan.from_json(executable.plan.to_json())
        again = autopar.parallelize(
            step_of(constrain), method=autopar.PlanMethod(loaded), donate_argnums=()
        )
        assert again.get_executable(WEIGHTS, BATCH).plan == executable.plan
    constraint = '[{"columns", "rows"}, {}]'
    assert constraint in texts[autopar.ManualShardParallel]
    assert constraint not in texts[autopar.ShardParallel]


def test_a_pipeline_is_refused_under_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(AxisType.Explicit,) * 2)
    parallel = autopar.parallelize(step_of(lambda x: x), method=STAGES, donate_argnums=())
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="explicit axes, rows, columns"):
        parallel(WEIGHTS, BATCH)
