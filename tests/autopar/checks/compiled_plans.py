"""Plans by a cost model of bandwidth alone, and what XLA makes of them for virtual CPU devices and for GPUs that are not here."""

import re
from collections import Counter
from functools import cache

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from autopar.ir.spec import LogicalMesh, Spec
from autopar.ir.step_graph import StepGraph
from autopar.lowering.compilation import compile_planned, lower_stage
from autopar.planning.step_planner import make_plan
from autopar.report import PlannedStep, classify, planned_collectives
from autopar.sharding.options import AUTO, ShardingOptions
from simulator.costs.cost_model import BandwidthOnly
from simulator.hardware.cluster import Cluster
from simulator.work import Start

COSTS = BandwidthOnly(bandwidth=1e9, flop_per_s=1e10)
"""No latency, and compute dear enough to be shared: tiny models behave like big ones."""

_COLLECTIVE = re.compile(
    r"%\S+ = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\("
)


def planned(
    step: StepGraph, shape: tuple[int, ...], options: ShardingOptions = AUTO
) -> PlannedStep:
    """The plan of `step` on a mesh with axes x (and y)."""
    mesh = LogicalMesh(shape, ("x", "y")[: len(shape)])
    return PlannedStep(step, make_plan(step, mesh, _cluster(), options, "ShardParallel", COSTS))


def collectives(planned: PlannedStep) -> Counter[str]:
    """How many collectives of each kind the compiled program has, but for those of scalars.

    The CPU compiler combines all_reduces (those of gradients become one), and has no reduce_scatter: it is an all_reduce, too.
    """
    mesh = planned.plan.stages[0].mesh
    devices = np.array(jax.devices()[: mesh.num_devices]).reshape(mesh.shape)
    here = Mesh(devices, mesh.axis_names, axis_types=(AxisType.Auto,) * devices.ndim)
    (function,) = lower_stage(planned, 0, here)
    text = function.jitted.lower(*function.in_avals).compile().as_text() or ""
    found = _COLLECTIVE.findall(text)
    return Counter(kind.replace("-", "_") for shapes, kind in found if re.search(r"\[\d", shapes))


def on_gpus(planned: PlannedStep) -> Counter[str]:
    """The same in the program that XLA compiles for GPUs."""
    program, _ = compile_planned(planned, Cluster.load("dgx_a100_80"), frozenset())
    started = (each.collective for each in program.bodies["0S"] if isinstance(each, Start))
    return Counter(each.kind for each in started if each.num_bytes > 8)


def in_plan(planned: PlannedStep) -> Counter[str]:
    """How many collectives of each kind the plan has, before any are combined, but for those of scalars."""
    return Counter(kind for kind, num_bytes, _ in planned_collectives(planned) if num_bytes > 8)


def inputs(planned: PlannedStep, start: str = "", end: str = "") -> dict[str, Spec]:
    """Specs of the inputs whose paths start and end so."""
    stage = planned.plan.stages[0]
    return {
        v.path: v.spec for v in stage.inputs if v.path.startswith(start) and v.path.endswith(end)
    }


def kinds(planned: PlannedStep, end: str = "kernel") -> list[str]:
    """How each parameter whose path ends so is parallel, in order."""
    return [each.label for each in classify(planned).parameters if each.path.endswith(end)]


@cache
def _cluster() -> Cluster:
    return Cluster.load("cpu-virtual")
