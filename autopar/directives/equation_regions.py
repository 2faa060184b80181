"""Regions: equations of a model that are compiled, replaced or recomputed together; nested or disjoint, and ordered."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import combinations

from jax.extend.core import Var

from autopar.directives.definitions import Checkpoint, DirectiveError, Fuse, Replace, describe
from autopar.directives.model_graph import ModelGraph, Node, RematRegion

type Region = Fuse | Replace | Checkpoint | RematRegion


@dataclass(frozen=True, slots=True, eq=False)
class RegionNode:
    """A region and what it is made of."""

    region: Region
    inside: "tuple[Node | RegionNode, ...]"

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(
            node
            for each in self.inside
            for node in (each.nodes if isinstance(each, RegionNode) else (each,))
        )


def arrange(
    graph: ModelGraph, regions: Sequence[tuple[Region, frozenset[str]]]
) -> tuple[Node | RegionNode, ...]:
    """The nodes of `graph` with those of each region together, in an order in which they can run.

    Raises:
        DirectiveError: two regions overlap, or one would have to stop halfway for something outside.
    """
    for (one, left), (other, right) in combinations(regions, 2):
        if left & right and not (left <= right or right <= left):
            shared = ", ".join(sorted(left & right)[:3])
            raise DirectiveError(f"{_name(one)} and {_name(other)} both claim {shared}; keep one")
    return _arrange(graph.nodes, sorted(regions, key=lambda region: -len(region[1])))


def _arrange(
    nodes: Sequence[Node], regions: Sequence[tuple[Region, frozenset[str]]]
) -> tuple[Node | RegionNode, ...]:
    owner: dict[str, int] = {}
    for number, (_, names) in enumerate(regions):  # the largest first: what is in it is its own
        for name in names:
            owner.setdefault(name, number)
    units: list[Node | RegionNode] = [node for node in nodes if node.name not in owner]
    for number in sorted(set(owner.values())):
        region, names = regions[number]
        inner = [each for k, each in enumerate(regions) if k > number and each[1] <= names]
        units.append(
            RegionNode(region, _arrange([node for node in nodes if node.name in names], inner))
        )
    position = {node.name: k for k, node in enumerate(nodes)}
    units.sort(key=lambda unit: max(position[node.name] for node in _nodes(unit)))
    return _in_order(units)


def _in_order(units: Sequence[Node | RegionNode]) -> tuple[Node | RegionNode, ...]:
    """`units`, each after those it waits for, otherwise as they come."""
    maker = {
        var: k for k, unit in enumerate(units) for node in _nodes(unit) for var in node.eqn.outvars
    }
    waits = [
        {
            maker[a]
            for node in _nodes(unit)
            for a in node.eqn.invars
            if isinstance(a, Var) and maker.get(a, k) != k
        }
        for k, unit in enumerate(units)
    ]
    users: list[list[int]] = [[] for _ in units]
    for k, before in enumerate(waits):
        for each in before:
            users[each].append(k)
    ready = [k for k, before in enumerate(waits) if not before]
    heapify(ready)
    order = []
    while ready:
        k = heappop(ready)
        order.append(units[k])
        for user in users[k]:
            waits[user].discard(k)
            if not waits[user]:
                heappush(ready, user)
    if len(order) < len(units):
        stuck = [unit for k, unit in enumerate(units) if waits[k] and isinstance(unit, RegionNode)]
        raise DirectiveError(
            f"{' and '.join(_name(unit.region) for unit in stuck)} can't run as one: something outside reads part of the results and"
            " makes what the rest needs"
        )
    return tuple(order)


def _nodes(unit: Node | RegionNode) -> tuple[Node, ...]:
    return unit.nodes if isinstance(unit, RegionNode) else (unit,)


def _name(region: Region) -> str:
    if isinstance(region, RematRegion):
        return "a part that the model recomputes"
    return f"{describe(region)} of {region.path or 'the model'}"
