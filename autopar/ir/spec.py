"""Sharding specs as plain values, and the logical mesh whose axes they name."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from simulator.work import Groups

type Spec = tuple[tuple[str, ...], ...]
"""For each array dim the mesh axes that shard it, major first.

`(("x",), ())` is `PartitionSpec("x", None)`.
"""


type Specs = tuple[Spec, ...]
"""One spec per option of a decision."""

type AnyMesh = Mesh | AbstractMesh
"""JAX's mesh, with devices of this process or without devices."""


@dataclass(frozen=True)
class LogicalMesh:
    """Names and sizes of mesh axes; devices are numbered in row-major order of the axes.

    Raises:
        ValueError: An axis has no size, a size is below one, or a name is repeated.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]

    def __post_init__(self) -> None:
        num_axes = len(self.axis_names)
        if len(self.shape) != num_axes or len(set(self.axis_names)) != num_axes:
            raise ValueError(
                f"mesh shape {self.shape} needs as many distinct axis names, got {self.axis_names}"
            )
        if any(size < 1 for size in self.shape):
            raise ValueError(f"mesh shape {self.shape}: every axis needs at least one device")

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The number of devices along each axis."""
        return dict(zip(self.axis_names, self.shape, strict=True))

    def __str__(self) -> str:
        return mesh_text(self.sizes)

    @property
    def num_devices(self) -> int:
        """The number of devices of the mesh."""
        return prod(self.shape)

    @property
    def nontrivial_axes(self) -> tuple[str, ...]:
        """The axes with more than one device."""
        return tuple(axis for axis in self.axis_names if self.sizes[axis] > 1)

    def ways(self, axes: Iterable[str]) -> int:
        """Return the number of devices along `axes` together."""
        ways = 1
        for axis in axes:
            ways *= self.sizes[axis]
        return ways

    def abstract(self) -> AbstractMesh:
        """Return the mesh as JAX's mesh without devices."""
        return AbstractMesh(
            self.shape, self.axis_names, axis_types=(AxisType.Auto,) * len(self.shape)
        )

    def groups(self, axes: Sequence[str]) -> Groups:
        """Return the groups of devices that differ only in their position along `axes`."""
        inner = [axis for axis in self.axis_names if axis in axes]
        outer = [axis for axis in self.axis_names if axis not in axes]
        strides: dict[str, int] = {}
        stride = 1
        for axis in reversed(self.axis_names):
            strides[axis] = stride
            stride *= self.sizes[axis]

        def offsets(names: list[str]) -> list[int]:
            positions = product(*(range(self.sizes[name]) for name in names))
            return [
                sum(index * strides[name] for index, name in zip(position, names, strict=True))
                for position in positions
            ]

        return tuple(tuple(base + offset for offset in offsets(inner)) for base in offsets(outer))

    def axes_of_groups(self, groups: Groups) -> str:
        """Return the axes along which members of a group differ as text, `x,y`; "" if none do."""
        axes: set[str] = set()
        for first, *others in groups:
            for other in others:
                positions = zip(
                    self.axis_names, self.position(first), self.position(other), strict=True
                )
                axes.update(axis for axis, left, right in positions if left != right)
        return self.axes_text(axes)

    def axes_text(self, axes: Collection[str]) -> str:
        """Return axes as text in the order of the mesh, as in `Collective.axis`: `x,y`."""
        return ",".join(axis for axis in self.axis_names if axis in axes)

    def position(self, device: int) -> list[int]:
        """Return the position of a device along each axis."""
        position = []
        for size in reversed(self.shape):
            device, index = divmod(device, size)
            position.append(index)
        return position[::-1]


def replicated(rank: int) -> Spec:
    """Return the spec of an array with `rank` dims that no axis shards."""
    return ((),) * rank


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Return the text of a mesh, e.g. `x=2 x y=4`."""
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items())


def local_shape(shape: Sequence[int], spec: Spec, mesh: LogicalMesh) -> tuple[int, ...]:
    """Return the shape of one device's shard, with dims rounded up."""
    return tuple(-(-size // mesh.ways(axes)) for size, axes in zip(shape, spec, strict=True))


def axes_of(spec: Spec) -> frozenset[str]:
    """Return all mesh axes that `spec` uses."""
    return frozenset(axis for axes in spec for axis in axes)


def spec_with_axes(axes: Sequence[str], dims: Sequence[int | None], rank: int) -> Spec:
    """Return the spec in which each of `axes` shards the dim of the same position in `dims`."""
    return tuple(
        tuple(axis for axis, dim in zip(axes, dims, strict=True) if dim == sharded)
        for sharded in range(rank)
    )


def all_specs(shape: Sequence[int], mesh: LogicalMesh) -> list[Spec]:
    """Return all specs that divide `shape` evenly, the replicated one first."""
    axes = mesh.nontrivial_axes
    specs = []
    for sharded_dims in product((None, *range(len(shape))), repeat=len(axes)):
        spec = spec_with_axes(axes, sharded_dims, len(shape))
        if divides(shape, spec, mesh):
            specs.append(spec)
    return specs


def divides(shape: Sequence[int], spec: Spec, mesh: LogicalMesh) -> bool:
    """Return whether `spec` divides every dim of `shape` evenly."""
    return all(size % mesh.ways(axes) == 0 for size, axes in zip(shape, spec, strict=True))


def partition_spec(spec: Spec) -> PartitionSpec:
    """Return `spec` as a PartitionSpec."""
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in spec))


def from_partition_spec(spec: PartitionSpec, rank: int) -> Spec:
    """Return a PartitionSpec as a `Spec` for an array with `rank` dims."""
    entries = [
        () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in spec
    ]
    return (*entries, *replicated(rank - len(entries)))


def spec_problem(spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]) -> str:
    """Return why `spec` does not shard an array evenly, and how to fix it; "" if it does.

    Args:
        spec: the spec.
        shape: the shape of the array.
        sizes: the sizes of mesh axes by name.
    """
    if len(spec) > len(shape):
        return (
            f"{spec} is for {len(spec)} dims, but its shape {tuple(shape)} has {len(shape)}; leave"
            " some out"
        )
    seen = set[str]()
    for dim, axes in enumerate(from_partition_spec(spec, len(shape))):
        for axis in axes:
            if axis not in sizes:
                return f"{spec} names the axis {axis!r}; the mesh has {', '.join(sizes)}"
            if axis in seen:
                return f"{spec} names the axis {axis!r} twice; an axis can shard one dim, once"
            seen.add(axis)
        ways = prod(sizes[axis] for axis in axes)
        if shape[dim] % ways:
            over = f"the {ways} devices along {', '.join(axes)}; use a multiple of {ways}"
            return f"dim {dim} of its shape {tuple(shape)} can't be split over {over}"
    return ""
