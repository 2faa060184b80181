"""The work of devices, in FLOP and bytes. Its seconds come from a cost model (`simulator.costs`).

A *body* is the ordered list of what one device launches for one task: kernels, collectives, which
are started and later waited for, and loops of them. The compiled front end makes it from scheduled
HLO (`simulator.hlo`), the analytic one from a plan.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, assert_never

KernelKind = Literal["gemm", "conv", "attention", "attention backward", "memory", "host copy"]
"""What bounds a kernel: matrix units fed by a GEMM, a convolution or fused attention; memory
(fusions, copies, gathers, reductions); or the link between a device and its host."""

TrainingPhase = Literal["", "forward", "recompute", "backward", "update"]
"""The part of a training step that a kernel belongs to; empty if unknown."""

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"
]

Groups = tuple[tuple[int, ...], ...]
"""Ids of the devices of each group. The devices of a group communicate with each other; all groups
do so at the same time. For `collective_permute`, the groups are (source, target) pairs."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """Sizes of a (batched) matrix product: `batch` products of (m, k) by (k, n)."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> float:
        """FLOP of the product; a multiply-add is two."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel launch on one device.

    Attributes:
        name: the name in timelines.
        kind: what bounds the kernel.
        flops: floating point operations; a multiply-add is two.
        bytes: bytes read from and written to device memory; for a "host copy", bytes over the
            link to the host.
        dtype: the dtype of its arithmetic, as HLO spells it ("f32", "bf16", ...).
        gemm: the sizes of its product, if `kind` is "gemm" and they are known.
        unmodelled: the sort of kernel, if no model has its cost. It is priced by the bytes that it
            must move.
        seconds: its seconds, if they are known and need no cost model.
        phase: the part of the training step that it belongs to.
    """

    name: str
    kind: KernelKind
    flops: float
    bytes: float
    dtype: str = "f32"
    gemm: Gemm | None = None
    unmodelled: str = ""
    seconds: float | None = None
    phase: TrainingPhase = ""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, seen from one participant.

    Attributes:
        name: the name by which a task waits for it.
        kind: the kind of collective.
        num_bytes: bytes per device of the *whole* array of the group: operand of an all_reduce,
            result of an all_gather, operand of a reduce_scatter, operand of an all_to_all, message
            of a collective_permute.
        groups: the groups, in positions of the mesh, which count from 0.
        seconds: its seconds, if they are known and need no cost model.
        axis: the mesh axes that its groups lie along, `x` or `x,y`; empty if unknown.
    """

    name: str
    kind: CollectiveKind
    num_bytes: float
    groups: Groups
    seconds: float | None = None
    axis: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    """The issue of a collective to its communication stream; the compute stream continues."""

    collective: Collective


@dataclass(frozen=True, slots=True)
class Done:
    """A wait of the compute stream for the end of the collective of that name."""

    name: str


@dataclass(frozen=True, slots=True)
class Loop:
    """A body that runs `count` times."""

    count: int
    body: "OpList"


Op = Kernel | Start | Done | Loop
OpList = tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """Sums over a body.

    Attributes:
        flops: FLOP by dtype.
        bytes: bytes of traffic to and from device memory.
        collectives: bytes by kind of collective, counted as in `Collective`.
    """

    flops: Mapping[str, float] = field(default_factory=dict)
    bytes: float = 0.0
    collectives: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: "Work") -> "Work":
        return Work(
            _add(self.flops, other.flops),
            self.bytes + other.bytes,
            _add(self.collectives, other.collectives),
        )

    def __mul__(self, times: float) -> "Work":
        scaled = {dtype: flops * times for dtype, flops in self.flops.items()}
        moved = {kind: num_bytes * times for kind, num_bytes in self.collectives.items()}
        return Work(scaled, self.bytes * times, moved)


def with_axes(body: OpList, along: Callable[[Groups], str]) -> OpList:
    """Return `body` with the mesh axes of its collectives.

    Args:
        body: the body of a task.
        along: the mesh axes that groups lie along, `x` or `x,y`; empty if there are none.
    """
    labelled: list[Op] = []
    for op in body:
        match op:
            case Start(collective):
                labelled.append(Start(replace(collective, axis=along(collective.groups))))
            case Loop(count, inner):
                labelled.append(Loop(count, with_axes(inner, along)))
            case Kernel() | Done():
                labelled.append(op)
            case _:
                assert_never(op)
    return tuple(labelled)


def on_devices(collective: Collective, devices: tuple[int, ...]) -> Groups:
    """Return the groups of a collective in ids of the cluster.

    Args:
        collective: the collective, with groups in positions of its mesh.
        devices: ids of the devices of the mesh.

    Raises:
        ValueError: a group has a position that the mesh lacks.
    """
    try:
        return tuple(tuple(devices[i] for i in group) for group in collective.groups)
    except IndexError:
        raise ValueError(
            f"{collective.name} has groups {collective.groups}; its mesh has positions"
            f" 0 to {len(devices) - 1}"
        ) from None


def work_of(body: OpList) -> Work:
    """Return the work of everything in `body`; a loop counts once per iteration."""
    total = Work()
    for op in body:
        match op:
            case Kernel():
                total += Work({op.dtype: op.flops} if op.flops else {}, op.bytes)
            case Start(collective):
                total += Work(collectives={collective.kind: collective.num_bytes})
            case Done():
                pass
            case Loop(count, inner):
                total += work_of(inner) * count
            case _:
                assert_never(op)
    return total


def _add(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    total = Counter(left)
    total.update(right)
    return dict(total)


def matrix_flops(body: OpList) -> dict[str, float]:
    """Return FLOP of the products and convolutions in `body` by dtype, loops included."""
    total: Counter[str] = Counter()
    for op in body:
        match op:
            case Kernel() if op.kind not in ("memory", "host copy"):
                total[op.dtype] += op.flops  # pyright: ignore[reportArgumentType]
            case Loop(count, inner):
                for dtype, flops in matrix_flops(inner).items():
                    total[dtype] += count * flops  # pyright: ignore[reportArgumentType]
            case _:
                pass
    return dict(total)


def unmodelled_kernels(body: OpList) -> Counter[str]:
    """Return how often `body` launches each sort of kernel whose cost no model has."""
    launches: Counter[str] = Counter()
    for op in body:
        match op:
            case Kernel() if op.unmodelled:
                launches[op.unmodelled] += 1
            case Loop(count, inner):
                for sort, number in unmodelled_kernels(inner).items():
                    launches[sort] += count * number
            case _:
                pass
    return launches
