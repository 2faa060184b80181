"""Differences between plans, in words."""

import jax

import autopar
from autopar.plan import Plan
from autopar.report import diff
from tests.autopar.report.planned_steps import planned

LAYERS = autopar.AutoLayerOption(4)


def stack_args():
    kernels = [jax.ShapeDtypeStruct((256, 256), "float32")] * 4
    return kernels, jax.ShapeDtypeStruct((64, 256), "float32")


def stack_step(params, x):
    def loss(params):
        hidden = x
        for kernel in params:
            hidden = jax.nn.relu(hidden @ kernel)
        return (hidden**2).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, autopar.grad(loss)(params))


def test_a_plan_does_not_differ_from_itself():
    plan = planned("mlp").plan
    assert not diff(plan, plan)
    assert not diff(plan, Plan.from_json(plan.to_json()))
    assert not diff(plan, plan.model_copy(update={"planning_seconds": 9.0}))
    assert str(diff(plan, plan)) == "the plans are the same"


def test_zero_2_differs_from_data_parallelism_in_the_optimizer_state():
    found = diff(planned("mlp", "DataParallel"), planned("mlp", "Zero2Parallel"))
    assert "method: DataParallel -> Zero2Parallel" in found.lines
    assert "parallelism: data parallel -> ZeRO-2" in found.lines
    assert any(
        line.startswith("parameters: 4 of 4 data parallel on x -> ZeRO-2 on x: ")
        for line in found.lines
    )
    state = [line for line in found.lines if line.startswith("optimizer state: ")]
    assert state
    assert "0/opt_state/0/mu/params/Dense_0/" in "".join(state)
    # parameters stay replicated
    assert not any(line.startswith("parameters: ") and "P(" in line for line in found.lines)
    # Adam's two moments have the size of the parameters, (64 * 64 + 64) * 2 floats. ZeRO-2 shards
    # them over 4 devices. The counters of Adam and of the step are replicated.
    whole = 2 * (64 * 64 + 64) * 2 * 4
    assert any(
        f"optimizer state {whole + 8:,} -> {whole // 4 + 8:,}" in line for line in found.lines
    )


def test_plans_alone_say_as_much_as_executables():
    plans = planned("mlp", "DataParallel"), planned("mlp", "Zero3Parallel")
    found = diff(*(Plan.from_json(each.plan.to_json()) for each in plans))
    assert found == diff(*plans)
    assert "parallelism: data parallel -> ZeRO-3" in found.lines
    assert "option parameters: 'replicated' -> 'sharded'" in found.lines
    assert any(line.startswith("predicted resharding: 0 ms -> ") for line in found.lines)
    assert any(line.startswith("parameters: ") and " -> P('x'" in line for line in found.lines)
    assert any(line.startswith("values pinned inside: ") for line in found.lines) or any(
        "newly pinned inside" in line for line in found.lines
    )
    assert any(line.startswith("predicted step: ") for line in found.lines)
    assert any(line.startswith("predicted bytes per device: ") for line in found.lines)


def test_mesh_and_microbatches_are_told():
    found = diff(planned("mlp", "DataParallel", (4,)), planned("mlp", "DataParallel", (2, 2)))
    assert found.lines[0] == "mesh: x=4 -> x=2 x y=2"
    found = diff(
        planned("mlp", "DataParallel").plan, planned("mlp in microbatches", "DataParallel").plan
    )
    assert found.lines[0] == "microbatches: 1 -> 2"
    assert any("different steps" in line for line in found.lines)
    assert not any("pinned" in line for line in found.lines)  # equation numbers do not correspond


def test_values_that_only_one_plan_has_are_named():
    found = diff(planned("mlp").plan, planned("decoder").plan)
    assert any(
        line.startswith("only in the first: 0/params/params/Dense_0/bias") for line in found.lines
    )
    assert any(line.startswith("only in the second: ") for line in found.lines)
    assert any("[32, 64]" in line or "1/" in line for line in found.lines)


def test_the_number_of_stages_alone_is_no_difference_of_gradients_or_constraints():
    def plan_of(num_stages):
        method = autopar.PipeshardParallel(
            8, 4, layer_option=LAYERS, stage_option=autopar.UniformStageOption(num_stages)
        )
        return autopar.plan_step(stack_step, stack_args(), method=method, cluster="dgx_h100")

    lines = diff(plan_of(2), plan_of(4)).lines
    assert lines[0] == "mesh: x=4, x=4 -> x=2, x=2, x=2, x=2"
    assert not any("gradients are completed" in line or "pinned" in line for line in lines)


def test_executables_can_be_compared():
    from tests.steps import mlp_args, mlp_step

    args = mlp_args((64, 64), 32, 64)
    executables = [
        autopar.parallelize(mlp_step, method=method).get_executable(*args)
        for method in (autopar.DataParallel((2,)), autopar.Zero3Parallel((2,)))
    ]
    assert "parallelism: data parallel -> ZeRO-3" in diff(*executables).lines
