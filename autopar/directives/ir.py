"""Intermediate representation of a placed model: equations, syncs, stage boundaries, and regions of these."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

from jax.extend.core import JaxprEqn, Var

from autopar.directives.definitions import Replace, Sync
from autopar.directives.equation_regions import Region
from autopar.directives.model_graph import ModelGraph
from autopar.directives.value_layouts import Layout
from autopar.ir.graph import Atom
from autopar.ir.spec import Spec


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """An equation of the module at `scope`, and where its operands are; a draw of random numbers may be `forked`, split so."""

    scope: str
    eqn: JaxprEqn
    operands: tuple[Layout, ...]
    forked: Spec | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Synced:
    """`result` is `source` after a sync; `name` is unique among those of a model."""

    sync: Sync
    name: str
    source: Var
    result: Var
    before: Layout
    after: Layout


@dataclass(frozen=True, slots=True, eq=False)
class Boundary:
    """A pipeline stage ends here."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A region: reads `inputs`, makes `outputs`. A replacement gets its inputs, in its own order, where `wanted` says."""

    region: Region
    items: "tuple[Item, ...]"
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    wanted: tuple[tuple[Layout, Layout], ...] = ()


type Item = Compute | Synced | Boundary | Group


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """What runs, and where its arguments and results are."""

    graph: ModelGraph
    items: tuple[Item, ...]
    arguments: tuple[Layout, ...]
    outvars: tuple[Atom, ...]
    results: tuple[Layout, ...]


def closed(items: Sequence[Item], needed: set[Var]) -> tuple[Item, ...]:
    """`items`, with what each region reads and makes; `needed` are the values used after them."""
    found: list[Item] = []
    for item in reversed(items):
        if isinstance(item, Group) and not isinstance(item.region, Replace):
            outputs = tuple(var for var in _made(item.items) if var in needed)
            inside = closed(item.items, set(outputs))
            made = set(_made(inside))
            inputs = tuple(var for var in dict.fromkeys(_read(inside)) if var not in made)
            item = Group(item.region, inside, inputs, outputs)
        needed.update(_read([item]))
        found.append(item)
    return tuple(reversed(found))


def _made(items: Iterable[Item]) -> Iterable[Var]:
    for item in items:
        match item:
            case Compute(_, eqn):
                yield from eqn.outvars
            case Synced():
                yield item.result
            case Group():
                yield from item.outputs or _made(item.items)
            case Boundary():
                pass
            case _:
                assert_never(item)


def _read(items: Iterable[Item]) -> Iterable[Var]:
    for item in items:
        match item:
            case Compute(_, eqn):
                yield from (atom for atom in eqn.invars if isinstance(atom, Var))
            case Synced():
                yield item.source
            case Group():
                yield from item.inputs
            case Boundary():
                pass
            case _:
                assert_never(item)
