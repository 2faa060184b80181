"""Layouts of the values of a scheduled model, and their propagation through equations.

A layout says whether a value is split, whole, or a partial sum on each device. The planner's rules
(`autopar.primitives`) say how the dims of an equation correspond. Layouts propagate from operands
to results; no sharding is chosen, and no value is resharded. Where an equation would need a
resharding, propagation fails, and a directive has to resolve it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import reduce_max_p

from autopar.ir.calls import called_jaxpr
from autopar.ir.graph import Atom, aval_of
from autopar.ir.spec import LogicalMesh, Spec, axes_of, partition_spec
from autopar.primitives import op_factors, record_of
from autopar.primitives.factors import OpFactors
from autopar.primitives.linearity import is_linear


@dataclass(frozen=True, slots=True)
class ValueLayout:
    """How a value is laid out over the devices.

    Attributes:
        dims: for each dim the mesh axes over which it is split.
        partial: mesh axes over which the devices' values have yet to be summed.
        partial_max: mesh axes over which the maximum of the devices' values has yet to be taken.
        varying: mesh axes along which the devices' values differ according to JAX's types
            (`jax.typeof(x).manual_axis_type`). Gradients then differ along these axes too; the
            gradients of a whole value are partial sums.
    """

    dims: Spec
    partial: frozenset[str] = frozenset()
    varying: frozenset[str] = frozenset()
    partial_max: frozenset[str] = frozenset()

    @property
    def split(self) -> frozenset[str]:
        """The mesh axes over which some dim is split."""
        return axes_of(self.dims)

    def __str__(self) -> str:
        words = [f"split as {partition_spec(self.dims)}" if self.split else "whole"]
        if self.partial:
            words.append(f"a partial sum over {', '.join(sorted(self.partial))}")
        if self.partial_max:
            words.append(f"a partial maximum over {', '.join(sorted(self.partial_max))}")
        return " and ".join(words if self.split or len(words) == 1 else words[1:])


def whole_layout(rank: int) -> ValueLayout:
    """Return the layout of a value that is whole on each device."""
    return ValueLayout(((),) * rank)


@dataclass
class LayoutError(Exception):
    """An equation can't run on operands of the given layouts.

    Attributes:
        operand: the number of the operand at fault.
        reason: what is wrong with it, as the end of a sentence about the operand.
        partial: the mesh axes over which it is a partial sum or maximum, but must not be; empty
            when something else is wrong.
    """

    operand: int
    reason: str
    partial: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class EquationLayouts:
    """The layouts in which an equation takes its operands and returns its results."""

    operands: tuple[ValueLayout, ...]
    results: tuple[ValueLayout, ...]


def propagate(eqn: JaxprEqn, layouts: Sequence[ValueLayout], mesh: LogicalMesh) -> EquationLayouts:
    """Return the layouts of the results of `eqn`, given the layouts of its operands.

    Where another operand is split, an operand that is whole is taken split: each device slices it.

    Raises:
        LayoutError: The equation can't run on these operands.
    """
    for k, layout in enumerate(layouts):
        if layout.partial_max:
            raise LayoutError(
                k,
                f"is a partial maximum, and {eqn.primitive.name} needs it whole",
                layout.partial_max,
            )
    body = called_jaxpr(eqn)
    if body is not None:
        return EquationLayouts(tuple(layouts), tuple(_propagate_body(eqn, body, layouts, mesh)))
    operand_partial = _propagated_partial(eqn, layouts)
    factors = op_factors(eqn)
    assignment = _assignment(factors, layouts, mesh)
    specs = [factors.operand_spec(k, assignment) for k in range(len(layouts))]
    varying = frozenset().union(*(layout.varying for layout in layouts), *map(axes_of, specs))
    partial = operand_partial | frozenset(factors.partial_axes(assignment))
    partial_max: frozenset[str] = frozenset()
    for kind, axes in zip(factors.kinds, assignment, strict=True):
        if kind in ("max", "min") and axes:
            if eqn.primitive is not reduce_max_p:
                raise LayoutError(
                    0, f"is split along a dim over which {eqn.primitive.name} takes the {kind}imum"
                )
            partial_max = partial_max.union(axes)
    partial -= partial_max
    operands = (
        ValueLayout(spec, layout.partial, varying)
        for spec, layout in zip(specs, layouts, strict=True)
    )
    results = (
        ValueLayout(factors.result_spec(number, assignment), partial, varying, partial_max)
        for number in range(len(eqn.outvars))
    )
    return EquationLayouts(tuple(operands), tuple(results))


def jaxpr_result_layouts(
    jaxpr: Jaxpr, layouts: Sequence[ValueLayout], mesh: LogicalMesh
) -> list[ValueLayout]:
    """Return the layouts of the results of `jaxpr`, given the layouts of its inputs.

    Raises:
        LayoutError: An equation can't run, e.g. on a partial sum that arises inside.
    """
    return propagate_jaxpr(jaxpr, layouts, mesh)[1]


def propagate_jaxpr(
    jaxpr: Jaxpr, layouts: Sequence[ValueLayout], mesh: LogicalMesh
) -> tuple[list[tuple[JaxprEqn, EquationLayouts]], list[ValueLayout]]:
    """Return each equation of `jaxpr` with its layouts, and the layouts of the results.

    Raises:
        LayoutError: An equation can't run on its operands.
    """
    env = dict(zip(jaxpr.invars, layouts, strict=True))
    env.update((var, whole_layout(aval_of(var).ndim)) for var in jaxpr.constvars)
    steps: list[tuple[JaxprEqn, EquationLayouts]] = []
    for eqn in jaxpr.eqns:
        eqn_layouts = propagate(eqn, [layout_of(atom, env) for atom in eqn.invars], mesh)
        steps.append((eqn, eqn_layouts))
        env.update(zip(eqn.outvars, eqn_layouts.results, strict=True))
    return steps, [layout_of(atom, env) for atom in jaxpr.outvars]


def layout_of(atom: Atom, env: dict[Var, ValueLayout]) -> ValueLayout:
    """Return the layout of `atom`; literals are whole."""
    return whole_layout(aval_of(atom).ndim) if isinstance(atom, Literal) else env[atom]


def _propagate_body(
    eqn: JaxprEqn, body: Jaxpr, layouts: Sequence[ValueLayout], mesh: LogicalMesh
) -> list[ValueLayout]:
    """Return the layouts of the results of an equation that calls a body."""
    for k, layout in enumerate(layouts):
        if layout.partial:
            raise LayoutError(
                k, f"is a partial sum, and {eqn.primitive.name} needs it whole", layout.partial
            )
    try:
        return jaxpr_result_layouts(body, layouts, mesh)
    except LayoutError as error:
        split = next(k for k, layout in enumerate(layouts) if layout.split)
        raise LayoutError(
            split, f"can't be split in {eqn.primitive.name}: something inside {error.reason}"
        ) from error


def _propagated_partial(eqn: JaxprEqn, layouts: Sequence[ValueLayout]) -> frozenset[str]:
    """Return the mesh axes over which results are partial sums because operands are.

    Raises:
        LayoutError: The equation is not linear in the operands that are partial sums.
    """
    axes = {k: layout.partial for k, layout in enumerate(layouts) if layout.partial}
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
    """Return the mesh axes of each factor, as the layouts of the operands imply them.

    Raises:
        LayoutError: Operands disagree, or the equation can't be split like this.
    """
    axes_by_factor: dict[int, tuple[str, ...]] = {}
    factor_by_axis: dict[str, int] = {}
    for k, (dims, layout) in enumerate(zip(factors.operands, layouts, strict=True)):
        for dim, (dim_factors, axes) in enumerate(zip(dims, layout.dims, strict=True)):
            if not axes:
                continue
            if not dim_factors or factors.kinds[dim_factors[0]] == "whole":
                raise LayoutError(k, f"is split along dim {dim}, which must be whole here")
            factor = dim_factors[0]
            if axes_by_factor.setdefault(factor, axes) != axes:
                raise LayoutError(
                    k,
                    f"is split over {axes} along dim {dim}, another operand over"
                    f" {axes_by_factor[factor]}",
                )
            if any(factor_by_axis.setdefault(axis, factor) != factor for axis in axes):
                raise LayoutError(
                    k, f"is split over {axes} along dim {dim}, another operand along another dim"
                )
    for k, layout in enumerate(layouts):
        if not layout.partial.isdisjoint(factor_by_axis):
            raise LayoutError(
                k,
                "is a partial sum, and another operand is split over the same axis",
                layout.partial,
            )
    assignment = factors.assignment(axes_by_factor)
    if not factors.allows(assignment, mesh):
        sizes = {factors.sizes[f]: axes for f, axes in axes_by_factor.items()}
        raise LayoutError(
            next(k for k, layout in enumerate(layouts) if layout.split),
            f"can't stay split: {sizes} don't fit",
        )
    return assignment
