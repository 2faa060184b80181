"""Effect of a task on the streams of its mesh as a 3 x 3 max-plus map.

A mesh whose compute stream is free at c and whose links within and between hosts are free at k and l when a task begins has them free at

    max(c + a, k + b, l + d),  max(c + e, k + f, l + g)  and  max(c + h, k + i, l + j)

when it ends: working is a sum, queueing and waiting are maxima (the max-plus algebra of Baccelli, Cohen, Olsder and Quadrat,
Synchronization and Linearity, 1992). So a task of ten thousand kernels is nine numbers, found once; tasks that follow one another
are a product of such maps, and a loop is a power of its body.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import assert_never

from simulator.costs.cost_model import CostModel, collective_seconds, kernel_seconds
from simulator.spans import Link
from simulator.work import Done, Kernel, Loop, OpList, Start, on_devices

Row = tuple[float, float, float]
"""Seconds after c, k and l, the latest of which is meant; -inf where one of them doesn't matter."""


@dataclass(frozen=True, slots=True)
class MaxPlusMap:
    """When the three streams of a mesh are free after a task, as seconds after each was free before it."""

    compute: Row = (0.0, -inf, -inf)
    within: Row = (-inf, 0.0, -inf)
    between: Row = (-inf, -inf, 0.0)

    @classmethod
    def task(cls, seconds: float) -> "MaxPlusMap":
        """Of a task that only computes."""
        return cls(compute=(seconds, -inf, -inf))

    @classmethod
    def transfer(cls, seconds: float, link: Link = "between hosts") -> "MaxPlusMap":
        """Of a transfer that nobody waits for: it starts when computation and the link have come so far."""
        if link == "within hosts":
            return cls(within=(seconds, seconds, -inf))
        return cls(between=(seconds, -inf, seconds))

    def then(self, later: "MaxPlusMap") -> "MaxPlusMap":
        """Of this task and a later one."""
        return MaxPlusMap(
            _after(self, later.compute), _after(self, later.within), _after(self, later.between)
        )

    def times(self, count: int) -> "MaxPlusMap":
        """Of this task so many times, by squaring."""
        done, power = MaxPlusMap(), self
        while count:
            if count % 2:
                done = done.then(power)
            power, count = power.then(power), count // 2
        return done


def contends(body: OpList, costs: CostModel, devices: tuple[int, ...]) -> bool:
    """Whether something is computed beside a collective that slows it: how much depends on what else is under way, so a body like this
    has no `MaxPlusMap`, but maybe a `simulator.engine.contended_effect.PiecewiseEffect`.
    """
    running: set[str] = set()
    for op in body:
        match op:
            case Kernel():
                if running:
                    return True
            case Start(each):
                if costs.contention_factor(on_devices(each, devices)) > 1:
                    running.add(each.name)
            case Done(name):
                running.discard(name)
            case Loop(_, inner):
                if running or contends(inner, costs, devices):
                    return True
            case _:
                assert_never(op)
    return bool(running)


def max_plus_map_of(body: OpList, costs: CostModel, devices: tuple[int, ...]) -> MaxPlusMap:
    """The effect of a body that doesn't contend on the mesh of `devices`, as `simulator.engine.simulation.simulate` plays it.

    Raises:
        ValueError: it waits for a collective that another task or another turn of a loop started.
    """
    now = MaxPlusMap()
    running: dict[str, Row] = {}
    for op in body:
        match op:
            case Kernel():
                now = replace(
                    now, compute=_shifted(now.compute, kernel_seconds(costs, op, devices[0]))
                )
            case Start(each):
                groups = on_devices(each, devices)
                now = now.then(
                    MaxPlusMap.transfer(collective_seconds(costs, each, groups), costs.link(groups))
                )
                running[each.name] = (
                    now.within if costs.link(groups) == "within hosts" else now.between
                )
            case Done(name):
                if name not in running:
                    raise ValueError(
                        f"waits for collective {name!r}, which the same task has not started just before"
                    )
                now = replace(now, compute=_later(now.compute, running.pop(name)))
            case Loop(count, inner):
                now = now.then(max_plus_map_of(inner, costs, devices).times(count))
            case _:
                assert_never(op)
    return now


def _after(effect: MaxPlusMap, row: Row) -> Row:
    """`row` in terms of what was before `effect`."""
    before = (
        _shifted(effect.compute, row[0]),
        _shifted(effect.within, row[1]),
        _shifted(effect.between, row[2]),
    )
    return _later(_later(before[0], before[1]), before[2])


def _later(one: Row, other: Row) -> Row:
    return max(one[0], other[0]), max(one[1], other[1]), max(one[2], other[2])


def _shifted(row: Row, seconds: float) -> Row:
    return row[0] + seconds, row[1] + seconds, row[2] + seconds
