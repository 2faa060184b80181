"""Regions: equations that are compiled, replaced or recomputed together.

Regions are nested or disjoint. Arranging a graph puts the equations of each region side by side, in
a topological order of the data dependences.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import combinations

from jax.extend.core import Var

from autopar.directives.definitions import Checkpoint, DirectiveError, Fuse, Replace, describe
from autopar.directives.model_graph import ModelGraph, Node, RematRegion
from autopar.ir.graph import variables

type Region = Fuse | Replace | Checkpoint | RematRegion
type GraphItem = Node | RegionNode
"""An entry of an arranged graph."""


@dataclass(frozen=True, slots=True, eq=False)
class RegionNode:
    """A region as one node of the graph, with the nodes and regions inside it in order."""

    region: Region
    inside: tuple[GraphItem, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes of the region and of the regions nested in it."""
        return nodes_in(self.inside)


def nodes_in(items: Iterable[GraphItem]) -> tuple[Node, ...]:
    """Return the nodes of `items`, those inside regions included."""
    return tuple(
        node for item in items for node in (item.nodes if isinstance(item, RegionNode) else (item,))
    )


def arrange_regions(
    graph: ModelGraph, regions: Sequence[tuple[Region, frozenset[str]]]
) -> tuple[GraphItem, ...]:
    """Return the nodes of `graph`, grouped by region, in an order in which they can run.

    Args:
        graph: the model.
        regions: each region with the names of its nodes.

    Raises:
        DirectiveError: Two regions overlap without being nested, or a region needs a value that is
            computed outside from its own results.
    """
    for (one, left), (other, right) in combinations(regions, 2):
        if left & right and not (left <= right or right <= left):
            shared = ", ".join(sorted(left & right)[:3])
            raise DirectiveError(f"{_name(one)} and {_name(other)} both claim {shared}; keep one")
    return _arrange_nodes(graph.nodes, sorted(regions, key=lambda region: -len(region[1])))


def recomputable_parts(graph: ModelGraph, nodes: Sequence[Node]) -> list[frozenset[str]]:
    """Return the names of the nodes of a module in parts that can each be recomputed as one.

    There is one part, unless the rest of the model computes, from results of the module, what the
    module reads again: a module that is called twice has a part for each call.

    Args:
        graph: the model.
        nodes: the nodes of the module, in the order in which they run.
    """
    names = {node.name for node in nodes}
    parts: list[set[str]] = [set()]
    inside: set[Var] = set()
    after: set[Var] = set()
    for node in graph.nodes:
        read = set(variables(node.eqn.invars))
        if node.name in names:
            if not read.isdisjoint(after):
                parts.append(set())
                inside, after = set(), set()
            parts[-1].add(node.name)
            inside.update(node.eqn.outvars)
        elif not read.isdisjoint(inside | after):
            after.update(node.eqn.outvars)
    return list(map(frozenset, parts))


def _arrange_nodes(
    nodes: Sequence[Node], regions: Sequence[tuple[Region, frozenset[str]]]
) -> tuple[GraphItem, ...]:
    """Arrange `nodes`; `regions` are sorted by size, the largest first."""
    # Nodes belong to the outermost region around them, which is the largest.
    owner: dict[str, int] = {}
    for number, (_, names) in enumerate(regions):
        for name in names:
            owner.setdefault(name, number)
    items: list[GraphItem] = [node for node in nodes if node.name not in owner]
    for number in sorted(set(owner.values())):
        region, names = regions[number]
        nested = [inner for inner in regions[number + 1 :] if inner[1] <= names]
        members = [node for node in nodes if node.name in names]
        items.append(RegionNode(region, _arrange_nodes(members, nested)))
    position = {node.name: k for k, node in enumerate(nodes)}
    items.sort(key=lambda item: max(position[node.name] for node in nodes_in([item])))
    return _topological_order(items)


def _topological_order(items: Sequence[GraphItem]) -> tuple[GraphItem, ...]:
    """Return `items` sorted by data dependence; independent items keep their order."""
    producer = {
        var: k
        for k, item in enumerate(items)
        for node in nodes_in([item])
        for var in node.eqn.outvars
    }
    dependences = [
        {
            producer[atom]
            for node in nodes_in([item])
            for atom in node.eqn.invars
            if isinstance(atom, Var) and producer.get(atom, k) != k
        }
        for k, item in enumerate(items)
    ]
    users: list[list[int]] = [[] for _ in items]
    for k, producers in enumerate(dependences):
        for source in producers:
            users[source].append(k)
    ready = [k for k, producers in enumerate(dependences) if not producers]
    heapify(ready)
    order = []
    while ready:
        k = heappop(ready)
        order.append(items[k])
        for user in users[k]:
            dependences[user].discard(k)
            if not dependences[user]:
                heappush(ready, user)
    if len(order) < len(items):
        stuck = [
            item for k, item in enumerate(items) if dependences[k] and isinstance(item, RegionNode)
        ]
        raise DirectiveError(
            f"{' and '.join(_name(item.region) for item in stuck)} can't run as one: something"
            " outside reads part of the results and makes what the rest needs"
        )
    return tuple(order)


def _name(region: Region) -> str:
    if isinstance(region, RematRegion):
        return "a part that the model recomputes"
    return f"{describe(region)} of {region.path or 'the model'}"
