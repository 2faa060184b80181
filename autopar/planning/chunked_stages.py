"""Even stages of schedules with several stages on each submesh, and lower bounds of their time.

Stage construction has one stage on each submesh, so these schedules get even stages on every number
of submeshes that layers and devices allow.
"""

from collections.abc import Sequence
from itertools import pairwise

from autopar.pipeline.pipeline_schedules import schedule_kind
from autopar.pipeline.schedule_kinds import Pipeline, ScheduleError
from autopar.pipeline.stage_options import StageError, even_bounds, logical_shapes
from autopar.plan import PipelineSchedule
from autopar.planning.stage_costs import ClusterStageCosts
from autopar.planning.stage_problem import NO_MEMORY, NoStagesError


def even_mesh_counts(num_layers: int, num_devices: int, num_chunks: int) -> Sequence[int]:
    """Return the numbers of submeshes of equal size, two or more, with enough layers for them.

    Args:
        num_layers: number of layers.
        num_devices: number of devices of the cluster.
        num_chunks: number of stages on each submesh.

    Raises:
        StageError: there are too few layers or devices for two submeshes.
    """
    most = min(num_devices, num_layers // num_chunks)
    counts = [count for count in range(2, most + 1) if num_devices % count == 0]
    if not counts:
        raise StageError(
            f"{num_layers} layer(s) and {num_devices} device(s) are too few for {num_chunks} stages"
            " on each of several submeshes of equal size; use more layers or fewer chunks"
        )
    return counts


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

    Raises:
        StageError: there are too few layers or devices.
        ScheduleError: the schedule needs more microbatches.
        NoStagesError: no even stages fit in memory.
    """
    seconds: list[float] = []
    errors: list[ScheduleError] = []
    counts = even_mesh_counts(costs.ranges.num_layers, num_devices, schedule.num_chunks)
    for count in counts:
        try:
            if _may_fit(costs, num_devices, schedule, num_micro_batches, count):
                least = _least_seconds(costs, num_devices // count, num_micro_batches, solves)
                seconds.append(least / count)
        except ScheduleError as error:
            errors.append(error)
    if len(errors) == len(counts):
        raise errors[0]
    if not seconds:
        raise NoStagesError(NO_MEMORY)
    return min(seconds)


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

    Raises:
        ScheduleError: the schedule needs more microbatches.
    """
    chunks = schedule.num_chunks
    pipeline = Pipeline(num_meshes, num_micro_batches, chunks)
    held = schedule_kind(schedule.name, pipeline).in_flight(0, pipeline)
    ranges = costs.ranges
    bounds = even_bounds(ranges.num_layers, num_meshes * chunks)
    stages = list(pairwise(bounds))
    state_bytes = min(ranges.state_bytes(*stage) for stage in stages)
    saved_bytes = min(ranges.saved_bytes(*stage) for stage in stages)
    share = ranges.partition.step.num_micro_batches / num_micro_batches
    num_bytes = chunks * state_bytes + held * share * saved_bytes
    room = max(pool.budget for pool in costs.pools)
    return num_bytes <= num_devices // num_meshes * room
