"""The planning methods of `--method`, and planning with them."""

from enum import StrEnum
from typing import Any

from autopar.capacity.automatic_method import automatic_pipeline, mesh_of_hosts
from autopar.command_line.user_step import UserStep
from autopar.layering.layer_clustering import NoLayersError
from autopar.layering.layer_options import LayerError
from autopar.methods import (
    DataParallel,
    PlanningMethod,
    ShardParallel,
    Zero2Parallel,
    Zero3Parallel,
)
from autopar.pipeline.stage_options import StageError
from autopar.plan import Plan
from autopar.planning.plan_step import plan_step
from autopar.planning.stage_problem import NoStagesError
from autopar.sharding.selection_problem import InfeasibleError
from simulator.hardware.description import ClusterError
from simulator.hardware.heterogeneous import AnyCluster, HeterogeneousCluster, load_cluster


class MethodName(StrEnum):
    """A method; "auto" is the method of the step, or the fastest pipeline or sharding."""

    AUTO = "auto"
    SHARD = "shard"
    DATA = "data"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    PIPELINE = "pipeline"


_WHOLE_STEP: dict[MethodName, type[PlanningMethod]] = {
    MethodName.SHARD: ShardParallel,
    MethodName.DATA: DataParallel,
    MethodName.ZERO2: Zero2Parallel,
    MethodName.ZERO3: Zero3Parallel,
}

NoFitError = (InfeasibleError, NoStagesError, StageError, LayerError, NoLayersError, ClusterError)
"""Errors of a method without a plan for a step; another method may have one."""


def cluster_of_hosts(name: str, hosts: int | None) -> AnyCluster:
    """Return a cluster by its name or file, with another number of hosts if one is given.

    Raises:
        ClusterError: there is no such cluster, or it can't have as many hosts.
    """
    cluster = load_cluster(name)
    if hosts is None:
        return cluster
    if isinstance(cluster, HeterogeneousCluster):
        raise ClusterError(
            f"{name!r} has pools of unlike hosts, whose number is fixed; leave --hosts out"
        )
    if hosts > 1 and cluster.inter_host is None:
        raise ClusterError(
            f"{name!r} has no inter_host, the link between hosts; take another cluster, or --hosts"
            " 1"
        )
    return cluster.with_size(hosts=hosts)


def plan_with(
    name: MethodName, step: UserStep, cluster: AnyCluster, micro_batches: int | None
) -> Plan:
    """Plan a step with a method.

    A step that is not cut into stages has a mesh of hosts x devices per host; one host is a mesh of
    one axis.

    Args:
        name: the method.
        step: the step.
        cluster: the cluster.
        micro_batches: number of microbatches; if None, the fastest for "auto" and "pipeline", else
            one.
    """
    if name is MethodName.AUTO and step.method is not None:
        method = step.method
    else:
        method = method_of_name(name, cluster, micro_batches)
    options: dict[str, Any] = step.batch_options
    shape = mesh_of_hosts(method, cluster)
    return plan_step(
        step.fun, step.args, method=method, cluster=cluster, mesh_shape=shape, **options
    )


def method_of_name(
    name: MethodName, cluster: AnyCluster, micro_batches: int | None
) -> PlanningMethod:
    """Return a method by its name; see `plan_with`."""
    if name in _WHOLE_STEP or cluster.num_devices == 1:
        return _WHOLE_STEP.get(name, ShardParallel)(num_micro_batches=micro_batches or 1)
    return automatic_pipeline("auto" if name is MethodName.AUTO else "1f1b", micro_batches)
