"""Tasks in seconds: what remains of kernels and collectives once a cost model has priced them.

`simulator.engine.stream_rules` plays priced operations. Unlike costs and bodies, they can be the
key of a cache.
"""

from collections.abc import Iterator
from typing import NamedTuple, assert_never

from simulator.costs.cost_model import CostModel, collective_seconds, kernel_seconds
from simulator.spans import Link
from simulator.work import Done, Kernel, Loop, OpList, Start, on_devices


class Compute(NamedTuple):
    """Seconds of kernels on the compute stream."""

    seconds: float


class Begin(NamedTuple):
    """The start of a collective, which takes `seconds` if nothing runs beside it."""

    name: str
    link: Link
    seconds: float
    contention_factor: float


class End(NamedTuple):
    """A wait of the compute stream for the collective of that name."""

    name: str


class Repeat(NamedTuple):
    """A loop."""

    iterations: int
    ops: "PricedOps"


type PricedOp = Compute | Begin | End | Repeat
type PricedOps = tuple[PricedOp, ...]


def price(body: OpList, costs: CostModel, devices: tuple[int, ...]) -> PricedOps:
    """Return the seconds of a body on the mesh of `devices` (ids in the cluster)."""
    return tuple(_priced(body, costs, devices))


def _priced(body: OpList, costs: CostModel, devices: tuple[int, ...]) -> Iterator[PricedOp]:
    for op in body:
        match op:
            case Kernel():
                yield Compute(kernel_seconds(costs, op, devices[0]))
            case Start(collective):
                groups = on_devices(collective, devices)
                seconds = collective_seconds(costs, collective, groups)
                yield Begin(
                    collective.name, costs.link(groups), seconds, costs.contention_factor(groups)
                )
            case Done(name):
                yield End(name)
            case Loop(count, inner):
                yield Repeat(count, price(inner, costs, devices))
            case _:
                assert_never(op)


def contends(ops: PricedOps) -> bool:
    """Return whether something is computed beside a collective that slows it, or might be.

    A collective that the task leaves running counts, because the next task may compute beside it.
    """
    running: set[str] = set()
    for op in ops:
        match op:
            case Compute():
                if running:
                    return True
            case Begin():
                if op.contention_factor > 1:
                    running.add(op.name)
            case End(name):
                running.discard(name)
            case Repeat(_, inner):
                if running or contends(inner):
                    return True
    return bool(running)


def waits_for_all(ops: PricedOps) -> bool:
    """Return whether each collective is waited for in the same iteration of the same loop."""
    running: set[str] = set()
    for op in ops:
        match op:
            case Compute():
                pass
            case Begin():
                if op.name in running:
                    return False
                running.add(op.name)
            case End(name):
                if name not in running:
                    return False
                running.remove(name)
            case Repeat(_, inner):
                if not waits_for_all(inner):
                    return False
    return not running


def links_of(ops: PricedOps) -> set[Link]:
    """Return the classes of links that a task communicates over."""
    links: set[Link] = set()
    for op in ops:
        match op:
            case Begin():
                links.add(op.link)
            case Repeat(_, inner):
                links |= links_of(inner)
            case _:
                pass
    return links


def merge_kernels(ops: PricedOps) -> PricedOps:
    """Return the task with adjacent kernels, and loops of nothing but kernels, added up."""
    merged: list[PricedOp] = []
    seconds = 0.0
    for op in ops:
        if isinstance(op, Compute):
            seconds += op.seconds
            continue
        if isinstance(op, Repeat):
            inner = merge_kernels(op.ops)
            match inner:
                case ():
                    continue
                case (Compute(iteration_seconds),):
                    seconds += op.iterations * iteration_seconds
                    continue
                case _:
                    op = Repeat(op.iterations, inner)
        if seconds:
            merged.append(Compute(seconds))
            seconds = 0.0
        merged.append(op)
    if seconds:
        merged.append(Compute(seconds))
    return tuple(merged)
