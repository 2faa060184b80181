"""Text of a step's program at each stage of its compilation."""

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
from autopar.plan import Stage

TaskStatus = OneOf["annotated", "partitioned", "optimized"]
"""StableHLO with the plan's shardings; HLO of one device right after partitioning, its collectives in place; and HLO of one device
as it runs."""

Status = OneOf["traced", "annotated", "partitioned", "optimized"]
"""StableHLO of the step as it was written, or of its tasks with one of `TaskStatus`."""


def unknown_status(status: object) -> ValueError:
    """Return the error for a status that does not exist."""
    return ValueError(f"unknown status {status!r}; expected one of {', '.join(get_args(Status))}")


def traced(planned: Planned, platform: str) -> str:
    """Return the StableHLO of the step for one device, with nothing pinned.

    Raises:
        ValueError: the step is cut into stages.
    """
    if not planned.plan.schedule.is_whole_step:
        raise ValueError(
            "status 'traced' for a pipeline, expected 'annotated', 'partitioned' or 'optimized'; its tasks are made from the traced step"
        )
    (stage,) = planned.plan.stages
    bare = Stage(
        mesh_shape=(1,),
        axis_names=("x",),
        inputs=tuple(v.model_copy(update={"spec": replicated(len(v.shape))}) for v in stage.inputs),
        outputs=tuple(
            v.model_copy(update={"spec": replicated(len(v.shape))}) for v in stage.outputs
        ),
        devices=(0,),
    )
    mesh = AbstractMesh(bare.mesh_shape, bare.axis_names, axis_types=(AxisType.Auto,))
    (function,) = StageLowering(
        stage_graph(whole_step_partition(planned.step), 0), [bare], mesh
    ).functions()
    return annotated(function.jitted, function.in_avals, platform)


def annotated(jitted: jax.stages.Wrapped, avals: Sequence[Any], platform: str) -> str:
    """Return the StableHLO of a function with its shardings, for devices that need not be here."""
    return jitted.trace(*avals).lower(lowering_platforms=(platform,)).as_text()


def partitioned(lowered: jax.stages.Lowered, num_devices: int) -> str:
    """Return the HLO of one device right after partitioning, its collectives in place; compiles, since only the compiler knows."""
    if num_devices == 1:
        return lowered.as_text("hlo")  # there is nothing to partition
    with TemporaryDirectory() as folder:
        lowered.compile(
            compiler_options={
                "xla_dump_to": folder,
                "xla_dump_hlo_pass_re": "spmd-partitioning",
                "xla_debug_buffer_assignment_show_max": 1
                + time.time_ns() % 10**9,  # not in JAX's compilation cache
            }
        )
        (dump,) = Path(folder).glob("*.after_spmd-partitioning.*")
        return dump.read_text()
