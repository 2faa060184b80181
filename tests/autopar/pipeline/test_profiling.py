"""Profiled stages: measured seconds decide, and each is measured once and cached in a file."""

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

HERE = Cluster.load("cpu-virtual").first_devices(2)
PROFILE = AutoStageOption(profile=True)


def planned(
    option: AutoStageOption = PROFILE, layers: int = 2, cluster: Cluster | str = HERE
) -> autopar.Plan:
    args = stack_params(layers), stack_batch()
    return autopar.plan_step(
        stack_step, args, method=pipeline(devices=None, stage_option=option), cluster=cluster
    )


def takes(monkeypatch: pytest.MonkeyPatch, seconds: Any) -> list[TaskFunction]:
    """Make tasks take `seconds`, and return the growing list of tasks that are measured."""
    asked: list[TaskFunction] = []

    def measured(function: TaskFunction) -> float:
        asked.append(function)
        return seconds(function.in_shardings[0].mesh.size)

    monkeypatch.setattr(profiling, "task_seconds", measured)
    return asked


def test_a_pipeline_of_measured_stages_trains_as_on_one_device(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    method = pipeline(devices=2, stage_option=replace(PROFILE, cached_profile_result=file))
    assert_as_serial(stack_step, method, stack_params(2), stack_batch())
    stages = json.loads(file.read_text())["stages"].values()
    # Both layers, or either of them, on one device or two.
    assert sorted(stage["mesh_shape"] for stage in stages) == [[1], [1], [1], [2], [2], [2]]
    assert all(set(stage["seconds"]) == {"F", "B", "U"} for stage in stages)
    assert all(0 < seconds < 10 for stage in stages for seconds in stage["seconds"].values())
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(("seconds", "stages"), [({1: 1.0, 2: 0.1}, 1), ({1: 1.0, 2: 3.0}, 2)])
def test_measured_seconds_decide(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], stages: int
) -> None:
    """Three tasks each: one stage on both devices takes 0.1 or 3 s for each, two stages on one device each 1."""
    takes(monkeypatch, seconds.__getitem__)
    plan = planned()
    assert len(plan.stages) == stages
    # one stage: forward and backward of 4 microbatches and the update, 9 tasks; two: one more microbatch to fill the pipeline
    assert plan.predicted_seconds == pytest.approx({1: 0.9, 2: 11.0}[stages], rel=1e-3)


def test_layers_that_are_alike_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = takes(monkeypatch, lambda size: 1.0)
    planned(layers=6)
    # Runs of 1 to 4 layers at the beginning, inside or at the end, of 5 at either end, all 6: 15 kinds of 21 runs; on 1 device and 2.
    assert len(asked) == 2 * 15 * len(("F", "B", "U"))


def test_what_is_in_the_file_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    option = replace(PROFILE, cached_profile_result=tmp_path / "profile.json")
    with monkeypatch.context() as patch:
        takes(patch, lambda size: 1.0 / size)
        plan = planned(option)
    asked = takes(monkeypatch, lambda size: 100.0)
    again = planned(option)
    assert not asked
    assert again == plan.model_copy(update={"planning_seconds": again.planning_seconds})


def test_another_version_of_jax_is_measured_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    option = replace(PROFILE, cached_profile_result=tmp_path / "profile.json")
    asked = takes(monkeypatch, lambda size: 1.0)
    planned(option)
    count = len(asked)
    monkeypatch.setattr(jax, "__version__", "another")
    planned(option)
    assert len(asked) == 2 * count


def test_a_stage_that_runs_out_of_memory_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(size: int) -> float:
        if size == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
        return 1.0

    takes(monkeypatch, seconds)
    assert [stage.mesh_shape for stage in planned().stages] == [(1,), (1,)]


def test_another_failure_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(size: int) -> float:
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    takes(monkeypatch, seconds)
    with pytest.raises(jax.errors.JaxRuntimeError, match="broken"):
        planned()


def test_progress_tells_what_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOPAR_PROGRESS", "1")
    takes(monkeypatch, lambda size: 0.002)
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
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "results.json"
    file.write_text(text)
    with pytest.raises(
        StageError, match=r"results\.json, which is not what profile=True writes .*delete it"
    ):
        planned(replace(PROFILE, cached_profile_result=file))
    assert file.read_text() == text


def test_a_file_in_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="there is no folder"):
        planned(replace(PROFILE, cached_profile_result=tmp_path / "missing" / "profile.json"))


def test_a_file_without_measuring_is_refused() -> None:
    with pytest.raises(StageError, match="give both"):
        AutoStageOption(cached_profile_result="profile.json")


def test_a_cluster_that_is_not_here_is_refused() -> None:
    with pytest.raises(
        StageError, match=r"cluster 'dgx_h100' has NVIDIA H100.*here are 8 x cpu.*profile=False"
    ):
        planned(cluster="dgx_h100")


def test_too_few_devices_are_refused() -> None:
    one = Cluster.load("cpu-virtual")
    two = one.model_copy(update={"hosts": 2, "inter_host": one.intra_host})
    with pytest.raises(
        StageError, match=r"2 x 8 of cluster 'cpu-virtual' needs 16 devices, but here are 8"
    ):
        planned(cluster=two)


def test_a_task_is_timed_on_zeros_also_where_it_uses_its_operands_up() -> None:
    method = pipeline(devices=2, num_micro_batches=2)
    executable = autopar.parallelize(stack_step, method=method, donate_argnums=(0,)).get_executable(
        stack_params(2), stack_batch()
    )
    assert isinstance(executable, autopar.Executable)
    seconds = [profiling.task_seconds(each.function) for each in executable.tasks.values()]
    assert (np.array(seconds) > 0).all()
    assert len(seconds) == 6
