"""What devices are asked to do, in FLOP and bytes. Seconds come from a cost model (`simulator.costs.cost_model`).

A *body* is the ordered list of what one device launches for one task: kernels, collectives (started, then waited for) and
loops of them. Both front ends produce it: the compiled one from scheduled HLO (`simulator.hlo`), the analytic one from a plan.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, assert_never

KernelKind = Literal["gemm", "conv", "attention", "attention backward", "memory"]
"""What bounds a kernel: matrix units fed by a GEMM, by a convolution, by fused attention, or memory (fusions, copies, gathers,
reductions)."""

TrainingPhase = Literal["", "forward", "recompute", "backward", "update"]
"""What a kernel is for in a training step; nothing where nobody says."""

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"
]

Groups = tuple[tuple[int, ...], ...]
"""Device ids that communicate with one another; all groups do so at the same time. For `collective_permute`: (source, target) pairs."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """Sizes of a (batched) matrix product: `batch` products of (m, k) by (k, n)."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel launch on one device.

    Attributes:
        flops: floating point operations (a multiply-add is two).
        bytes: bytes read from and written to device memory.
        dtype: what it computes in, in HLO's spelling ("f32", "bf16", ...).
        gemm: the sizes, when `kind` is "gemm" and they are known.
        unmodelled: what it is, where nobody knows what that costs: it is priced by the bytes that it must move.
        seconds: what it takes, if that is known, and not for a cost model to say.
        part: of the training step.
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
        num_bytes: bytes per device of the *whole* array of the group: operand of an all_reduce, result of an all_gather,
            operand of a reduce_scatter, operand of an all_to_all, message of a collective_permute.
        seconds: what it takes, if that is known, and not for a cost model to say.
        axis: the mesh axes that its groups lie along, `x` or `x,y`; nothing where nobody says.
    """

    name: str
    kind: CollectiveKind
    num_bytes: float
    groups: Groups
    seconds: float | None = None
    axis: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    """The collective is handed to the communication stream; the compute stream goes on."""

    collective: Collective


@dataclass(frozen=True, slots=True)
class Done:
    """The compute stream waits until the collective of that name has finished."""

    name: str


@dataclass(frozen=True, slots=True)
class Loop:
    """`body` repeated `count` times."""

    count: int
    body: "OpList"


Op = Kernel | Start | Done | Loop
OpList = tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """Sums over a body: FLOP by dtype, bytes of device memory traffic, bytes by collective kind."""

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
    """The same body, whose collectives say which mesh axes they lie `along`."""
    found: list[Op] = []
    for op in body:
        match op:
            case Start(collective):
                found.append(Start(replace(collective, axis=along(collective.groups))))
            case Loop(count, inner):
                found.append(Loop(count, with_axes(inner, along)))
            case Kernel() | Done():
                found.append(op)
            case _:
                assert_never(op)
    return tuple(found)


def on_devices(collective: Collective, devices: tuple[int, ...]) -> Groups:
    """Its groups in ids of the cluster; a body counts the `devices` of its mesh from 0."""
    try:
        return tuple(tuple(devices[i] for i in group) for group in collective.groups)
    except IndexError:
        raise ValueError(
            f"{collective.name} has groups {collective.groups}; its mesh has positions 0 to {len(devices) - 1}"
        ) from None


def work_of(body: OpList) -> Work:
    """The work of everything in `body`, loops multiplied out."""
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
    """FLOP of the products and convolutions in `body` by what they compute in, loops multiplied out."""
    done: Counter[str] = Counter()
    for op in body:
        match op:
            case Kernel() if op.kind != "memory":
                done[op.dtype] += op.flops  # pyright: ignore[reportArgumentType]
            case Loop(count, inner):
                done.update({dtype: count * flops for dtype, flops in matrix_flops(inner).items()})  # pyright: ignore
            case _:
                pass
    return dict(done)


def unmodelled_kernels(body: OpList) -> Counter[str]:
    """How many kernels there are in `body` whose cost is not known, by what they are, loops multiplied out."""
    found: Counter[str] = Counter()
    for op in body:
        match op:
            case Kernel() if op.unmodelled:
                found[op.unmodelled] += 1
            case Loop(count, inner):
                found.update(
                    {name: count * each for name, each in unmodelled_kernels(inner).items()}
                )
            case _:
                pass
    return found
