"""The forward values of a sharded step that may be recomputed or offloaded, as a problem.

A candidate is a unit whose result XLA stores. What lies between stored values, such as an
activation function inside the kernel of a product, is computed by every kernel that reads it, in a
repeated kernel as in others. The epilogue of a product has the memory of its result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import numpy as np
from jax.extend.core import Var

from autopar.recompute.passes import Passes, passes
from autopar.recompute.recompute_problem import Choice, ForwardValue, RecomputeProblem
from autopar.sharding.step_memory import StepMemory
from autopar.xla_fusion import epilogues

_NEGLIGIBLE = 0.005
"""Share of the bytes of all candidates in the smallest ones, which are always kept."""

_LEAST_SECONDS = 1e-8
"""Seconds of a value whose copy adds no time, so that ties go to the choice with fewer copies."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """How the results of a unit are computed from stored values.

    Attributes:
        units: the unit itself, and those that compute what it reads without storing it.
        sources: the units whose stored results these read.
    """

    units: frozenset[int]
    sources: frozenset[int]

    def with_parts(self, other: "Recipe") -> "Recipe":
        """Return the recipe of this and another unit."""
        return Recipe(self.units | other.units, self.sources | other.sources)


@dataclass(frozen=True, eq=False)
class RecomputeCandidates:
    """The recomputation problem of a sharded step.

    Attributes:
        problem: the problem.
        makers: the unit of each value of the problem.
        recipes: the recipe of each unit of the forward pass that can be repeated.
        nodes: for each result of a unit of the forward pass that is in memory, the unit whose value
            it belongs to.
        passes: the forward and backward pass.
        fetched: for each unit, its results that are in host memory if its value is offloaded.
    """

    problem: RecomputeProblem
    makers: tuple[int, ...]
    recipes: Mapping[int, Recipe]
    nodes: Mapping[Var, int]
    passes: Passes
    fetched: Mapping[int, Sequence[Var]]

    def equations(self, choice: Choice) -> "ChosenEquations":
        """Return the equations to repeat, and those whose results are offloaded, for a choice.

        The first are the equations that compute the repeated values, and those by which the
        backward pass derives values from them, or from offloaded ones, without storing them.

        Args:
            choice: the numbers of the values.
        """
        values = {self.makers[number] for number in choice.repeated}
        on_host = {self.makers[number] for number in choice.offloaded}
        changed = values | on_host
        chosen = {part for u in values for part in self.recipes[u].units}
        for u, unit in enumerate(self.passes.units):
            if self.passes.late[u] or u in values:
                continue
            own = {self.nodes[var] for var in unit.makes if var in self.nodes}
            if not own.isdisjoint(on_host):
                continue
            sources = {self.nodes.get(var, self.passes.made_in.get(var)) for var in unit.reads}
            if not changed.isdisjoint(own if own else sources) and u in self.recipes:
                changed.add(u)
                chosen |= self.recipes[u].units
        found = self.passes
        sent = {found.made_in[var] for u in on_host for var in self.fetched[u]}
        repeatable = filter(found.is_repeatable, chosen)
        return ChosenEquations(
            frozenset(found.units[u].number for u in repeatable),
            frozenset(found.units[u].number for u in sent),
        )


class ChosenEquations(NamedTuple):
    """Equations of a step whose results are not kept for its backward pass.

    Attributes:
        repeated: the numbers of those that the backward pass repeats.
        offloaded: the numbers of those whose results it fetches from host memory.
    """

    repeated: frozenset[int] = frozenset()
    offloaded: frozenset[int] = frozenset()


type HostSeconds = Callable[[int, float], float]
"""(number of an equation, bytes on a device) -> the seconds in a step to copy its result to host
memory, or back."""


def candidates(
    memory: StepMemory,
    choice: Sequence[int],
    eqn_seconds: Sequence[float],
    repeats: bool = True,
    host_seconds: HostSeconds | None = None,
) -> RecomputeCandidates:
    """Return the recomputation problem of a step under a choice of shardings.

    Args:
        memory: the memory of the step.
        choice: the option of each decision.
        eqn_seconds: the seconds of each equation under that choice.
        repeats: whether values may be computed again.
        host_seconds: the time of copies, if values may be offloaded.
    """
    found = passes(memory.step)
    spans: dict[Var, tuple[float, int, int]] = {}
    for life in memory.lifetimes:
        if life.var is not None and not found.late[found.made_in.get(life.var, 0)]:
            size = float(life.sizes[choice[life.decision]])
            spans.setdefault(life.var, (size, life.start, life.end))
    nodes = _nodes(memory, found, spans)
    recipes = _recipes(found, nodes)
    uses = _Uses(found, nodes, recipes)
    fetched = _fetched(found, nodes) if host_seconds else {}
    results: dict[int, list[tuple[float, int, int]]] = {}
    for var, span in spans.items():
        if var in nodes and nodes[var] in uses.relevant:
            results.setdefault(nodes[var], []).append(span)
    makers = tuple(sorted(results))
    numbers = {u: number for number, u in enumerate(makers)}
    negligible = _negligible({u: sum(size for size, _, _ in own) for u, own in results.items()})
    base = memory.live_bytes(choice)
    base = base + memory.reserved_bytes(choice) - base.max()  # gaps, at each point
    values = []
    for u in makers:
        for size, start, end in results[u]:
            base[start : end + 1] -= size
        recipe = recipes.get(u, Recipe(frozenset(), frozenset()))
        start = min(start for _, start, _ in results[u])
        is_moved = uses.until.get(u, 0) <= uses.ends[u]  # the forward pass does not read it
        seconds = sum(eqn_seconds[found.units[part].number] for part in recipe.units)
        num_bytes = sum(size for size, _, _ in results[u])
        value = ForwardValue(
            num_bytes=num_bytes,
            seconds=_LEAST_SECONDS if is_moved else max(seconds, _LEAST_SECONDS),
            made=start,
            until=max(start, uses.until.get(u, 0), uses.ends[u]),
            late=(inf, -inf),
            sources=tuple(
                sorted(numbers[source] for source in recipe.sources if source in numbers)
            ),
            repeatable=(repeats and u in recipes and u not in negligible and u not in uses.blocked),
        )
        if u in fetched and host_seconds and u not in negligible and u not in uses.blocked:
            waiting = max(found.arrivals[var] for var in fetched[u])
            value = replace(
                value,
                host_seconds=2 * host_seconds(found.units[u].number, num_bytes),
                sent=found.units[waiting].number - 1,
            )
        if u in uses.first_late:
            value = replace(value, late=(uses.first_late[u], max(end for _, _, end in results[u])))
        values.append(value)
    problem = RecomputeProblem(values, np.maximum(base, 0.0))
    return RecomputeCandidates(problem, makers, recipes, nodes, found, fetched)


def _nodes(
    memory: StepMemory, found: Passes, spans: Mapping[Var, tuple[float, int, int]]
) -> dict[Var, int]:
    """Return for each result of the forward pass that is in memory the unit of its value.

    The results of epilogues belong to their products.
    """
    eqns = memory.step.jaxpr.eqns
    nodes = {var: found.made_in[var] for var in spans if var in found.made_in}
    for number, product in sorted(epilogues(memory.step).items()):
        result = eqns[product].outvars[0]
        if result in nodes:
            nodes[eqns[number].outvars[0]] = nodes[result]
    return nodes


def _fetched(found: Passes, nodes: Mapping[Var, int]) -> dict[int, list[Var]]:
    """Return for each unit whose value may be offloaded the results that are in host memory then.

    These are the results that the backward pass may read, by itself or to compute others again.
    """
    fetched: dict[int, list[Var]] = {}
    stuck: set[int] = set()
    for var, u in nodes.items():
        readers = (
            reader
            for reader in found.readers.get(var, ())
            if found.region[reader] == found.region[found.made_in[var]]
        )
        if not found.late[u] and any(
            found.late[reader]
            or (
                found.is_repeatable(reader)
                and all(nodes.get(made) != u for made in found.units[reader].makes)
            )
            for reader in readers
        ):
            fetched.setdefault(u, []).append(var)
            if var not in found.arrivals:
                stuck.add(u)
    return {u: variables for u, variables in fetched.items() if u not in stuck}


def _recipes(found: Passes, nodes: Mapping[Var, int]) -> dict[int, Recipe]:
    """Return the recipe of each unit that can be repeated; a product's recipe has its epilogues."""
    recipes: dict[int, Recipe] = {}
    added: dict[int, list[int]] = {}
    for u, unit in enumerate(found.units):
        if not found.is_repeatable(u):
            continue
        recipe = Recipe(frozenset((u,)), frozenset())
        own = {nodes[var] for var in unit.makes if var in nodes}
        for var in unit.reads:
            if var not in found.depending or var not in found.made_in:
                continue
            maker = found.made_in[var]
            if var in nodes:
                recipe = recipe.with_parts(Recipe(frozenset(), frozenset((nodes[var],)) - own))
            elif found.late[maker] or maker not in recipes:
                break
            else:
                recipe = recipe.with_parts(recipes[maker])
        else:
            recipes[u] = recipe
            for product in own - {u}:
                added.setdefault(product, []).append(u)
    for product, parts in added.items():
        for part in parts if product in recipes else ():
            joined = recipes[product].with_parts(recipes[part])
            # An epilogue reads its product, also through what is not stored, such as a reshape.
            recipes[product] = Recipe(joined.units, joined.sources - {product})
    return recipes


class _Uses:
    """When values are read, by the units that they belong to, or that compute them inside kernels.

    Attributes:
        until: the last point at which the forward pass reads a value, or what it derives from it
            without storing it.
        first_late: the first such point of the backward pass.
        blocked: values from which the forward pass derives something that it does not store, that
            the backward pass reads, and that can't be computed again.
        ends: the last point at which a value is computed.
        relevant: values that the backward pass reads, or computes others from.
    """

    def __init__(
        self, found: Passes, nodes: Mapping[Var, int], recipes: Mapping[int, Recipe]
    ) -> None:
        self.until: dict[int, int] = {}
        self.first_late: dict[int, int] = {}
        self.blocked: set[int] = set()
        self.ends: dict[int, int] = {}
        self.relevant: set[int] = set()
        for u in reversed(range(len(found.units))):
            unit = found.units[u]
            end = unit.eqns[-1][0]
            own = {nodes[var] for var in unit.makes if var in nodes}
            is_inside = not found.late[u] and len(own) < 1
            for node in own:
                self.ends[node] = max(end, self.ends.get(node, end))
                if node != u and u not in recipes:
                    self.blocked.add(node)
            if u in self.first_late and not own:
                self.relevant.add(u)
            self.relevant.update(own & self.first_late.keys())
            if not self.relevant.isdisjoint({u, *own}) and u in recipes:
                self.relevant |= recipes[u].sources
            for var in unit.reads:
                key = nodes.get(var, found.made_in.get(var))
                if key is None or key in own:
                    continue
                if found.late[u]:
                    self._read_late(key, found.units[found.heads[u]].number)
                    continue
                self.until[key] = max(end, self.until.get(key, 0))
                if is_inside:
                    self.until[key] = max(self.until[key], self.until.get(u, 0))
                    if u in self.first_late:
                        self._read_late(key, self.first_late[u])
                        if u not in recipes or u in self.blocked:
                            self.blocked.add(key)

    def _read_late(self, key: int, point: int) -> None:
        self.first_late[key] = min(point, self.first_late.get(key, point))


def _negligible(sizes: Mapping[int, float]) -> set[int]:
    """Return the smallest values, which together have a small share of all bytes."""
    left = _NEGLIGIBLE * sum(sizes.values())
    smallest: set[int] = set()
    for u in sorted(sizes, key=lambda u: sizes[u]):
        left -= sizes[u]
        if left < 0:
            break
        smallest.add(u)
    return smallest
