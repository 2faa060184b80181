"""Which layers form a stage and which devices it gets, as the user says: evenly, one by one, or to be found."""

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
    """Layers can't be put on devices as asked."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a stage consists of.

    Attributes:
        layers: its layers, consecutive.
        devices: numbers of its devices in the cluster.
        shapes: logical mesh shapes to choose from.
        options: limits on its shardings.
    """

    layers: tuple[int, ...]
    devices: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    options: ShardingOptions = AUTO


_PHYSICAL = items(integer(), "(hosts, devices per host), such as (1, 4)", least=2, most=2)


type Placement = Callable[[int], Sequence[int]]
"""The number of submeshes -> for each stage the number of its submesh."""


@dataclass(frozen=True, slots=True)
class UniformStageOption:
    """Stages with the same number of devices, and of layers as far as possible.

    Attributes:
        num_stages: how many; by default as many as there are layers.
        submesh_physical_shape: (hosts, devices per host) of each stage; by default the cluster's devices are shared evenly.
        submesh_logical_shape: logical mesh shape of each stage; by default the cheapest is taken.
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
        """Return the stages, `num_chunks` on each submesh. Raises StageError when there are too few layers or devices."""
        stages = num_layers if self.num_stages is None else self.num_stages
        if stages > num_layers:
            raise StageError(
                f"{stages} stages from {num_layers} layer(s); a stage needs at least one layer"
            )
        if stages % num_chunks:
            raise StageError(
                f"{stages} stages can't be shared by submeshes with {num_chunks} chunks each"
            )
        count = stages // num_chunks
        each = (
            num_devices // count
            if self.submesh_physical_shape is None
            else prod(self.submesh_physical_shape)
        )
        if each < 1 or each * count > num_devices:
            raise StageError(
                f"{count} submeshes of {max(each, 1)} device(s) need {count * max(each, 1)}, there are {num_devices}"
            )
        shapes = (
            logical_shapes(each)
            if self.submesh_logical_shape is None
            else (tuple(self.submesh_logical_shape),)
        )
        if prod(shapes[0]) != each:
            raise StageError(
                f"submesh_logical_shape {shapes[0]} is of {prod(shapes[0])} device(s), but each of {count} submesh(es) has {each}; give"
                " submesh_physical_shape=(hosts, devices per host) too, or a shape of as many"
            )
        bounds = [num_layers * s // stages for s in range(stages + 1)]
        devices = [tuple(range(mesh * each, (mesh + 1) * each)) for mesh in range(count)]
        return [
            Assignment(tuple(range(bounds[s], bounds[s + 1])), devices[mesh], shapes, options)
            for s, mesh in enumerate(placement(count))
        ]


@dataclass(frozen=True, slots=True)
class ManualStageOption:
    """Stages as given.

    Attributes:
        forward_stage_layer_ids: the layers of each stage.
        submesh_physical_shapes: (hosts, devices per host) of each stage.
        submesh_logical_shapes: logical mesh shape of each stage.
        submesh_autosharding_option_dicts: for each stage, fields of `ShardingOptions` to replace.
        submesh_devices: for each stage the numbers of its devices in the cluster; by default they follow one another.
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
        count, changes = len(self.forward_stage_layer_ids), self.submesh_autosharding_option_dicts
        given = (self.submesh_physical_shapes, self.submesh_logical_shapes, changes or [{}] * count)
        if any(len(each) != count for each in given):
            raise StageError(
                f"{count} stages, but {[len(each) for each in given]} physical shapes, logical shapes and options"
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
        """Return the stages. Raises StageError when they don't fit together."""
        if num_chunks != 1:
            raise StageError(
                "a manual stage option gives each stage a submesh of its own; use a UniformStageOption"
            )
        stages = [tuple(layers) for layers in self.forward_stage_layer_ids]
        if [layer for layers in stages for layer in layers] != list(range(num_layers)):
            raise StageError(
                f"stages of layers {stages}, expected each of the {num_layers} layers once, in order"
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
                raise StageError(f"the stages need {ends[-1]} devices, there are {num_devices}")
            return [tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
        devices = [tuple(each) for each in self.submesh_devices]
        if [len(each) for each in devices] != sizes:
            raise StageError(
                f"submesh_devices are {devices}, but the submeshes have {sizes} devices"
            )
        every = sorted(device for each in devices for device in each)
        if len(set(every)) < len(every) or not 0 <= every[0] <= every[-1] < num_devices:
            raise StageError(
                f"submesh_devices are {devices}, expected numbers from 0 to {num_devices - 1}, each at most once"
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
"""Submeshes that stages may get: powers of two devices of a host and powers of two hosts; the same with at most four hosts; the same
with any number of hosts; any number of devices of a host, or of hosts."""

LogicalSpace = Literal[
    "single_node_model_parallel", "same_as_physical", "data_parallel_only", "all"
]
"""Ways to see a submesh as a mesh: one axis, or two of which the second stays within a host; hosts x devices of a host; one axis, for
the batch; one axis, or any two."""


@dataclass(frozen=True, slots=True)
class AutoStageOption:
    """Stages that are found: those with the least predicted time of a step that fit in memory (Alpa, OSDI'22, section 5).

    Attributes:
        submesh_physical_shape_space: see `PhysicalSpace`.
        submesh_logical_shape_space: see `LogicalSpace`.
        stage_imbalance_tolerance: how far, relative, the share of the work that a stage does may be above, and below, its share of
            the devices.
        leave_idle: devices may be left without work.
        profile: measure stages on the devices that are here instead of predicting what they take. Every stage that may be worth it
            is compiled and run, once for all that are alike.
        cached_profile_result: a file that keeps what was measured, for the next time.
    """

    submesh_physical_shape_space: PhysicalSpace = "power_of_two"
    submesh_logical_shape_space: LogicalSpace = "single_node_model_parallel"
    stage_imbalance_tolerance: float = inf
    leave_idle: bool = False
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
            profile=FLAG,
            cached_profile_result=PATH | NONE,
        )
        if self.cached_profile_result is not None and not self.profile:
            raise StageError(
                f"cached_profile_result is {self.cached_profile_result}, which keeps what profile=True measures; give both"
            )


type StageOption = UniformStageOption | ManualStageOption | AutoStageOption


def logical_shapes(num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of a logical mesh of so many devices with at most two axes."""
    pairs = [
        (a, num_devices // a)
        for a in range(2, num_devices)
        if num_devices % a == 0 and a <= num_devices // a
    ]
    return ((num_devices,), *pairs)
