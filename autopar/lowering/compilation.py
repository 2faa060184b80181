"""Lowering of all tasks of a plan, and their compilation for clusters without their devices."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from jax.sharding import Mesh

from autopar.ir.control_flow import endless_loops
from autopar.ir.spec import AnyMesh
from autopar.lowering.planned import PlannedStep
from autopar.lowering.program_memory import MeshMemory
from autopar.lowering.stage_lowering import StageLowering, TaskFunction
from autopar.lowering.target import compile_for, opaque_kernels, target_mesh
from autopar.pipeline.partition import WHOLE_STEP_TASK
from autopar.plan_stages import Stage
from autopar.progress import log_progress, progress_part
from autopar.tracing.shared_traces import shared
from simulator.hardware.cluster import Cluster
from simulator.hardware.description import ClusterError
from simulator.hardware.heterogeneous import AnyCluster
from simulator.hlo import parse_hlo
from simulator.hlo.liveness import TemporaryMemory, op_temporaries, temporary_memory
from simulator.live_ranges import fullest
from simulator.memory import Level, MemoryUse
from simulator.program import Program
from simulator.work import OpList, with_axes

type _Compiled = tuple[OpList, MemoryUse, TemporaryMemory]
"""Operations of a compiled task, the memory that it takes, and what of it is temporary."""


def lower_stage(
    planned: PlannedStep, stage: int, mesh: AnyMesh, donated: frozenset[int] = frozenset()
) -> list[TaskFunction]:
    """Return the tasks of a stage as functions on a mesh.

    Args:
        planned: the step with its plan.
        stage: number of the stage.
        mesh: mesh of the stage, abstract or of devices.
        donated: numbers of the step's inputs whose memory the tasks may reuse.
    """
    last_reads = planned.instructions.last_reads
    lowering = StageLowering(planned.graphs[stage], planned.plan.stages, mesh, donated, last_reads)
    return [function for function in lowering.functions() if function.task.name in planned.tasks]


@contextmanager
def _explained(name: str, cluster: AnyCluster) -> Iterator[None]:
    """Explain errors of code that only a process with the GPU can compile.

    Args:
        name: name of the step.
        cluster: the cluster that it is compiled for.
    """
    try:
        yield
    except RuntimeError as error:
        if "Unknown backend" not in str(error):
            raise
        raise ClusterError(
            f"{name} can't be compiled for {cluster.name} without its devices: it calls Python"
            " (jax.pure_callback, jax.debug.callback or the like);"
            ' fidelity="analytic" predicts it without compilation'
        ) from error


def _compiled(
    function: TaskFunction,
    planned: PlannedStep,
    stage: Stage,
    pool: Cluster,
    mesh: Mesh,
    known: dict[tuple[str, Mesh], _Compiled],
) -> _Compiled:
    """Compile a task, unless the same program is known already.

    Args:
        function: the task.
        planned: the step with its plan.
        stage: the stage of the task.
        pool: the devices of the stage.
        mesh: a mesh of such devices.
        known: what is compiled, by the text of the program and the mesh; the task is added.
    """
    key = function.jitted.lower(*function.in_avals).as_text(), mesh
    if key not in known:
        options = function.on_host, planned.program_budget
        compile_task = partial(compile_for, function.jitted, function.in_avals, pool, *options)
        target = shared((compile_for, *key, *options), compile_task)
        # the plan's warnings say that endless loops count once
        endless = bool(endless_loops(planned.step.jaxpr.eqns))
        ops = parse_hlo(target.hlo_text, endless_once=endless)
        body = with_axes(ops, stage.mesh.axes_of_groups)
        known[key] = body, target.memory, temporary_memory(target.hlo_text)
    return known[key]


def compile_planned(
    planned: PlannedStep, cluster: AnyCluster, donated: frozenset[int]
) -> tuple[Program, float]:
    """Compile the tasks of a plan for `cluster`.

    Each stage is compiled for the devices of its pool. Tasks that are the same program for the same
    devices, such as the tasks of identical layers, are compiled once, also for several plans in
    one `shared_traces`.

    Args:
        planned: the step with its plan.
        cluster: the cluster; this process needs no device of it.
        donated: numbers of the step's inputs whose memory the step may reuse.

    Returns:
        The program with the bodies and the memory of the compiled tasks, and the seconds that
        compilation took.

    Raises:
        ClusterError: a stage has devices that the cluster lacks, or of several pools; or the step
            calls Python or a library that this process cannot compile for the cluster.
    """
    start = time.perf_counter()
    compiled: dict[tuple[str, Mesh], _Compiled] = {}
    bodies: dict[str, OpList] = {}
    op_levels: dict[str, tuple[Level, ...]] = {}
    memory = MeshMemory(planned)
    for number, stage in enumerate(planned.plan.stages):
        pool = cluster.pools[cluster.pool_of(stage.devices)]
        mesh = target_mesh(pool, stage.mesh_shape, stage.axis_names)
        for function in lower_stage(planned, number, mesh, donated):
            share = len(bodies) / len(planned.tasks)
            task = function.task.name
            with (
                _explained(planned.step.name, cluster),
                opaque_kernels(),
                progress_part(share, share + 1 / len(planned.tasks), f"compiling {task}"),
            ):
                body, used, temporaries = _compiled(function, planned, stage, pool, mesh, compiled)
            bodies[task] = body
            log_progress(f"compiled {task}", len(bodies), len(planned.tasks))
            peak = fullest(temporaries.values())
            memory.add_task(function.task, used, peak)
            if function.task == WHOLE_STEP_TASK:
                op_levels[task] = memory.whole_step_levels(op_temporaries(body, temporaries), peak)
    program = planned.program
    levels = memory.levels(program)
    program = replace(
        program,
        bodies=bodies,
        memory=memory.peaks(levels),
        levels=levels,
        op_levels=op_levels,
    )
    return program, time.perf_counter() - start
