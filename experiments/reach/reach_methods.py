"""The methods that each public model goes through."""

from collections.abc import Mapping
from types import MappingProxyType

import autopar

SCHEDULES: Mapping[str, int] = MappingProxyType({
    "gpipe": 1,
    "1f1b": 1,
    "1f1b_overlap_friendly": 1,
    "interleaved_1f1b": 2,
    "zero_bubble_h1": 1,
    "zero_bubble_v": 2,
    "dualpipe_v": 2,
})  # fmt: skip
"""The schedules of training, with the number of stages on each submesh."""

CLUSTER = "dgx_h100"
"""The cluster of predictions."""

PREDICTION = f"predict_{CLUSTER}"


def _pipeline(schedule: str, submeshes: int) -> autopar.PipeshardParallel:
    """Return a pipeline over eight devices with four microbatches.

    Args:
        schedule: name of the schedule.
        submeshes: number of submeshes; each has one stage, or two if the schedule has chunks.
    """
    chunks = SCHEDULES[schedule]
    return autopar.PipeshardParallel(
        devices=8,
        num_micro_batches=4,
        pipeline_schedule=schedule,
        layer_option=autopar.AutoLayerOption(submeshes * chunks),
        num_chunks=chunks,
    )


METHODS: Mapping[str, autopar.PlanningMethod] = MappingProxyType({
    "shard_2x4": autopar.ShardParallel((2, 4)),
    "shard_2x4_micro_4": autopar.ShardParallel((2, 4), num_micro_batches=4),
    "zero3_8": autopar.Zero3Parallel((8,)),
    **{
        f"{schedule}_{submeshes}": _pipeline(schedule, submeshes)
        for submeshes in (2, 4)
        for schedule in SCHEDULES
        # DualPipeV needs twice as many microbatches as submeshes
        if (schedule, submeshes) != ("dualpipe_v", 4)
    },
    PREDICTION: autopar.ShardParallel(),
})  # fmt: skip
"""The methods by name; that of `PREDICTION` is planned and predicted for `CLUSTER`."""
