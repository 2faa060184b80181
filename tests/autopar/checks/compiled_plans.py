"""Plans under a cost model of bandwidth alone, and their collectives when compiled."""

import re
from collections import Counter
from functools import cache

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from autopar.ir.spec import LogicalMesh, Spec
from autopar.ir.step_graph import StepGraph
from autopar.lowering.compilation import compile_planned, lower_stage
from autopar.planning.step_planner import make_planned
from autopar.report import PlannedStep, classify, planned_collectives
from autopar.sharding.options import AUTO, ShardingOptions
from simulator.hardware.cluster import Cluster
from simulator.work import Start
from tests.toy_costs import BandwidthOnly

COSTS = BandwidthOnly(bandwidth=1e9, flop_per_s=1e10)
"""No latency, and compute expensive enough to be split: tiny models behave like large ones."""

_COLLECTIVE = re.compile(
    r"%\S+ = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\("
)


def planned(
    step: StepGraph, shape: tuple[int, ...], options: ShardingOptions = AUTO
) -> PlannedStep:
    """Return the plan of `step` on a mesh with axes x and, in two dims, y."""
    mesh = LogicalMesh(shape, ("x", "y")[: len(shape)])
    return make_planned(step, mesh, _cluster(), options, "ShardParallel", COSTS)


def collectives(planned: PlannedStep) -> Counter[str]:
    """Count the collectives of each kind in the program compiled for CPU, without those of scalars.

    The CPU compiler combines the all_reduces of gradients into one, and lowers a reduce_scatter to
    an all_reduce.
    """
    mesh = planned.plan.stages[0].mesh
    devices = np.array(jax.devices()[: mesh.num_devices]).reshape(mesh.shape)
    cpu_mesh = Mesh(devices, mesh.axis_names, axis_types=(AxisType.Auto,) * devices.ndim)
    (function,) = lower_stage(planned, 0, cpu_mesh)
    text = function.jitted.lower(*function.in_avals).compile().as_text() or ""
    matches = _COLLECTIVE.findall(text)
    return Counter(kind.replace("-", "_") for shapes, kind in matches if re.search(r"\[\d", shapes))


def on_gpus(planned: PlannedStep) -> Counter[str]:
    """Count the collectives of each kind in the program compiled for GPUs, without scalars."""
    program, _ = compile_planned(planned, Cluster.load("dgx_a100_80"), frozenset())
    started = (
        collective.collective
        for collective in program.bodies["0S"]
        if isinstance(collective, Start)
    )
    return Counter(collective.kind for collective in started if collective.num_bytes > 8)


def in_plan(planned: PlannedStep) -> Counter[str]:
    """Count the collectives of each kind in the plan, uncombined and without those of scalars."""
    return Counter(kind for kind, num_bytes, _ in planned_collectives(planned) if num_bytes > 8)


def inputs(planned: PlannedStep, start: str = "", end: str = "") -> dict[str, Spec]:
    """Return the specs of the inputs whose paths start and end as given."""
    stage = planned.plan.stages[0]
    return {
        v.path: v.spec for v in stage.inputs if v.path.startswith(start) and v.path.endswith(end)
    }


def kinds(planned: PlannedStep, end: str = "kernel") -> list[str]:
    """Return the kinds of parallelism of the parameters whose paths end as given."""
    return [
        parameter.label
        for parameter in classify(planned).parameters
        if parameter.path.endswith(end)
    ]


@cache
def _cluster() -> Cluster:
    return Cluster.load("cpu-virtual")
