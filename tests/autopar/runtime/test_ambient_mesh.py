"""A step runs under a mesh of the user as without it. Pipelines leave out its constraints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
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


@pytest.mark.parametrize(
    ("method", "constrained"),
    [(WHOLE, False), (STAGES, False), (STAGES, True)],
    ids=["whole", "stages", "stages, constrained"],
)
def test_a_step_runs_under_a_mesh_of_other_devices(method, constrained):
    mesh = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)

    def constrain(x):
        return jax.lax.with_sharding_constraint(x, P("rows")) if constrained else x

    parallel = autopar.parallelize(step_of(constrain), method=method, donate_argnums=())
    with jax.set_mesh(mesh):
        for _ in range(2):
            results = parallel(WEIGHTS, BATCH)
    assert_allclose(results, jax.jit(step_of(lambda x: x))(WEIGHTS, BATCH), rtol=1e-5)


def test_a_pipeline_is_refused_under_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(AxisType.Explicit,) * 2)
    parallel = autopar.parallelize(step_of(lambda x: x), method=STAGES, donate_argnums=())
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="explicit axes, rows, columns"):
        parallel(WEIGHTS, BATCH)
