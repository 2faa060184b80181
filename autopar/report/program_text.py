"""The program of a step as text at each point of its compilation: StableHLO and HLO."""

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args
from typing import Literal as OneOf

import jax
from jax.sharding import AbstractMesh, AxisType

from autopar.ir.spec import replicated
from autopar.lowering.planned import Planned
from autopar.lowering.stage_lowering import StageLowering
from autopar.pipeline.partitioner import whole_step_partition
from autopar.pipeline.stage_graph import stage_graph
from autopar.plan_stages import Stage, Value

TaskStatus = OneOf["annotated", "partitioned", "optimized"]
"""Points in the compilation of a task: StableHLO with the plan's shardings ("annotated"), HLO of
one device after SPMD partitioning, with collectives ("partitioned"), and its optimized HLO."""

Status = OneOf["traced", "annotated", "partitioned", "optimized"]
"""A `TaskStatus`, or "traced" for the StableHLO of the whole step without shardings."""


def unknown_status(status: object) -> ValueError:
    """Return the error for a status that does not exist."""
    return ValueError(f"unknown status {status!r}; expected one of {', '.join(get_args(Status))}")


def traced(planned: Planned, platform: str) -> str:
    """Return the StableHLO of the step for one device, without shardings.

    Args:
        planned: the step and its plan.
        platform: the platform to lower for, e.g. "cuda".

    Raises:
        ValueError: the plan is a pipeline.
    """
    if not planned.plan.schedule.is_whole_step:
        raise ValueError(
            "status 'traced' for a pipeline, expected 'annotated', 'partitioned' or 'optimized';"
            " its tasks are made from the traced step"
        )
    (stage,) = planned.plan.stages
    single_device = Stage(
        mesh_shape=(1,),
        axis_names=("x",),
        inputs=tuple(map(_replicated, stage.inputs)),
        outputs=tuple(map(_replicated, stage.outputs)),
        devices=(0,),
    )
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,))
    graph = stage_graph(whole_step_partition(planned.step), 0)
    (function,) = StageLowering(graph, [single_device], mesh).functions()
    return annotated(function.jitted, function.in_avals, platform)


def _replicated(value: Value) -> Value:
    return value.model_copy(update={"spec": replicated(len(value.shape))})


def annotated(jitted: jax.stages.Wrapped, avals: Sequence[Any], platform: str) -> str:
    """Return the StableHLO of a function with its shardings.

    Args:
        jitted: the function.
        avals: the shapes and dtypes of its arguments.
        platform: the platform to lower for; its devices need not be present.
    """
    return jitted.trace(*avals).lower(lowering_platforms=(platform,)).as_text()


def partitioned(lowered: jax.stages.Lowered, num_devices: int) -> str:
    """Return the HLO of one device after SPMD partitioning, with its collectives.

    The function is compiled, because XLA partitions only during compilation.

    Args:
        lowered: the lowered function.
        num_devices: number of devices of its mesh.
    """
    if num_devices == 1:
        return lowered.as_text("hlo")  # there is nothing to partition
    with TemporaryDirectory() as folder:
        options = {
            "xla_dump_to": folder,
            "xla_dump_hlo_pass_re": "spmd-partitioning",
            # an option without effect that differs each time bypasses JAX's compilation cache
            "xla_debug_buffer_assignment_show_max": 1 + time.time_ns() % 10**9,
        }
        lowered.compile(compiler_options=options)
        (dump,) = Path(folder).glob("*.after_spmd-partitioning.*")
        return dump.read_text()
