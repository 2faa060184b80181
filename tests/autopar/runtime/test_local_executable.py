"""A local executable runs a pipeline's instructions in order and leaves no arrays behind."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import (
    LayerError,
    ManualStageOption,
    MicrobatchError,
    PlanError,
    PlanMethod,
    StageError,
    UniformStageOption,
)
from autopar.runtime.loaded_job import LoadedJob
from autopar.runtime.local_executable import LocalExecutable
from simulator.engine.timeline import Timeline
from simulator.program import Instruction, Run, walk
from tests.autopar.pipeline.stack_steps import (
    assert_as_serial,
    descend,
    pipeline,
    stack,
    stack_batch,
    stack_loss,
    stack_params,
    stack_step,
)
from tests.autopar.report.test_dump import suffixes


@cache
def compiled() -> tuple[autopar.ParallelizedFunction, LocalExecutable]:
    """Return a pipeline of two stages, each on two devices."""
    method = pipeline(stage_option=UniformStageOption(2, submesh_logical_shape=(2,)))
    parallel = autopar.parallelize(stack_step, method=method, donate_argnums=(0,))
    executable = parallel.get_executable(stack_params(), stack_batch())
    assert isinstance(executable, LocalExecutable)
    return parallel, executable


def test_instructions_are_executed_in_the_order_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, executable = compiled()
    executed: list[tuple[int, Instruction]] = []
    original = LoadedJob.execute

    def execute(self: LoadedJob, mesh: int, instruction: Instruction, values: Any) -> None:
        executed.append((mesh, instruction))
        original(self, mesh, instruction, values)

    monkeypatch.setattr(LoadedJob, "execute", execute)
    executable(*executable.shard_args(stack_params(), stack_batch()))
    assert executed == list(walk(executable.program))


def test_a_returned_state_has_the_shardings_of_the_next_call() -> None:
    parallel, executable = compiled()
    params, _ = parallel(stack_params(), stack_batch())
    assert jax.tree.map(lambda a: a.sharding, params) == executable.in_shardings[0]
    assert jax.tree.map(lambda a: a.sharding, (params, _)) == executable.out_shardings
    assert len(parallel._executables) == 1


@pytest.mark.parametrize("donate", [(), (0,)], ids=["not donated", "donated"])
def test_only_results_of_the_last_step_stay_in_memory(donate: tuple[int, ...]) -> None:
    method = pipeline(
        stage_option=UniformStageOption(2), devices=2, pipeline_schedule="zero_bubble_h1"
    )
    parallel = (
        compiled()[0]
        if donate
        else autopar.parallelize(stack_step, method=method, donate_argnums=())
    )
    batch = stack_batch()
    result = parallel(stack_params(), batch)
    before = jax.live_arrays()  # referenced, so that no other array gets the id of one of them
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(result))
    result = parallel(result[0], batch)
    result = parallel(result[0], batch)
    old_ids = set(map(id, before))
    alive = [array for array in jax.live_arrays() if id(array) not in old_ids]
    assert set(map(id, alive)) == set(map(id, jax.tree.leaves(result)))
    assert sum(array.nbytes for array in alive) == state


def test_a_donated_state_is_deleted_and_the_batch_is_not() -> None:
    parallel, executable = compiled()
    params, batch = executable.shard_args(stack_params(), stack_batch())
    parallel(params, batch)
    assert all(leaf.is_deleted() for leaf in params.values())
    assert not any(leaf.is_deleted() for leaf in batch.values())


def test_an_exception_in_a_stage_is_raised_unchanged_and_the_next_step_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, executable = compiled()
    broken, call = next(
        (compile_stack, call)
        for compile_stack, call in executable.job.calls.items()
        if (compile_stack.stage, compile_stack.phase) == (1, "B")
    )

    def raise_error(*operands: Any) -> Any:
        raise ZeroDivisionError("in stage 1")

    with monkeypatch.context() as patch:
        patch.setitem(executable.job.calls, broken, replace(call, compiled=raise_error))
        with pytest.raises(ZeroDivisionError, match="in stage 1"):
            executable(*executable.shard_args(stack_params(), stack_batch()))
    _, loss = executable(*executable.shard_args(stack_params(), stack_batch()))
    assert float(loss) == pytest.approx(
        float(jax.jit(stack_step)(stack_params(), stack_batch())[1]), rel=1e-5
    )


def test_a_saved_plan_gives_the_same_placements_without_solving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, executable = compiled()
    plan = autopar.Plan.from_json(executable.plan.to_json())
    assert plan == executable.plan
    monkeypatch.setattr("autopar.planning.step_planner.plan_shardings", None)
    monkeypatch.setattr("autopar.planning.stage_costs.plan_shardings", None)
    reloaded = autopar.parallelize(stack_step, method=PlanMethod(plan)).get_executable(
        stack_params(), stack_batch()
    )
    assert reloaded.get_input_placement_specs() == executable.get_input_placement_specs()
    assert reloaded.get_output_placement_specs() == executable.get_output_placement_specs()


def test_placement_specs_have_the_mesh_of_every_array() -> None:
    _, executable = compiled()
    params, batch = executable.get_input_placement_specs()
    assert {name: spec.mesh_ids for name, spec in params.items()} == {
        "w0": (0,),
        "w1": (0,),
        "w2": (1,),
        "w3": (1,),
    }
    assert (batch["x"].mesh_ids, batch["y"].mesh_ids) == ((0,), (1,))
    assert batch["x"].aval.shape == (16, 16)
    updated, loss = executable.get_output_placement_specs()
    assert (updated, loss.mesh_ids) == (params, (1,))


def test_a_step_continues_from_a_host_copy_under_another_plan() -> None:
    parallel, _ = compiled()
    params, _ = parallel(stack_params(), stack_batch())
    checkpoint = jax.device_get(params)
    _, expected = parallel(params, stack_batch())
    _, loss = autopar.parallelize(stack_step, method=autopar.DataParallel(4))(
        checkpoint, stack_batch()
    )
    assert float(expected) == pytest.approx(float(loss), rel=1e-5)


def test_stage_execution_info_has_layers_devices_tasks_and_work() -> None:
    _, executable = compiled()
    first, last = executable.get_stage_execution_info()
    assert (first.layers, first.devices, last.layers, last.devices) == (
        (0, 1),
        (0, 1),
        (2, 3),
        (2, 3),
    )
    assert [task.name for task in first.tasks] == ["0F", "0B", "0U0"]
    # The forward pass has two products of (4, 16) by (16, 16) per microbatch, beside tanh. The
    # backward pass has three, because the gradient of x is not needed.
    assert first.tasks[0].flops == pytest.approx(2 * 2 * 4 * 16 * 16, rel=0.1)
    assert first.tasks[1].flops == pytest.approx(3 * 2 * 4 * 16 * 16, rel=0.2)
    assert all(task.bytes > 0 for stage in (first, last) for task in stage.tasks)


def test_the_allocation_is_at_least_the_size_of_the_state() -> None:
    _, executable = compiled()
    # a stage has half of the layers
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(stack_params())) // 2
    assert executable.get_total_allocation_size() == max(use.total for use in executable.memory)
    assert executable.get_total_allocation_size() >= state // 2


def test_the_executed_timeline_has_every_task_once(tmp_path: Any) -> None:
    _, executable = compiled()
    timeline = executable.dump_stage_execution_trace(tmp_path / "trace.json")
    assert isinstance(timeline, Timeline)
    tasks = [span.task for span in timeline.spans if span.category == "task"]
    assert sorted(tasks) == sorted(
        str(instruction)
        for _, instruction in walk(executable.program)
        if isinstance(instruction, Run)
    )
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"0F0", "1F0", "1B3"}


def test_the_memory_of_a_predicted_pipeline_returns_to_its_baseline() -> None:
    args = jax.eval_shape(lambda: (stack_params(width=256), stack_batch(64, 256)))
    plan = autopar.plan_step(stack_step, args, method=pipeline(devices=8), cluster="p3.16xlarge")
    timeline = autopar.simulate(stack_step, args, plan, "p3.16xlarge")
    for levels, peak in zip(timeline.levels, timeline.memory, strict=True):
        totals = [sum(level.values()) for _, level in levels]
        assert max(totals) == peak.total == sum(peak.roles.values())
        assert 0 < min(totals) == totals[-1]
    first_roles = timeline.memory[0].roles
    # a mesh has one layer on two devices
    assert first_roles["parameters"] == first_roles["gradients"] == 4 * 256 * 256 // 2
    # The earlier the mesh, the more microbatches wait on it for their backward pass.
    in_flight = [
        max(level.get("activations", 0) for _, level in levels) for levels in timeline.levels
    ]
    assert in_flight[1:] == sorted(
        in_flight[1:], reverse=True
    )  # the first mesh has the batch instead
    assert {(arrow.source, arrow.to) for arrow in timeline.arrows} == {
        (0, 1),
        (1, 0),
        (1, 2),
        (2, 1),
        (2, 3),
        (3, 2),
    }
    assert all(arrow.sent < arrow.received for arrow in timeline.arrows)


def test_the_step_is_timed_with_dummy_inputs() -> None:
    _, executable = compiled()
    seconds = executable.profile_with_dummy_inputs(warmup=1, number=1, repeat=2)
    assert seconds.shape == (2,)
    assert (seconds > 0).all()
    executable.sync()


def test_the_hlo_text_of_a_stage_has_a_program_per_task() -> None:
    _, executable = compiled()
    text = executable.get_hlo_text(stage=1)
    assert [line for line in text.splitlines() if line.startswith("// task")] == [
        "// task 1F",
        "// task 1B",
        "// task 1U0",
    ]
    assert "HloModule" in text
    assert "stablehlo" in executable.get_hlo_text("annotated", stage=0)
    assert "HloModule" in executable.get_hlo_text("partitioned", stage=0)
    with pytest.raises(ValueError, match=r"stage 2.*0 to 1"):
        executable.get_hlo_text(stage=2)


def test_debug_info_has_files_for_each_stage(tmp_path: Any) -> None:
    _, executable = compiled()
    names = {path.name for path in executable.dump_debug_info(tmp_path, "step")}
    assert names == {f"step{suffix}" for suffix in suffixes(2)}
    assert autopar.Plan.load(tmp_path / "step_plan.json") == executable.plan


def test_the_plan_prints_schedule_layers_and_devices() -> None:
    _, executable = compiled()
    text = str(executable.plan)
    assert "1f1b" in text
    assert "stage 0: layers 0-1 on devices 0-1" in text
    assert "stage 1: layers 2-3 on devices 2-3" in text


def test_reports_of_a_pipeline_are_by_stage() -> None:
    _, executable = compiled()
    parameters = autopar.report.classify(executable, stage=1).parameters
    assert [parameter.path for parameter in parameters] == ["0/w2", "0/w3"]
    with pytest.raises(ValueError, match="stage"):
        autopar.report.classify(executable)
    with pytest.raises(ValueError, match="stage"):
        autopar.report.decisions(executable)
    assert len(autopar.report.decisions(executable, stage=0))


def test_the_difference_of_pipelines_has_schedules_and_layers() -> None:
    _, executable = compiled()
    assert not autopar.report.diff(executable, executable)
    uneven = ManualStageOption([[0], [1, 2, 3]], [(1, 2)] * 2, [(2,)] * 2)
    method = pipeline(pipeline_schedule="gpipe", stage_option=uneven)
    other = autopar.plan_step(
        stack_step,
        (stack_params(), stack_batch()),
        method=method,
        cluster="cpu-virtual",
        mesh_shape=(4,),
    )
    lines = autopar.report.diff(executable, other).lines
    assert "schedule: 1f1b with 1 stage(s) per mesh -> gpipe with 1 stage(s) per mesh" in lines
    before, after = "0-1 on devices 0-1; 2-3 on devices 2-3", "0 on devices 0-1; 1-3 on devices 2-3"
    assert f"layers of stages: {before} -> {after}" in lines


def compile_stack(step: Any = stack_step, batch: int = 16, **options: Any) -> None:
    autopar.parallelize(step, method=pipeline(**options)).get_executable(
        stack_params(), stack_batch(batch)
    )


@pytest.mark.parametrize(
    "layers", [autopar.AutoLayerOption(2), autopar.ManualLayerOption(remat_layer=True)]
)
def test_a_loss_may_take_functions_numbers_and_constant_arrays(layers: Any) -> None:
    """Values that are not traced keep their value in layers, as under `jax.value_and_grad`."""
    constant = np.linspace(0, 1, 16, dtype=np.float32)

    def loss(
        params: Any,
        apply: Any,
        x: jax.Array,
        power: int,
        options: dict[str, Any],
        *,
        weights: np.ndarray,
    ) -> Any:
        scale = (
            options["scale"] if options["name"] == "scaled" and weights.all() is np.False_ else 1.0
        )
        return jnp.mean((apply(params, x) ** int(power)) * scale * weights)

    def step(params: Any, batch: Any) -> Any:
        options = {"name": "scaled", "scale": 3.0, "act": jnp.tanh}
        return descend(
            params,
            autopar.value_and_grad(loss)(params, stack, batch["x"], 2, options, weights=constant),
        )

    assert_as_serial(step, pipeline(devices=2, layer_option=layers), stack_params(2), stack_batch())


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(StageError, match="5 stages from 4 layer"):
        compile_stack(stage_option=UniformStageOption(5), devices=5)


def test_more_devices_than_the_process_has_are_refused() -> None:
    with pytest.raises(StageError, match="need 8, there are 4"):
        compile_stack(stage_option=UniformStageOption(4, (1, 2)))
    with pytest.raises(StageError, match="need 6 devices, there are 4"):
        compile_stack(
            stage_option=ManualStageOption([[0, 1], [2, 3]], [(1, 2), (1, 4)], [(2,), (4,)])
        )
    with pytest.raises(ValueError, match="needs 99 devices"):
        compile_stack(devices=99)


def test_microbatches_that_do_not_divide_the_batch_are_refused() -> None:
    with pytest.raises(MicrobatchError, match="can't be cut into 3 microbatches"):
        compile_stack(num_micro_batches=3)


def test_a_gradient_by_jax_of_a_loss_in_layers_equals_one_device() -> None:
    def step(params: Any, batch: Any) -> Any:
        loss = autopar.manual_layer_construction(lambda p: stack_loss(p, batch))
        return descend(params, jax.value_and_grad(loss)(params))

    assert_as_serial(step, pipeline(), stack_params(), stack_batch())


def test_a_boundary_outside_of_a_layer_construction_is_refused() -> None:
    def step(params: Any, batch: Any) -> Any:
        return descend(params, autopar.value_and_grad(stack_loss)(params, batch))

    with pytest.raises(StageError, match=r"no layers.*manual_layer_construction"):
        compile_stack(step)


def test_a_boundary_inside_a_loop_is_refused() -> None:
    def step(params: Any, batch: Any) -> Any:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            autopar.mark_pipeline_boundary()
            return jnp.tanh(x @ w), None

        @autopar.manual_layer_construction
        def loss(params: Any) -> jax.Array:
            x, _ = jax.lax.scan(layer, batch["x"], jnp.stack(jax.tree.leaves(params)))
            return jnp.mean((x - batch["y"]) ** 2)

        return descend(params, autopar.value_and_grad(loss)(params))

    with pytest.raises(LayerError, match="mark_pipeline_boundary inside scan"):
        compile_stack(step)


def test_a_plan_of_another_step_is_refused() -> None:
    _, executable = compiled()
    other = autopar.parallelize(stack_step, method=PlanMethod(executable.plan))
    with pytest.raises(PlanError, match="plan the step again"):
        other.get_executable(stack_params(), stack_batch(32))


def test_an_unknown_schedule_or_stage_option_is_refused() -> None:
    with pytest.raises(ValueError, match="pipeline_schedule is '1b1f', expected one of"):
        pipeline(pipeline_schedule="1b1f")
    with pytest.raises(ValueError, match="stage_option is 'even', expected"):
        pipeline(stage_option="even")


def test_arguments_with_other_placements_are_refused() -> None:
    _, executable = compiled()
    with pytest.raises(ValueError, match=r"argument \S+: given .*, expected Named.*`shard_args`"):
        executable(stack_params(), stack_batch())
