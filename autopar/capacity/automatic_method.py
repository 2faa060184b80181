"""The planning method where the user names none: the fastest pipeline or sharding on any mesh."""

from autopar.methods import PipeshardParallel, PlanningMethod, ShardParallel
from simulator.hardware.cluster import Cluster
from simulator.hardware.heterogeneous import AnyCluster


def automatic_method(cluster: AnyCluster) -> PlanningMethod:
    """Return the method that `--method auto` stands for.

    It compares pipelines of all schedules with the step as one program on each mesh of one or two
    axes. On one device there is only one sharding.

    Args:
        cluster: the cluster to plan for.
    """
    if cluster.num_devices == 1:
        return ShardParallel(num_micro_batches=1)
    return automatic_pipeline("auto")


def automatic_pipeline(schedule: str, num_micro_batches: int | None = None) -> PipeshardParallel:
    """Return the fastest pipeline with layers and stages of the planner's choice.

    Args:
        schedule: the name of the schedule, or "auto".
        num_micro_batches: number of microbatches; if None, the fastest.
    """
    return PipeshardParallel(
        num_micro_batches=num_micro_batches or "auto",
        layer_option="auto",
        stage_option="auto",
        pipeline_schedule=schedule,
    )


def mesh_of_hosts(method: PlanningMethod, cluster: AnyCluster) -> tuple[int, ...] | None:
    """Return the mesh shape of a step that is one program: hosts x devices per host.

    One host is a mesh of one axis.

    Returns:
        The shape; None if the method decides.
    """
    if not isinstance(cluster, Cluster) or method.devices is not None:
        return None
    if method.has_stage_meshes:
        return None
    if cluster.hosts > 1:
        return cluster.hosts, cluster.devices_per_host
    return (cluster.devices_per_host,)
