"""Even stages of schedules with several stages on each submesh, and lower bounds of their time.

Stage construction has one stage on each submesh, so these schedules get even stages on every number
of submeshes that layers and devices allow.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import inf

from autopar.pipeline.pipeline_schedules import schedule_kind
from autopar.pipeline.schedule_kinds import Pipeline, ScheduleError
from autopar.pipeline.stage_options import even_bounds, logical_shapes
from autopar.plan import PipelineSchedule
from autopar.planning.stage_costs import ClusterStageCosts


def even_mesh_counts(num_layers: int, num_devices: int, num_chunks: int) -> Sequence[int]:
    """Return the numbers of submeshes of equal size, two or more, with enough layers for them.

    Args:
        num_layers: number of layers.
        num_devices: number of devices of the cluster.
        num_chunks: number of stages on each submesh.
    """
    most = min(num_devices, num_layers // num_chunks)
    return [count for count in range(2, most + 1) if num_devices % count == 0]


def least_chunked_seconds(
    costs: ClusterStageCosts,
    num_devices: int,
    schedule: PipelineSchedule,
    num_micro_batches: int,
    *,
    solves: bool,
) -> float:
    """Return a lower bound of the seconds of a step on any of `even_mesh_counts`.

    The slowest submesh takes at least the mean of all submeshes.

    Args:
        costs: costs of stages without a split of their backward pass.
        num_devices: number of devices of the cluster.
        schedule: the schedule, with its number of stages on each submesh.
        num_micro_batches: number of microbatches, at least that of the step.
        solves: whether the bound takes rough solves of layers (`StageCosts.least`). If not, it is
            the work of all layers on one device, divided by the number of devices.

    Returns:
        Seconds; infinite if no even stages fit in memory.
    """
    counts = even_mesh_counts(costs.ranges.num_layers, num_devices, schedule.num_chunks)
    return min(
        (
            _least_seconds(costs, num_devices // count, num_micro_batches, solves) / count
            for count in counts
            if _may_fit(costs, num_devices, schedule, num_micro_batches, count)
        ),
        default=inf,
    )


def _least_seconds(
    costs: ClusterStageCosts, num_devices: int, num_micro_batches: int, solves: bool
) -> float:
    """Return the least seconds of all layers, one after the other on a submesh of any pool."""
    step = costs.ranges.partition.step
    divided = max(1, num_micro_batches // step.num_micro_batches)
    shapes = logical_shapes(num_devices)
    least = [pool.least(0, costs.ranges.num_layers, shapes, divided) for pool in costs.pools]
    if solves:
        return min(cost.step_seconds for cost in least)
    return step.num_micro_batches * min(cost.seconds for cost in least)


def _may_fit(
    costs: ClusterStageCosts,
    num_devices: int,
    schedule: PipelineSchedule,
    num_micro_batches: int,
    num_meshes: int,
) -> bool:
    """Whether as many stages as a submesh has may fit on the first one.

    All of them are taken for the smallest one, sharded evenly over the submesh.
    """
    chunks = schedule.num_chunks
    pipeline = Pipeline(num_meshes, num_micro_batches, chunks)
    try:
        held = schedule_kind(schedule.name, pipeline).in_flight(0, pipeline)
    except ScheduleError:
        return False
    ranges = costs.ranges
    bounds = even_bounds(ranges.num_layers, num_meshes * chunks)
    stages = list(pairwise(bounds))
    state_bytes = min(ranges.state_bytes(*stage) for stage in stages)
    saved_bytes = min(ranges.saved_bytes(*stage) for stage in stages)
    share = ranges.partition.step.num_micro_batches / num_micro_batches
    num_bytes = chunks * state_bytes + held * share * saved_bytes
    room = max(pool.budget for pool in costs.pools)
    return num_bytes <= num_devices // num_meshes * room
