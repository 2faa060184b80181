"""With `profile=True` stages are selected by measured seconds, which are cached in a file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar import AutoStageOption, StageError
from autopar.lowering.stage_lowering import TaskFunction
from autopar.planning import profiling
from simulator.hardware.cluster import Cluster
from tests.autopar.pipeline.stack_steps import (
    assert_as_serial,
    pipeline,
    stack_batch,
    stack_params,
    stack_step,
)

TWO_CPUS = Cluster.load("cpu-virtual").first_devices(2)
PROFILE = AutoStageOption(profile=True)


def planned(
    option: AutoStageOption = PROFILE, layers: int = 2, cluster: Cluster | str = TWO_CPUS
) -> autopar.Plan:
    args = stack_params(layers), stack_batch()
    return autopar.plan_step(
        stack_step, args, method=pipeline(devices=None, stage_option=option), cluster=cluster
    )


def record_measurements(monkeypatch: pytest.MonkeyPatch, seconds: Any) -> list[TaskFunction]:
    """Make tasks take `seconds`, and return the growing list of tasks that are measured."""
    functions: list[TaskFunction] = []

    def task_seconds(function: TaskFunction) -> float:
        functions.append(function)
        return seconds(function.in_shardings[0].mesh.size)

    monkeypatch.setattr(profiling, "task_seconds", task_seconds)
    return functions


@pytest.mark.slow
def test_a_pipeline_of_measured_stages_trains_as_on_one_device(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    method = pipeline(devices=2, stage_option=replace(PROFILE, cached_profile_result=file))
    assert_as_serial(stack_step, method, stack_params(2), stack_batch())
    stages = json.loads(file.read_text())["stages"].values()
    # both layers, or either of them, on one device or two
    assert sorted(stage["mesh_shape"] for stage in stages) == [[1], [1], [1], [2], [2], [2]]
    assert all(set(stage["seconds"]) == {"F", "B", "U"} for stage in stages)
    assert all(0 < seconds < 10 for stage in stages for seconds in stage["seconds"].values())
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(("seconds", "stages"), [({1: 1.0, 2: 0.1}, 1), ({1: 1.0, 2: 3.0}, 2)])
def test_measured_seconds_determine_the_stages(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], stages: int
) -> None:
    """A task takes 1 s on one device, and 0.1 or 3 s on both."""
    record_measurements(monkeypatch, seconds.__getitem__)
    plan = planned()
    assert len(plan.stages) == stages
    # One stage runs 9 tasks: forward and backward of 4 microbatches, and the update. Of two stages
    # the first waits for forward and backward of one microbatch on the second.
    assert plan.predicted_seconds == pytest.approx({1: 0.9, 2: 11.0}[stages], rel=1e-3)


def test_equal_layers_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = record_measurements(monkeypatch, lambda size: 1.0)
    planned(layers=6)
    # Of the 21 ranges of layers 15 differ: 1 to 4 layers at the beginning, inside or at the end,
    # 5 at either end, and all 6. Each is measured on 1 device and on 2.
    assert len(functions) == 2 * 15 * len(("F", "B", "U"))


def test_cached_stages_are_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    option = replace(PROFILE, cached_profile_result=tmp_path / "profile.json")
    with monkeypatch.context() as patch:
        record_measurements(patch, lambda size: 1.0 / size)
        plan = planned(option)
    functions = record_measurements(monkeypatch, lambda size: 100.0)
    replanned = planned(option)
    assert not functions
    assert replanned == plan.model_copy(update={"planning_seconds": replanned.planning_seconds})


def test_stages_cached_by_another_version_of_jax_are_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    option = replace(PROFILE, cached_profile_result=tmp_path / "profile.json")
    functions = record_measurements(monkeypatch, lambda size: 1.0)
    planned(option)
    count = len(functions)
    monkeypatch.setattr(jax, "__version__", "another")
    planned(option)
    assert len(functions) == 2 * count


def test_a_stage_that_runs_out_of_memory_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(size: int) -> float:
        if size == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
        return 1.0

    record_measurements(monkeypatch, seconds)
    assert [stage.mesh_shape for stage in planned().stages] == [(1,), (1,)]


def test_another_failure_of_a_measurement_is_raised_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(size: int) -> float:
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    record_measurements(monkeypatch, seconds)
    with pytest.raises(jax.errors.JaxRuntimeError, match="broken"):
        planned()


def test_progress_lines_report_measured_and_predicted_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOPAR_PROGRESS", "1")
    record_measurements(monkeypatch, lambda size: 0.002)
    planned()
    lines = [line for line in capsys.readouterr().err.splitlines() if "measured" in line]
    assert lines[0].startswith("stage 1 measured: ")
    assert "F 2 ms, B 2 ms, U 2 ms (predicted F " in lines[0]
    assert len(lines) == 6


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}x",
        '{"format": "something else", "stages": {}}',
        '{"stages": {"a": {"seconds": 1}}}',
        "[]",
    ],
)
def test_a_cache_file_of_another_format_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "results.json"
    file.write_text(text)
    with pytest.raises(
        StageError, match=r"results\.json, which is not what profile=True writes .*delete it"
    ):
        planned(replace(PROFILE, cached_profile_result=file))
    assert file.read_text() == text


def test_a_cache_file_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="there is no folder"):
        planned(replace(PROFILE, cached_profile_result=tmp_path / "missing" / "profile.json"))


def test_a_cache_file_without_profiling_is_refused() -> None:
    with pytest.raises(StageError, match="give both"):
        AutoStageOption(cached_profile_result="profile.json")


def test_profiling_for_a_cluster_of_absent_devices_is_refused() -> None:
    with pytest.raises(
        StageError, match=r"cluster 'dgx_h100' has NVIDIA H100.*here are 8 x cpu.*profile=False"
    ):
        planned(cluster="dgx_h100")


def test_profiling_on_too_few_devices_is_refused() -> None:
    one_host = Cluster.load("cpu-virtual")
    two_hosts = one_host.model_copy(update={"hosts": 2, "inter_host": one_host.intra_host})
    with pytest.raises(
        StageError, match=r"2 x 8 of cluster 'cpu-virtual' needs 16 devices, but here are 8"
    ):
        planned(cluster=two_hosts)


def test_tasks_with_donated_operands_are_timed() -> None:
    method = pipeline(devices=2, num_micro_batches=2)
    executable = autopar.parallelize(stack_step, method=method, donate_argnums=(0,)).get_executable(
        stack_params(2), stack_batch()
    )
    assert isinstance(executable, autopar.Executable)
    seconds = [
        profiling.task_seconds(task_executable.function)
        for task_executable in executable.tasks.values()
    ]
    assert (np.array(seconds) > 0).all()
    assert len(seconds) == 6
