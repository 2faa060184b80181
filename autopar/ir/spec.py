"""Sharding specs as plain values, and the logical mesh they speak of."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from simulator.work import Groups

type Spec = tuple[tuple[str, ...], ...]
"""For each array dim the mesh axes that shard it, major first: `(("x",), ())` is `PartitionSpec("x", None)`."""


type Specs = tuple[Spec, ...]
"""One spec per option of a decision."""

type AnyMesh = Mesh | AbstractMesh
"""JAX's mesh, of devices that are here, or of ones that are elsewhere."""


@dataclass(frozen=True)
class LogicalMesh:
    """Names and sizes of mesh axes; devices are numbered in row-major order of the axes.

    Raises:
        ValueError: an axis without a size, a size below one, or a repeated name.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axis_names) or len(set(self.axis_names)) != len(
            self.axis_names
        ):
            raise ValueError(
                f"mesh shape {self.shape} needs as many distinct axis names, got {self.axis_names}"
            )
        if any(size < 1 for size in self.shape):
            raise ValueError(f"mesh shape {self.shape}: every axis needs at least one device")

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.axis_names, self.shape, strict=True))

    @property
    def num_devices(self) -> int:
        return prod(self.shape)

    def ways(self, axes: Iterable[str]) -> int:
        """Number of devices along `axes` together."""
        ways = 1
        for axis in axes:
            ways *= self.sizes[axis]
        return ways

    def abstract(self) -> AbstractMesh:
        """As JAX has meshes without devices."""
        return AbstractMesh(
            self.shape, self.axis_names, axis_types=(AxisType.Auto,) * len(self.shape)
        )

    def groups(self, axes: Sequence[str]) -> Groups:
        """The groups of devices that differ only in their position along `axes`."""
        inner = [axis for axis in self.axis_names if axis in axes]
        outer = [axis for axis in self.axis_names if axis not in axes]
        strides, stride = {}, 1
        for axis in reversed(self.axis_names):
            strides[axis] = stride
            stride *= self.sizes[axis]

        def offsets(names: list[str]) -> list[int]:
            positions = product(*(range(self.sizes[name]) for name in names))
            return [
                sum(p * strides[n] for p, n in zip(position, names, strict=True))
                for position in positions
            ]

        return tuple(tuple(base + offset for offset in offsets(inner)) for base in offsets(outer))

    def axes_of_groups(self, groups: Groups) -> str:
        """The axes along which members of a group differ, `x,y`; nothing if all are alone."""
        found: set[str] = set()
        for first, *others in groups:
            for other in others:
                positions = zip(
                    self.axis_names, self._position(first), self._position(other), strict=True
                )
                found.update(axis for axis, one, another in positions if one != another)
        return self.axes_text(found)

    def axes_text(self, axes: Collection[str]) -> str:
        """Names of axes as `Collective.axis` has them: `x,y`."""
        return ",".join(axis for axis in self.axis_names if axis in axes)

    def _position(self, device: int) -> list[int]:
        """Where a device is along each axis."""
        position = []
        for size in reversed(self.shape):
            device, at = divmod(device, size)
            position.append(at)
        return position[::-1]


def replicated(rank: int) -> Spec:
    return ((),) * rank


def local_shape(shape: Sequence[int], spec: Spec, mesh: LogicalMesh) -> tuple[int, ...]:
    """Shape of one device's shard (dims rounded up)."""
    return tuple(-(-size // mesh.ways(axes)) for size, axes in zip(shape, spec, strict=True))


def axes_of(spec: Spec) -> frozenset[str]:
    """Every mesh axis that `spec` uses."""
    return frozenset(axis for axes in spec for axis in axes)


def all_specs(shape: Sequence[int], mesh: LogicalMesh) -> list[Spec]:
    """Every spec that divides `shape` evenly, the replicated one first."""
    axes = [axis for axis in mesh.axis_names if mesh.sizes[axis] > 1]
    found = []
    for dims in product((None, *range(len(shape))), repeat=len(axes)):
        spec = tuple(
            tuple(a for a, d in zip(axes, dims, strict=True) if d == dim)
            for dim in range(len(shape))
        )
        if divides(shape, spec, mesh):
            found.append(spec)
    return found


def divides(shape: Sequence[int], spec: Spec, mesh: LogicalMesh) -> bool:
    return all(size % mesh.ways(axes) == 0 for size, axes in zip(shape, spec, strict=True))


def partition_spec(spec: Spec) -> PartitionSpec:
    """JAX's form of `spec`."""
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in spec))


def from_partition_spec(spec: PartitionSpec, rank: int) -> Spec:
    """Our form of a `PartitionSpec` for an array with `rank` dims."""
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    return (*entries, *((),) * (rank - len(entries)))


def spec_problem(spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]) -> str:
    """Why an array of `shape` can't be split as `spec` says over mesh axes of these sizes, and what to do; "" if it can."""
    if len(spec) > len(shape):
        return f"{spec} is for {len(spec)} dims, but its shape {tuple(shape)} has {len(shape)}; leave some out"
    for dim, axes in enumerate(from_partition_spec(spec, len(shape))):
        for axis in axes:
            if axis not in sizes:
                return f"{spec} names the axis {axis!r}; the mesh has {', '.join(sizes)}"
        ways = prod(sizes[axis] for axis in axes)
        if shape[dim] % ways:
            over = f"the {ways} devices along {', '.join(axes)}; use a multiple of {ways}"
            return f"dim {dim} of its shape {tuple(shape)} can't be split over {over}"
    return ""
