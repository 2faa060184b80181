"""Stage options: how layers and devices are assigned to stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf, prod
from pathlib import Path
from typing import Literal, get_args

from autopar.checks import (
    FLAG,
    NONE,
    PATH,
    SHAPE,
    AllowedValues,
    check,
    instance,
    integer,
    items,
    one_of,
    real,
)
from autopar.sharding.options import AUTO, ShardingOptions


class StageError(ValueError):
    """Layers cannot be placed on devices as requested."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The layers and devices of one stage.

    Attributes:
        layers: its layers, consecutive.
        devices: numbers of its devices in the cluster.
        shapes: shapes of logical mesh to choose from.
        options: limits on its shardings.
    """

    layers: tuple[int, ...]
    devices: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    options: ShardingOptions = AUTO


_PHYSICAL = items(integer(), "(hosts, devices per host), such as (1, 4)", least=2, most=2)


type Placement = Callable[[int], Sequence[int]]
"""(number of submeshes) -> the submesh of each stage."""


@dataclass(frozen=True, slots=True)
class UniformStageOption:
    """Stages with the same number of devices and, as far as possible, of layers.

    Attributes:
        num_stages: number of stages; by default the number of layers.
        submesh_physical_shape: (hosts, devices per host) of each stage; by default an equal share
            of the cluster's devices.
        submesh_logical_shape: shape of each stage's logical mesh; by default the cheapest.

    Raises:
        StageError: an option has another type, or the two shapes have different numbers of devices.
    """

    num_stages: int | None = None
    submesh_physical_shape: tuple[int, int] | None = None
    submesh_logical_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check(
            self,
            StageError,
            num_stages=integer() | NONE,
            submesh_physical_shape=_PHYSICAL | NONE,
            submesh_logical_shape=SHAPE | NONE,
        )
        if self.submesh_physical_shape is not None and self.submesh_logical_shape is not None:
            _check_submesh(self.submesh_physical_shape, self.submesh_logical_shape)

    def assign(
        self,
        num_layers: int,
        num_devices: int,
        options: ShardingOptions,
        num_chunks: int,
        placement: Placement,
    ) -> list[Assignment]:
        """Return the layers and devices of each stage.

        Args:
            num_layers: number of layers of the step.
            num_devices: number of devices of the cluster.
            options: limits on shardings.
            num_chunks: number of stages on each submesh.
            placement: the submesh of each stage.

        Raises:
            StageError: there are too few layers or devices.
        """
        stages = num_layers if self.num_stages is None else self.num_stages
        if stages > num_layers:
            raise StageError(
                f"{stages} stages from {num_layers} layer(s); a stage needs at least one layer"
            )
        if stages % num_chunks:
            raise StageError(
                f"{stages} stages can't be shared by submeshes with {num_chunks} chunks each; use a"
                f" multiple of {num_chunks} as num_stages, or another num_chunks"
            )
        num_meshes = stages // num_chunks
        num_devices_each = (
            num_devices // num_meshes
            if self.submesh_physical_shape is None
            else prod(self.submesh_physical_shape)
        )
        if num_devices_each < 1 or num_devices_each * num_meshes > num_devices:
            raise StageError(
                f"{num_meshes} submeshes of {max(num_devices_each, 1)} device(s) need"
                f" {num_meshes * max(num_devices_each, 1)}, there are {num_devices}; use fewer"
                " stages, smaller submeshes or more devices"
            )
        shapes = (
            logical_shapes(num_devices_each)
            if self.submesh_logical_shape is None
            else (tuple(self.submesh_logical_shape),)
        )
        if prod(shapes[0]) != num_devices_each:
            raise StageError(
                f"submesh_logical_shape {shapes[0]} is of {prod(shapes[0])} device(s), but each of"
                f" {num_meshes} submesh(es) has {num_devices_each}; give"
                " submesh_physical_shape=(hosts, devices per host) too, or a shape of as many"
            )
        bounds = even_bounds(num_layers, stages)
        assignments = []
        for stage, mesh in enumerate(placement(num_meshes)):
            layers = tuple(range(bounds[stage], bounds[stage + 1]))
            devices = tuple(range(mesh * num_devices_each, (mesh + 1) * num_devices_each))
            assignments.append(Assignment(layers, devices, shapes, options))
        return assignments


@dataclass(frozen=True, slots=True)
class ManualStageOption:
    """Stages that are given one by one.

    Attributes:
        forward_stage_layer_ids: layers of each stage.
        submesh_physical_shapes: (hosts, devices per host) of each stage.
        submesh_logical_shapes: shape of each stage's logical mesh.
        submesh_autosharding_option_dicts: for each stage, fields of `ShardingOptions` to replace.
        submesh_devices: numbers in the cluster of each stage's devices; by default stages follow
            one another.

    Raises:
        StageError: an option has another type, or there is not one entry for each stage.
    """

    forward_stage_layer_ids: Sequence[Sequence[int]]
    submesh_physical_shapes: Sequence[tuple[int, int]]
    submesh_logical_shapes: Sequence[tuple[int, ...]]
    submesh_autosharding_option_dicts: Sequence[dict] = field(default_factory=tuple)
    submesh_devices: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        numbers = items(integer(0), "whole numbers", least=1)
        check(
            self,
            StageError,
            forward_stage_layer_ids=items(
                numbers, "the layers of each stage, such as [[0, 1], [2]]", least=1
            ),
            submesh_physical_shapes=items(
                _PHYSICAL, "(hosts, devices per host) of each stage, such as [(1, 4), (1, 4)]"
            ),
            submesh_logical_shapes=items(
                SHAPE, "a mesh shape for each stage, such as [(2, 2), (4,)]"
            ),
            submesh_autosharding_option_dicts=items(
                _CHANGES, "a dict of fields of autopar.ShardingOptions for each stage"
            ),
            submesh_devices=items(
                numbers, "the numbers of the devices of each stage, such as [[0, 1], [2, 3]]"
            ),
        )
        count = len(self.forward_stage_layer_ids)
        changes = self.submesh_autosharding_option_dicts
        given = (self.submesh_physical_shapes, self.submesh_logical_shapes, changes or [{}] * count)
        lengths = [len(values) for values in given]
        if any(length != count for length in lengths):
            raise StageError(
                f"{count} stages, but {lengths} physical shapes, logical shapes and options;"
                " give each stage one of each"
            )
        for physical, logical in zip(
            self.submesh_physical_shapes, self.submesh_logical_shapes, strict=True
        ):
            _check_submesh(physical, logical)

    def assign(
        self,
        num_layers: int,
        num_devices: int,
        options: ShardingOptions,
        num_chunks: int,
        placement: Placement,
    ) -> list[Assignment]:
        """Return the layers and devices of each stage.

        Args:
            num_layers: number of layers of the step.
            num_devices: number of devices of the cluster.
            options: limits on shardings.
            num_chunks: number of stages on each submesh, which must be 1.
            placement: the submesh of each stage.

        Raises:
            StageError: the stages do not have every layer once, or need other devices than there
                are.
        """
        if num_chunks != 1:
            raise StageError(
                "a manual stage option gives each stage a submesh of its own; use a"
                " UniformStageOption"
            )
        stages = [tuple(layers) for layers in self.forward_stage_layer_ids]
        if [layer for layers in stages for layer in layers] != list(range(num_layers)):
            raise StageError(
                f"stages of layers {stages}, expected each of the {num_layers} layers once, in"
                " order"
            )
        changes = self.submesh_autosharding_option_dicts or [{}] * len(stages)
        return [
            Assignment(layers, devices, (tuple(logical),), replace(options, **change))
            for layers, devices, logical, change in zip(
                stages,
                self._devices(num_devices),
                self.submesh_logical_shapes,
                changes,
                strict=True,
            )
        ]

    def _devices(self, num_devices: int) -> list[tuple[int, ...]]:
        sizes = [prod(shape) for shape in self.submesh_physical_shapes]
        if not self.submesh_devices:
            ends = list(accumulate(sizes))
            if ends[-1] > num_devices:
                raise StageError(
                    f"submesh_physical_shapes {list(self.submesh_physical_shapes)} need"
                    f" {ends[-1]} devices, there are {num_devices}; use smaller submeshes or"
                    " more devices"
                )
            return [tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
        devices = [tuple(stage_devices) for stage_devices in self.submesh_devices]
        if [len(stage_devices) for stage_devices in devices] != sizes:
            raise StageError(
                f"submesh_devices are {devices}, but the submeshes have {sizes} devices; list as"
                " many devices of each stage as submesh_physical_shapes says"
            )
        every = sorted(device for stage_devices in devices for device in stage_devices)
        if len(set(every)) < len(every) or not 0 <= every[0] <= every[-1] < num_devices:
            raise StageError(
                f"submesh_devices are {devices}, expected numbers from 0 to {num_devices - 1},"
                " each at most once"
            )
        return devices


def _check_submesh(physical: tuple[int, int], logical: tuple[int, ...]) -> None:
    if prod(physical) != prod(logical):
        raise StageError(
            f"a submesh of {physical} devices can't be seen as a mesh of shape {logical}"
        )


def _changes(value: object) -> dict:
    fields = instance("", dict).take(value)
    replace(AUTO, **fields)
    return fields


_CHANGES = AllowedValues("", _changes)

PhysicalSpace = Literal["power_of_two", "small_power_of_two", "whole_hosts", "all"]
"""Submeshes that stages may get.

"power_of_two" are powers of two devices of a host and powers of two hosts; "small_power_of_two" are
the same with at most four hosts; "whole_hosts" are the same with any number of hosts; "all" are any
number of devices of a host, and of hosts.
"""

LogicalSpace = Literal[
    "single_node_model_parallel", "same_as_physical", "data_parallel_only", "all"
]
"""Shapes of logical mesh that a submesh may have.

"single_node_model_parallel" is one axis, or two of which the second stays within a host;
"same_as_physical" is hosts x devices of a host; "data_parallel_only" is one axis, for the batch;
"all" is one axis, or any two.
"""


@dataclass(frozen=True, slots=True)
class AutoStageOption:
    """Stages with the least predicted time of a step that fit in memory (Alpa, OSDI'22, section 5).

    Attributes:
        submesh_physical_shape_space: submeshes to choose from; see `PhysicalSpace`.
        submesh_logical_shape_space: logical meshes to choose from; see `LogicalSpace`.
        stage_imbalance_tolerance: relative difference that is allowed between a stage's share of
            the work and its share of the devices.
        leave_idle: whether devices may be left without work.
        min_stages: least number of stages.
        profile: measure stages on the devices of this process instead of predicting their time.
            Every stage that may be part of the optimum is compiled and run, once for all that are
            alike.
        cached_profile_result: file to keep measurements in.

    Raises:
        StageError: an option has another type, or there is a file and no profiling.
    """

    submesh_physical_shape_space: PhysicalSpace = "power_of_two"
    submesh_logical_shape_space: LogicalSpace = "single_node_model_parallel"
    stage_imbalance_tolerance: float = inf
    leave_idle: bool = False
    min_stages: int = 1
    profile: bool = False
    cached_profile_result: str | Path | None = None

    def __post_init__(self) -> None:
        check(
            self,
            StageError,
            submesh_physical_shape_space=one_of(*get_args(PhysicalSpace)),
            submesh_logical_shape_space=one_of(*get_args(LogicalSpace)),
            stage_imbalance_tolerance=real(),
            leave_idle=FLAG,
            min_stages=integer(),
            profile=FLAG,
            cached_profile_result=PATH | NONE,
        )
        if self.cached_profile_result is not None and not self.profile:
            raise StageError(
                f"cached_profile_result is {self.cached_profile_result}, which keeps what"
                " profile=True measures; give both"
            )


type StageOption = UniformStageOption | ManualStageOption | AutoStageOption


def even_bounds(num_layers: int, num_stages: int) -> list[int]:
    """Return the first layer of each of as even stages as possible, and the number of layers."""
    return [num_layers * stage // num_stages for stage in range(num_stages + 1)]


def logical_shapes(num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a logical mesh of `num_devices` devices with at most two axes."""
    pairs = [
        (a, num_devices // a)
        for a in range(2, num_devices)
        if num_devices % a == 0 and a <= num_devices // a
    ]
    return ((num_devices,), *pairs)
