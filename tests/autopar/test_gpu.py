"""Steps, checkpoints and calibration on a GPU: `uv run --extra cuda13 pytest -m gpu`.

Most of these tests also run on a CPU, in the slow tier.
"""

from dataclasses import replace

import jax
import pytest
from flax.training.train_state import TrainState

import autopar
from autopar.calibrate import CPU, Effort, calibrate
from autopar.devices import cluster_of, device_mesh
from autopar.testing import assert_allclose
from experiments.measurements import gpu
from experiments.models import GPT, MLP, ViT

MLP_, GPT_, VIT_ = (
    MLP(dim=64, num_layers=2, batch_size=32),
    GPT(2, 32, 2, sequence_length=16, vocab_size=64, batch_size=8),
    ViT(1, 32, 2, patch_size=8, image_size=16, num_classes=10, batch_size=8),
)


@pytest.fixture(
    params=[pytest.param("cpu", marks=pytest.mark.slow), pytest.param("gpu", marks=pytest.mark.gpu)]
)
def device(request):
    return jax.devices(request.param)[0]


@pytest.mark.parametrize(
    ("model", "method"),
    [
        pytest.param(MLP_, autopar.ShardParallel(num_micro_batches=2), id="MLP in microbatches"),
        pytest.param(VIT_, autopar.ShardParallel(), id="ViT", marks=pytest.mark.gpu),
        pytest.param(
            GPT_,
            autopar.PipeshardParallel(
                num_micro_batches=2,
                layer_option=autopar.AutoLayerOption(2),
                stage_option=autopar.UniformStageOption(1),
            ),
            id="GPT as a pipeline",
        ),
    ],
)
def test_losses_and_gradients_are_those_of_a_cpu(model, method, device):
    # by default a GPU rounds the operands of products in float32
    with jax.default_matmul_precision("highest"):
        with jax.default_device(jax.devices("cpu")[0]):
            args = model.init_state(jax.random.key(0)), model.make_batch(jax.random.key(1))
            expected = jax.jit(model.train_step)(*args)

        @autopar.parallelize(method=replace(method, devices=[device]), donate_argnums=())
        def step(state, batch):
            return model.train_step(state, batch, autopar.value_and_grad)

        results = step(*args)
    assert {leaf.device for leaf in jax.tree.leaves(results)} == {device}
    assert_allclose(without_update(results), without_update(expected), rtol=1e-4, atol=1e-6)


def without_update(results):
    """Return the results with Adam's first moments, a tenth of the gradients, for the state.

    Adam's first update has full size even for gradients that are rounding error.
    """

    def is_state(node):
        return isinstance(node, TrainState)

    return jax.tree.map(
        lambda node: node.opt_state[0].mu if is_state(node) else node, results, is_leaf=is_state
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"remat": "auto"}, id="recomputation"),
        pytest.param({"offload": "auto"}, id="offload"),
    ],
)
def test_a_plan_in_little_memory_computes_what_the_fastest_plan_does(options):
    device = jax.devices("gpu")[0]
    model = GPT(4, 512, 8, sequence_length=512, vocab_size=4096, batch_size=16)
    args = jax.device_get(
        (model.init_state(jax.random.key(0)), model.make_batch(jax.random.key(1)))
    )
    fastest = autopar.ShardParallel(devices=[device])
    plan = autopar.plan_step(
        model.train_step, args, method=fastest, cluster=cluster_of(device_mesh([device]))
    )
    budget = 0.7 * plan.predicted_bytes
    with jax.default_matmul_precision("highest"):
        small = autopar.parallelize(
            model.train_step, method=replace(fastest, memory_budget=budget, **options)
        )
        results = jax.device_get(small(*args))
        expected = autopar.parallelize(model.train_step, method=fastest)(*args)
    assert small.get_last_executable().get_total_allocation_size() <= budget
    assert_allclose(without_update(results), without_update(expected), rtol=1e-4, atol=1e-6)


def test_a_state_is_made_where_the_step_runs_and_comes_back_from_a_checkpoint(device, tmp_path):
    step = autopar.parallelize(GPT_.train_step, method=autopar.ShardParallel(devices=[device]))
    batch = GPT_.make_batch(jax.random.key(1))
    create = autopar.parallelize(GPT_.init_state, method=autopar.CreateStateParallel(step, [batch]))
    state = create(jax.random.key(0))
    autopar.save_checkpoint(tmp_path, state, step=1)
    placements, _ = step.get_executable(state, batch).get_input_placement_specs()
    restored = autopar.restore_checkpoint(tmp_path, placement_specs=placements)
    assert {leaf.device for leaf in jax.tree.leaves((state, restored))} == {device}
    assert_allclose(restored, state, rtol=0, atol=0)


def test_a_calibrated_device_has_its_kind_and_predicts_its_steps(device):
    """`experiments.measurements.gpu` compares the seconds with measurements."""
    tiny = Effort(
        tuple(4**i for i in range(2, 9)), (8, 16), (64,), CPU.convolutions[:2], ("float32",), 1e-3
    )
    shipped = cluster_of(device_mesh([device]))
    clusters = gpu.Clusters(calibrate([device], tiny, budget=30), shipped)
    assert clusters.calibrated.device.kind == device.platform
    row = gpu.measure(GPT_, clusters, repeat=2, least=1e-3)
    assert row.unmodelled_kernels == 0
    # a GPU may compute the products with kernels that need no workspace, of 4 MiB
    assert row.analytic_memory_bytes == pytest.approx(row.memory_bytes, rel=0.5, abs=5 << 20)
    assert min(getattr(row, name) for name in gpu.PREDICTED) > 0
