"""Text of a step's program at each stage of its compilation."""

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args
from typing import Literal as OneOf

import jax
from jax.sharding import AbstractMesh, AxisType

from autopar.lower import jit_step
from autopar.plan import Stage
from autopar.planned import Planned
from autopar.sharding.spec import replicated

if TYPE_CHECKING:
    from autopar.runtime.executable import Executable

Status = OneOf["traced", "annotated", "partitioned", "optimized"]
"""StableHLO as the step was written; StableHLO with the plan's shardings; HLO of one device right after partitioning, its
collectives in place; and HLO of one device as it runs."""


def hlo_text(executable: "Executable", status: Status) -> str:
    """The program of an executable at one stage of its compilation.

    "partitioned" compiles the step once more, since only the compiler knows.

    Raises:
        ValueError: an unknown status.
    """
    match status:
        case "traced":
            return traced(executable, executable.mesh.devices.flat[0].platform)
        case "annotated":
            return _lowered(executable).as_text()
        case "partitioned":
            return partitioned(_lowered(executable), executable.mesh.devices.size)
        case "optimized":
            return executable.compiled.as_text() or ""
        case other:
            raise unknown_status(other)


def unknown_status(status: object) -> ValueError:
    """The error for a status that there is none of."""
    return ValueError(f"unknown status {status!r}; expected one of {', '.join(get_args(Status))}")


def _lowered(executable: "Executable") -> jax.stages.Lowered:
    return executable.jitted.lower(*executable.step.in_avals)


def traced(planned: Planned, platform: str) -> str:
    """StableHLO of the step for one device, with nothing pinned."""
    (stage,) = planned.plan.stages
    bare = Stage(
        mesh_shape=(1,) * len(stage.mesh_shape),
        axis_names=stage.axis_names,
        inputs=tuple(v.model_copy(update={"spec": replicated(len(v.shape))}) for v in stage.inputs),
        outputs=tuple(v.model_copy(update={"spec": replicated(len(v.shape))}) for v in stage.outputs),
    )
    mesh = AbstractMesh(bare.mesh_shape, bare.axis_names, axis_types=(AxisType.Auto,) * len(bare.mesh_shape))
    plan = planned.plan.model_copy(update={"stages": (bare,)})
    return annotated(jit_step(planned.step, plan, mesh), planned.step.in_avals, platform)


def annotated(jitted: jax.stages.Wrapped, avals: Sequence[Any], platform: str) -> str:
    """StableHLO of a function with its shardings, for devices that need not be here."""
    return jitted.trace(*avals).lower(lowering_platforms=(platform,)).as_text()


def partitioned(lowered: jax.stages.Lowered, num_devices: int) -> str:
    """HLO of one device right after partitioning, its collectives in place; compiles, since only the compiler knows."""
    if num_devices == 1:
        return lowered.as_text("hlo")  # there is nothing to partition
    with TemporaryDirectory() as folder:
        lowered.compile(
            compiler_options={
                "xla_dump_to": folder,
                "xla_dump_hlo_pass_re": "spmd-partitioning",
                "xla_debug_buffer_assignment_show_max": 1 + time.time_ns() % 10**9,  # not in JAX's compilation cache
            }
        )
        (dump,) = Path(folder).glob("*.after_spmd-partitioning.*")
        return dump.read_text()
