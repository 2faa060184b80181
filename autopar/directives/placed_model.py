"""Intermediate representation of a placed model: equations, syncs, stage boundaries and regions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

from jax.extend.core import JaxprEqn, Var

from autopar.directives.definitions import Replace, Sync
from autopar.directives.equation_regions import Region
from autopar.directives.model_graph import ModelGraph
from autopar.directives.value_layouts import ValueLayout
from autopar.ir.graph import Atom, variables
from autopar.ir.spec import Spec


@dataclass(frozen=True, slots=True, eq=False)
class PlacedEquation:
    """An equation and the layouts of its operands.

    Attributes:
        scope: the path of the module that the equation belongs to.
        eqn: the equation.
        operands: the layout of each operand.
        forked: how the result of a draw of random numbers is split, if each device draws its own
            shard.
    """

    scope: str
    eqn: JaxprEqn
    operands: tuple[ValueLayout, ...]
    forked: Spec | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PlacedSync:
    """A sync of one value: `result` is `source` after it. `name` is unique in the model."""

    sync: Sync
    name: str
    source: Var
    result: Var
    before: ValueLayout
    after: ValueLayout


@dataclass(frozen=True, slots=True, eq=False)
class StageBoundary:
    """The end of a pipeline stage."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRegion:
    """A region that reads `inputs` and returns `outputs`.

    Attributes:
        wanted: for a replacement the layout of each input, and the layout that the replaced
            equations read it in.
        made: for a replacement the layout of each output.
    """

    region: Region
    items: "tuple[PlacedItem, ...]"
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    wanted: tuple[tuple[ValueLayout, ValueLayout], ...] = ()
    made: tuple[ValueLayout, ...] = ()


type PlacedItem = PlacedEquation | PlacedSync | StageBoundary | PlacedRegion


@dataclass(frozen=True, slots=True, eq=False)
class PlacedModel:
    """What runs, in order, and the layouts of arguments and results."""

    graph: ModelGraph
    items: tuple[PlacedItem, ...]
    arguments: tuple[ValueLayout, ...]
    outvars: tuple[Atom, ...]
    results: tuple[ValueLayout, ...]


def close_regions(items: Sequence[PlacedItem], needed: set[Var]) -> tuple[PlacedItem, ...]:
    """Return `items` with the inputs and outputs of each region, found by a liveness analysis.

    Args:
        items: the items in the order in which they run.
        needed: the values that are used after them; extended by what the items read.
    """
    closed: list[PlacedItem] = []
    for item in reversed(items):
        if isinstance(item, PlacedRegion) and not isinstance(item.region, Replace):
            outputs = tuple(var for var in _defined(item.items) if var in needed)
            inside = close_regions(item.items, set(outputs))
            defined = set(_defined(inside))
            inputs = tuple(var for var in dict.fromkeys(_read(inside)) if var not in defined)
            item = PlacedRegion(item.region, inside, inputs, outputs)
        needed.update(_read([item]))
        closed.append(item)
    return tuple(reversed(closed))


def _defined(items: Iterable[PlacedItem]) -> Iterable[Var]:
    for item in items:
        match item:
            case PlacedEquation(_, eqn):
                yield from eqn.outvars
            case PlacedSync():
                yield item.result
            case PlacedRegion():
                yield from item.outputs or _defined(item.items)
            case StageBoundary():
                pass
            case _:
                assert_never(item)


def _read(items: Iterable[PlacedItem]) -> Iterable[Var]:
    for item in items:
        match item:
            case PlacedEquation(_, eqn):
                yield from variables(eqn.invars)
            case PlacedSync():
                yield item.source
            case PlacedRegion():
                yield from item.inputs
            case StageBoundary():
                pass
            case _:
                assert_never(item)
