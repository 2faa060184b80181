"""Intermediate representation of a placed model: equations, syncs, stage boundaries, and regions of these."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

from jax.extend.core import JaxprEqn, Var

from autopar.directives.definitions import Replace, Sync
from autopar.directives.equation_regions import Region
from autopar.directives.model_graph import ModelGraph
from autopar.directives.value_layouts import ValueLayout
from autopar.ir.graph import Atom
from autopar.ir.spec import Spec


@dataclass(frozen=True, slots=True, eq=False)
class PlacedEquation:
    """An equation of the module at `scope`, and where its operands are; a draw of random numbers may be `forked`, split so."""

    scope: str
    eqn: JaxprEqn
    operands: tuple[ValueLayout, ...]
    forked: Spec | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PlacedSync:
    """`result` is `source` after a sync; `name` is unique among those of a model."""

    sync: Sync
    name: str
    source: Var
    result: Var
    before: ValueLayout
    after: ValueLayout


@dataclass(frozen=True, slots=True, eq=False)
class StageBoundary:
    """A pipeline stage ends here."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRegion:
    """A region: reads `inputs`, makes `outputs`. A replacement gets its inputs, in its own order, where `wanted` says."""

    region: Region
    items: "tuple[PlacedItem, ...]"
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    wanted: tuple[tuple[ValueLayout, ValueLayout], ...] = ()


type PlacedItem = PlacedEquation | PlacedSync | StageBoundary | PlacedRegion


@dataclass(frozen=True, slots=True, eq=False)
class PlacedModel:
    """What runs, and where its arguments and results are."""

    graph: ModelGraph
    items: tuple[PlacedItem, ...]
    arguments: tuple[ValueLayout, ...]
    outvars: tuple[Atom, ...]
    results: tuple[ValueLayout, ...]


def closed(items: Sequence[PlacedItem], needed: set[Var]) -> tuple[PlacedItem, ...]:
    """`items`, with what each region reads and makes; `needed` are the values used after them."""
    found: list[PlacedItem] = []
    for item in reversed(items):
        if isinstance(item, PlacedRegion) and not isinstance(item.region, Replace):
            outputs = tuple(var for var in _made(item.items) if var in needed)
            inside = closed(item.items, set(outputs))
            made = set(_made(inside))
            inputs = tuple(var for var in dict.fromkeys(_read(inside)) if var not in made)
            item = PlacedRegion(item.region, inside, inputs, outputs)
        needed.update(_read([item]))
        found.append(item)
    return tuple(reversed(found))


def _made(items: Iterable[PlacedItem]) -> Iterable[Var]:
    for item in items:
        match item:
            case PlacedEquation(_, eqn):
                yield from eqn.outvars
            case PlacedSync():
                yield item.result
            case PlacedRegion():
                yield from item.outputs or _made(item.items)
            case StageBoundary():
                pass
            case _:
                assert_never(item)


def _read(items: Iterable[PlacedItem]) -> Iterable[Var]:
    for item in items:
        match item:
            case PlacedEquation(_, eqn):
                yield from (atom for atom in eqn.invars if isinstance(atom, Var))
            case PlacedSync():
                yield item.source
            case PlacedRegion():
                yield from item.inputs
            case StageBoundary():
                pass
            case _:
                assert_never(item)
