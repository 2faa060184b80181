"""What a task does to the streams of its mesh, in four numbers.

A mesh whose compute stream is free at c and whose communication stream is free at k when a task begins has them free at

    max(c + a, k + b)  and  max(c + d, k + e)

when it ends: working is a sum, queueing and waiting are maxima (the max-plus algebra of Baccelli, Cohen, Olsder and Quadrat,
Synchronization and Linearity, 1992). So a task of ten thousand kernels is four numbers, found once; tasks that follow one another
are a product of such maps, and a loop is a power of its body.
"""

from dataclasses import dataclass
from math import inf
from typing import assert_never

from simulator.costs import CostModel, collective_seconds, kernel_seconds
from simulator.work import Body, Done, Kernel, Loop, Start, on_devices

Row = tuple[float, float]
"""Seconds after c and after k, the later of which is meant; -inf where one of them doesn't matter."""


@dataclass(frozen=True, slots=True)
class Effect:
    """When the two streams of a mesh are free after a task, as seconds after each was free before it."""

    compute: Row = (0.0, -inf)
    communication: Row = (-inf, 0.0)

    @classmethod
    def task(cls, seconds: float) -> "Effect":
        """Of a task that only computes."""
        return cls(compute=(seconds, -inf))

    @classmethod
    def transfer(cls, seconds: float) -> "Effect":
        """Of a transfer that nobody waits for: it starts when both streams have come so far."""
        return cls(communication=(seconds, seconds))

    def then(self, later: "Effect") -> "Effect":
        """Of this task and a later one."""
        return Effect(_after(self, later.compute), _after(self, later.communication))

    def times(self, count: int) -> "Effect":
        """Of this task so many times, by squaring."""
        done, power = Effect(), self
        while count:
            if count % 2:
                done = done.then(power)
            power, count = power.then(power), count // 2
        return done


def contends(body: Body, costs: CostModel, devices: tuple[int, ...]) -> bool:
    """Whether something is computed beside a collective that slows it: how much depends on what else is under way, so a body like this
    has no `Effect`, but maybe a `simulator.lag.Lagged`.
    """
    running: set[str] = set()
    for op in body:
        match op:
            case Kernel():
                if running:
                    return True
            case Start(each):
                if costs.slowdown(on_devices(each, devices)) > 1:
                    running.add(each.name)
            case Done(name):
                running.discard(name)
            case Loop(_, inner):
                if running or contends(inner, costs, devices):
                    return True
            case _:
                assert_never(op)
    return bool(running)


def effect_of(body: Body, costs: CostModel, devices: tuple[int, ...]) -> Effect:
    """The effect of a body that doesn't contend on the mesh of `devices`, as `simulator.engine.simulate` plays it.

    Raises:
        ValueError: it waits for a collective that another task or another turn of a loop started.
    """
    compute, communication = Effect().compute, Effect().communication
    running: dict[str, Row] = {}
    for op in body:
        match op:
            case Kernel():
                compute = _shifted(compute, kernel_seconds(costs, op, devices[0]))
            case Start(each):
                seconds = collective_seconds(costs, each, on_devices(each, devices))
                communication = running[each.name] = _shifted(_later(compute, communication), seconds)
            case Done(name):
                if name not in running:
                    raise ValueError(f"waits for collective {name!r}, which the same task has not started just before")
                compute = _later(compute, running.pop(name))
            case Loop(count, inner):
                turns = effect_of(inner, costs, devices).times(count)
                before = Effect(compute, communication)
                compute, communication = _after(before, turns.compute), _after(before, turns.communication)
            case _:
                assert_never(op)
    return Effect(compute, communication)


def _after(effect: Effect, row: Row) -> Row:
    """`row` in terms of what was before `effect`."""
    return _later(_shifted(effect.compute, row[0]), _shifted(effect.communication, row[1]))


def _later(one: Row, other: Row) -> Row:
    return max(one[0], other[0]), max(one[1], other[1])


def _shifted(row: Row, seconds: float) -> Row:
    return row[0] + seconds, row[1] + seconds
