"""The method with given degrees of data, operator and pipeline parallelism."""

from dataclasses import asdict
from typing import Any

import jax
from jax.sharding import Mesh

from autopar.checks import FLAG, OptionError, checked, integer
from autopar.devices import DEVICES, Devices, device_mesh, requested_mesh
from autopar.layering.layer_options import AutoLayerOption
from autopar.methods import PipeshardParallel, PlanningMethod, ShardParallel
from autopar.pipeline.stage_options import UniformStageOption
from autopar.sharding.options import AUTO, ShardingOptions


def get_3d_parallel_method(
    num_micro_batches: int,
    data_parallel: int = -1,
    operator_parallel: int = 1,
    pipeline_parallel: int = 1,
    devices: Devices = None,
    allow_degenerate_into_shard_parallel: bool = True,
    **options: Any,
) -> PlanningMethod:
    """Return a method with given degrees of data, operator and pipeline parallelism.

    This is the configuration of Megatron-LM: dp x tp x pp. The stages are uniform; within a stage,
    the planner still chooses the sharding of each value on a (data_parallel, operator_parallel)
    mesh.

    Args:
        num_micro_batches: number of microbatches.
        data_parallel: degree of data parallelism within a stage; -1 for the number of devices
            divided by the other two degrees.
        operator_parallel: degree of operator (tensor) parallelism within a stage.
        pipeline_parallel: number of stages.
        devices: a number or a list of devices; all by default.
        allow_degenerate_into_shard_parallel: return a `ShardParallel`, which shards the step as a
            whole, if `pipeline_parallel` is 1.
        options: further options of `PipeshardParallel`. By default layers come from decorators, or
            are found automatically, one for each stage.

    Returns:
        A `PipeshardParallel` or a `ShardParallel`.

    Raises:
        OptionError: the product of the degrees is not the number of devices, or an option has a
            type or a value that is not allowed. An `OptionError` is a `ValueError`.

    Example:
        >>> autopar.get_3d_parallel_method(8, data_parallel=2, operator_parallel=2,
        ...                                pipeline_parallel=2, devices=8)
    """
    operator_parallel = checked("operator_parallel", operator_parallel, integer())
    pipeline_parallel = checked("pipeline_parallel", pipeline_parallel, integer())
    data_parallel = checked("data_parallel", data_parallel, integer(-1))
    degenerates = checked(
        "allow_degenerate_into_shard_parallel", allow_degenerate_into_shard_parallel, FLAG
    )
    devices = checked("devices", devices, DEVICES)
    count = _device_count(devices)
    if data_parallel == -1:
        data_parallel = max(1, count // (operator_parallel * pipeline_parallel))
    if data_parallel * operator_parallel * pipeline_parallel != count:
        raise OptionError(
            f"data_parallel={data_parallel} x operator_parallel={operator_parallel}"
            f" x pipeline_parallel={pipeline_parallel} is not the number of devices, {count}"
        )
    shape = (data_parallel, operator_parallel)
    sharding = ShardingOptions(batch_axis="x") if data_parallel > 1 else AUTO
    options = {
        "layer_option": AutoLayerOption(pipeline_parallel),
        "stage_option": UniformStageOption(
            pipeline_parallel, (1, data_parallel * operator_parallel), shape
        ),
        **options,
    }
    method = PipeshardParallel(
        devices, num_micro_batches, default_auto_sharding_option=sharding, **options
    )
    if pipeline_parallel > 1 or not degenerates:
        return method
    mesh = _reshaped(devices, shape)
    return ShardParallel(
        mesh,
        num_micro_batches,
        method.cluster,
        method.memory_budget,
        sharding,
        **asdict(method.exactness),
    )


def _reshaped(devices: Devices, shape: tuple[int, ...]) -> Devices:
    """Return the same devices as a mesh of another shape, with the default axis names."""
    match devices:
        case Mesh():
            return device_mesh(list(devices.devices.flat), shape)
        case [jax.Device(), *_]:
            return device_mesh(devices, shape)
        case _:
            return shape


def _device_count(devices: Devices) -> int:
    """Return the number of devices that `devices` stands for."""
    return len(jax.devices()) if devices is None else requested_mesh(devices, 0).num_devices
