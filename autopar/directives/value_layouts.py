"""Where the values of a scheduled model are: split, whole, or a partial sum on each device; and how equations carry that on.

What an equation does to dims is told by the planner's rule table (`autopar.primitives`); here a sharding is not chosen but
followed from operands to results. Nothing is ever moved: what would need moving is an error that a directive must mend.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import (
    custom_jvp_call_p,
    custom_vjp_call_p,
    jit_p,
    reduce_max_p,
    remat_p,
)

from autopar.ir.graph import Atom, aval_of
from autopar.ir.spec import LogicalMesh, Spec, axes_of, partition_spec
from autopar.primitives import op_factors, record_of
from autopar.primitives.factors import OpFactors
from autopar.primitives.linearity import is_linear

INNER = {
    jit_p: "jaxpr",
    custom_jvp_call_p: "call_jaxpr",
    custom_vjp_call_p: "call_jaxpr",
    remat_p: "jaxpr",
}
"""Primitives that are as their body is."""


@dataclass(frozen=True, slots=True)
class ValueLayout:
    """Where a value is.

    Attributes:
        dims: for each dim the mesh axes it is split over.
        partial: mesh axes along which what devices hold has yet to be added up.
        largest: mesh axes along which the largest of what devices hold has yet to be taken.
        varying: mesh axes along which the devices' values are, to JAX's types (`jax.typeof(x).manual_axis_type`), values of their own, so that
            their gradients are too. Of a whole value: gradients are partial.
    """

    dims: Spec
    partial: frozenset[str] = frozenset()
    varying: frozenset[str] = frozenset()
    largest: frozenset[str] = frozenset()

    @property
    def split(self) -> frozenset[str]:
        return axes_of(self.dims)

    def __str__(self) -> str:
        words = [f"split as {partition_spec(self.dims)}" if self.split else "whole"]
        if self.partial:
            words.append(f"a partial sum over {', '.join(sorted(self.partial))}")
        if self.largest:
            words.append(f"a partial maximum over {', '.join(sorted(self.largest))}")
        return " and ".join(words if self.split or len(words) == 1 else words[1:])


def whole(rank: int) -> ValueLayout:
    return ValueLayout(((),) * rank)


@dataclass
class LayoutError(Exception):
    """An equation can't run on what its operands are.

    Attributes:
        operand: which operand it is about.
        partial: the mesh axes over which it is a partial sum, or maximum, but must not be; empty when something else is wrong.
    """

    operand: int
    reason: str
    partial: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class EquationLayouts:
    """An equation on shards: how it takes its operands, and where its results are then."""

    operands: tuple[ValueLayout, ...]
    results: tuple[ValueLayout, ...]


def follow(eqn: JaxprEqn, layouts: Sequence[ValueLayout], mesh: LogicalMesh) -> EquationLayouts:
    """Where the results of `eqn` are when its operands are as `layouts` say.

    An operand that is whole is sliced by each device where the others are split. Raises LayoutError.
    """
    for k, each in enumerate(layouts):
        if each.largest:
            raise LayoutError(
                k, f"is a partial maximum, and {eqn.primitive.name} needs it whole", each.largest
            )
    if eqn.primitive in INNER:
        return EquationLayouts(tuple(layouts), tuple(_follow_inside(eqn, layouts, mesh)))
    summed = _carried_partial(eqn, layouts)
    factors = op_factors(eqn)
    assignment = _assignment(factors, layouts, mesh)
    specs = [factors.operand_spec(k, assignment) for k in range(len(layouts))]
    varying = frozenset().union(*(each.varying for each in layouts), *map(axes_of, specs))
    partial = summed | frozenset(factors.partial_axes(assignment))
    largest: frozenset[str] = frozenset()
    for kind, axes in zip(factors.kinds, assignment, strict=True):
        if kind in ("max", "min") and axes:
            if eqn.primitive is not reduce_max_p:
                raise LayoutError(
                    0, f"is split along a dim of which {eqn.primitive.name} takes the {kind}imum"
                )
            largest = largest.union(axes)
    partial -= largest
    operands = (
        ValueLayout(spec, each.partial, varying) for spec, each in zip(specs, layouts, strict=True)
    )
    results = (
        ValueLayout(factors.result_spec(r, assignment), partial, varying, largest)
        for r in range(len(eqn.outvars))
    )
    return EquationLayouts(tuple(operands), tuple(results))


def follow_jaxpr(
    jaxpr: Jaxpr, layouts: Sequence[ValueLayout], mesh: LogicalMesh
) -> list[ValueLayout]:
    """Where the results of `jaxpr` are; partial sums inside must not arise."""
    return steps_of(jaxpr, layouts, mesh)[1]


def steps_of(
    jaxpr: Jaxpr, layouts: Sequence[ValueLayout], mesh: LogicalMesh
) -> tuple[list[tuple[JaxprEqn, EquationLayouts]], list[ValueLayout]]:
    """The equations of `jaxpr` on shards, and where its results are."""
    env = dict(zip(jaxpr.invars, layouts, strict=True))
    env.update((var, whole(aval_of(var).ndim)) for var in jaxpr.constvars)
    steps: list[tuple[JaxprEqn, EquationLayouts]] = []
    for eqn in jaxpr.eqns:
        steps.append((eqn, follow(eqn, [layout_of(a, env) for a in eqn.invars], mesh)))
        env.update(zip(eqn.outvars, steps[-1][1].results, strict=True))
    return steps, [layout_of(atom, env) for atom in jaxpr.outvars]


def layout_of(atom: Atom, env: dict[Var, ValueLayout]) -> ValueLayout:
    """The layout of `atom`; literals are whole."""
    return whole(aval_of(atom).ndim) if isinstance(atom, Literal) else env[atom]


def _follow_inside(
    eqn: JaxprEqn, layouts: Sequence[ValueLayout], mesh: LogicalMesh
) -> list[ValueLayout]:
    """The results of a function that is called; what is partial must be completed before."""
    for k, each in enumerate(layouts):
        if each.partial:
            raise LayoutError(
                k, f"is a partial sum, and {eqn.primitive.name} needs it whole", each.partial
            )
    try:
        return follow_jaxpr(eqn.params[INNER[eqn.primitive]], layouts, mesh)
    except LayoutError as error:
        split = next(k for k, each in enumerate(layouts) if each.split)
        raise LayoutError(
            split, f"can't be split in {eqn.primitive.name}: something inside {error.reason}"
        ) from error


def _carried_partial(eqn: JaxprEqn, layouts: Sequence[ValueLayout]) -> frozenset[str]:
    """The mesh axes over which results are partial sums because operands are; refused where that isn't linear."""
    axes = {k: each.partial for k, each in enumerate(layouts) if each.partial}
    if not axes:
        return frozenset()
    (first, partial), *_ = axes.items()
    match record_of(eqn).algebra:
        case "linear":  # a cast would round each device's part
            linear = len(layouts) == 1 and record_of(eqn).movement != "cast"
        case "sum":
            linear = len(axes) == len(layouts) and len(set(axes.values())) == 1
        case "product":
            linear = len(axes) == 1 and not record_of(eqn).is_contraction
        case "quotient":
            linear = is_linear(eqn, list(axes))
        case _:
            linear = False
    if not linear:
        raise LayoutError(
            first, f"is a partial sum, and {eqn.primitive.name} needs it whole", partial
        )
    return partial


def _assignment(
    factors: OpFactors, layouts: Sequence[ValueLayout], mesh: LogicalMesh
) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each factor, as the operands have them."""
    chosen: dict[int, tuple[str, ...]] = {}
    used: dict[str, int] = {}
    for k, (dims, layout) in enumerate(zip(factors.operands, layouts, strict=True)):
        for dim, (inside, axes) in enumerate(zip(dims, layout.dims, strict=True)):
            if not axes:
                continue
            if not inside or factors.kinds[inside[0]] == "whole":
                raise LayoutError(k, f"is split along dim {dim}, which must be whole here")
            if chosen.setdefault(inside[0], axes) != axes:
                raise LayoutError(
                    k,
                    f"is split over {axes} along dim {dim}, another operand over {chosen[inside[0]]}",
                )
            if any(used.setdefault(axis, inside[0]) != inside[0] for axis in axes):
                raise LayoutError(
                    k, f"is split over {axes} along dim {dim}, another operand along another dim"
                )
    for k, layout in enumerate(layouts):
        if not layout.partial.isdisjoint(used):
            raise LayoutError(
                k,
                "is a partial sum, and another operand is split over the same axis",
                layout.partial,
            )
    assignment = tuple(chosen.get(f, ()) for f in range(len(factors.sizes)))
    if not factors.allows(assignment, mesh):
        sizes = {factors.sizes[f]: axes for f, axes in chosen.items()}
        raise LayoutError(
            next(k for k, each in enumerate(layouts) if each.split),
            f"can't stay split: {sizes} don't fit",
        )
    return assignment
