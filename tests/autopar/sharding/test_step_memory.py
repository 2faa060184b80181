"""The planner's estimate of memory is near that of the program that XLA:GPU compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.ir.spec import LogicalMesh
from autopar.plan import Plan
from autopar.sharding.mesh_costs import MeshCosts
from autopar.sharding.objective import enumerate_decisions
from autopar.sharding.options import AUTO
from autopar.sharding.step_memory import StepMemory
from autopar.tracing.trace import trace
from simulator.costs.cost_model import ClusterCosts
from simulator.hardware.cluster import Cluster
from simulator.memory import MemoryUse

A100 = Cluster.load("dgx_a100_80")


H100 = Cluster.load("dgx_h100")


def planned_and_compiled(
    step, args, cluster=A100, method: autopar.PlanningMethod | None = None
) -> tuple[Plan, MemoryUse]:
    method = method or autopar.DataParallel()
    plan = autopar.plan_step(step, args, cluster=cluster, mesh_shape=(8,), method=method)
    program = autopar.compile_step(step, args, plan, cluster, donate_argnums=(0,))
    return plan, program.memory[0]


def estimated_and_compiled(
    step, args, cluster=A100, method: autopar.PlanningMethod | None = None
) -> tuple[float, float]:
    plan, memory = planned_and_compiled(step, args, cluster, method)
    return plan.predicted_bytes, memory.total


def descent(loss):
    return lambda params, batch: jax.tree.map(
        lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch)
    )


def relu_layers(params, x):
    for w in params:
        x = jax.nn.relu(x @ w)
    return (x**2).mean()


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.gelu, jax.nn.silu, jnp.exp])
def test_the_estimate_with_residuals_is_near_the_compiled_memory(activation):
    def loss(params, x):
        for w in params:
            x = activation(x @ w)
        return (x**2).mean()

    array = jax.ShapeDtypeStruct
    estimate, compiled = estimated_and_compiled(
        descent(loss), ([array((256, 256), "float32")] * 3, array((524288, 256), "float32"))
    )
    assert 0.97 * compiled <= estimate <= 1.15 * compiled


@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.silu, jax.nn.gelu, jnp.exp])
def test_an_activation_that_one_kernel_reads_twice_is_not_stored(activation):
    def loss(params, batch):
        x = batch["x"]
        for w in params:
            x = activation(x @ w)
        return ((x - batch["y"]) ** 2).mean()

    array = jax.ShapeDtypeStruct
    batch = {name: array((524288, 256), "float32") for name in ("x", "y")}
    estimate, compiled = estimated_and_compiled(
        descent(loss), ([array((256, 256), "float32")] * 3, batch)
    )
    assert estimate == pytest.approx(compiled, rel=0.01)


def test_the_estimate_of_a_loop_has_the_residuals_of_all_layers():
    def loss(params, x):
        y, _ = lax.scan(lambda h, w: (jax.nn.relu(h @ w), None), x, params)
        return (y**2).mean()

    array = jax.ShapeDtypeStruct
    estimate, compiled = estimated_and_compiled(
        descent(loss), (array((6, 256, 256), "float32"), array((524288, 256), "float32"))
    )
    assert 0.97 * compiled <= estimate <= 1.25 * compiled


def test_gradients_before_their_reduce_scatter_count_as_gradients():
    array, layers, width = jax.ShapeDtypeStruct, 4, 1024
    args = [array((width, width), "float32")] * layers, array((8 * 16, width), "float32")
    plan = autopar.plan_step(
        descent(relu_layers), args, cluster=A100, mesh_shape=(8,), method=autopar.Zero3Parallel()
    )
    roles = plan.predicted_memory.model_dump()
    layer_bytes = 4 * 16 * width  # of a layer's output on one device
    assert roles["activations"] <= 2 * layers * layer_bytes
    assert roles["gradients"] >= 4 * width**2  # at least one gradient is whole
    assert sum(roles.values()) == plan.predicted_bytes


def test_roles_of_memory_agree_between_plan_and_program():
    array, layers, tokens = jax.ShapeDtypeStruct, 6, 524288 // 8
    args = [array((256, 256), "float32")] * layers, array((524288, 256), "float32")
    plan, memory = planned_and_compiled(descent(relu_layers), args)
    planned = plan.predicted_memory.model_dump()
    assert sum(planned.values()) == plan.predicted_bytes
    layer_bytes = 4 * 256 * tokens  # of a layer's output on one device
    for roles in (planned, memory.roles):
        assert (roles["parameters"], roles["inputs"]) == (4 * 256 * 256 * layers, layer_bytes)
        # The backward pass reads the product and the output of relu of each layer but the last.
        # Temporaries are one or two gradients of outputs.
        assert (
            2 * (layers - 1) * layer_bytes
            <= roles["activations"]
            <= 2 * layers * layer_bytes * 1.01
        )
        assert layer_bytes * 0.99 <= roles["temporaries"] <= 2.1 * layer_bytes


@pytest.mark.parametrize(("rows", "width"), [(128, 512), (4096, 512), (128, 3072)])
def test_on_h100_gradients_and_their_operands_wait_for_the_end_of_the_backward_pass(rows, width):
    array = jax.ShapeDtypeStruct
    args = [array((width, width), "float32")] * 6, array((8 * rows, width), "float32")
    estimate, compiled = estimated_and_compiled(descent(relu_layers), args, H100)
    assert 0.97 * compiled <= estimate <= 1.05 * compiled


def test_on_a100_a_gradient_larger_than_its_operands_is_computed_right_before_its_update():
    array, width = jax.ShapeDtypeStruct, 3072
    args = [array((width, width), "float32")] * 6, array((8 * 128, width), "float32")
    estimate, compiled = estimated_and_compiled(descent(relu_layers), args)
    assert 0.97 * compiled <= estimate <= 1.05 * compiled
    on_h100, _ = planned_and_compiled(descent(relu_layers), args, H100)
    assert on_h100.predicted_bytes > estimate + 3 * 4 * width**2


@pytest.mark.parametrize(("rows", "width"), [(256, 1024), (448, 1024), (512, 2048), (768, 1024)])
def test_on_a100_products_added_to_larger_sums_wait_for_the_end_of_a_microbatch(rows, width):
    array = jax.ShapeDtypeStruct
    args = [array((width, width), "float32")] * 4, array((8 * 4 * rows, width), "float32")
    method = autopar.Zero2Parallel(num_micro_batches=4)
    estimate, compiled = estimated_and_compiled(descent(relu_layers), args, method=method)
    assert estimate == pytest.approx(compiled, rel=1e-3)


def test_recomputation_from_the_batch_keeps_the_examples_of_a_microbatch():
    array, rows, width = jax.ShapeDtypeStruct, 2048, 4096

    @jax.checkpoint
    def embed(w, x):
        return jax.nn.relu(x.astype("float16") @ w.astype("float16"))

    def loss(params, x):
        embedded = embed(params["in"], x).astype("float32")
        return relu_layers(params["layers"], embedded)

    params = {
        "in": array((width, 1024), "float32"),
        "layers": [array((1024, 1024), "float32")] * 2,
    }
    args = params, array((8 * 4 * rows, width), "float32")
    method = autopar.DataParallel(num_micro_batches=4)
    estimate, compiled = estimated_and_compiled(descent(loss), args, method=method)
    assert estimate == pytest.approx(compiled, rel=1e-3)


@pytest.mark.parametrize("cluster", [A100, H100], ids=lambda cluster: cluster.name)
@pytest.mark.parametrize(("rows", "width"), [(16, 512), (4096, 512)])
def test_no_choice_needs_less_than_the_lower_bound(cluster, rows, width):
    array = jax.ShapeDtypeStruct
    args = [array((width, width), "float32")] * 6, array((8 * rows, width), "float32")
    step, mesh = trace(descent(relu_layers), args, (1,)), LogicalMesh((2, 4), ("x", "y"))
    decisions = enumerate_decisions(step, MeshCosts(mesh, ClusterCosts(cluster)), AUTO)
    memory = StepMemory(step, decisions, mesh)
    random = np.random.default_rng(0)
    sizes = [len(cost) for cost in decisions.costs]
    choices = [[int(random.integers(size)) for size in sizes] for _ in range(100)]
    least = min(memory.live_bytes(choice).max() for choice in choices)
    assert 0 < memory.lower_bound() <= least
