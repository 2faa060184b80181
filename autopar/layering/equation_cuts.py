"""The cut of an equation along a factor, as it follows from the cut of one of its values.

The factors of an equation (`autopar.primitives.factors`) say which dims of its operands and results
are cut together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core.primitives import broadcast_in_dim_p

from autopar.ir.array_cuts import Cut
from autopar.ir.graph import Atom, aval_of
from autopar.primitives import MissingRuleError, op_factors, record_of
from autopar.primitives.factors import PARTIAL, Dims, OpFactors


@dataclass(frozen=True, slots=True)
class EquationCut:
    """The factor along which an equation is cut.

    Attributes:
        factors: the factors of the equation.
        factor: the number of the factor that is cut.
        sizes: the trip count of the factor in each piece.
        layers: the layer of each piece; empty if pieces have no layers.
    """

    factors: OpFactors
    factor: int
    sizes: tuple[int, ...]
    layers: tuple[int, ...]

    def cut(self, dims: Dims) -> Cut | None:
        """Return the cut of an operand or result with these factors."""
        for dim, factors in enumerate(dims):
            if self.factor in factors:
                inner = _inner_size(self.factors, factors)
                return Cut(dim, tuple(size * inner for size in self.sizes), self.layers)
        return None


def is_same_cut(cut: Cut, other: Cut) -> bool:
    """Return whether two cuts have the same pieces, whatever their layers."""
    return (cut.dim, cut.sizes) == (other.dim, other.sizes)


def roots(jaxpr: Jaxpr, value: Atom, dim: int) -> set[Atom]:
    """Return the inputs of `jaxpr` whose slices a slice of `value` along `dim` is computed from.

    The set also has values that no slice of an operand suffices for. So `value` is computed
    from slices of inputs only if all roots are inputs.
    """
    producer: dict[Atom, JaxprEqn] = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    found: set[Atom] = set()
    visited: set[tuple[Atom, int]] = set()
    pending = [(value, dim)]
    while pending:
        atom, dim = pending.pop()
        if (atom, dim) in visited:
            continue
        visited.add((atom, dim))
        eqn = producer.get(atom)
        sliced = None if eqn is None else _sliced_operands(eqn, atom, dim)
        if sliced is None:
            found.add(atom)
        else:
            pending += sliced
    return found


def _sliced_operands(eqn: JaxprEqn, result: Atom, dim: int) -> list[tuple[Atom, int]] | None:
    """Return the operands that a slice of a result is computed from slices of, with their dims.

    None if it needs a whole array.
    """
    size = aval_of(result).shape[dim]
    position = next(r for r, var in enumerate(eqn.outvars) if var is result)
    cut = cut_of_equation(eqn, ("out", position), Cut(dim, (1,) * size))
    if cut is None:
        return None
    operands: list[tuple[Atom, int]] = []
    for atom, dims in zip(eqn.invars, cut.factors.operands, strict=True):
        own = cut.cut(dims)
        if isinstance(atom, Var) and own is not None:
            operands.append((atom, own.dim))
        elif isinstance(atom, Var) and aval_of(atom).ndim > 0:
            return None
    return operands


def _inner_size(factors: OpFactors, dim: Sequence[int]) -> int:
    """Return the number of elements of a dim for each iteration of its outermost factor."""
    inner = 1
    for factor in dim[1:]:
        inner *= factors.sizes[factor]
    return inner


def cut_of_equation(eqn: JaxprEqn, position: tuple[str, int], cut: Cut) -> EquationCut | None:
    """Return how an equation is cut if one of its values is; None if it can't be.

    Args:
        eqn: the equation.
        position: "in" or "out", and the position of the value among the operands or results.
        cut: the cut of that value.
    """
    record = record_of(eqn)
    if (
        eqn.effects
        or record.collective is not None
        or record.runs_body
        or record.is_replicated_only
        or not record.ignores_place
    ):
        return None
    try:
        factors = op_factors(eqn)
    except MissingRuleError:
        return None
    side, index = position
    dims = (factors.operands if side == "in" else factors.results)[index][cut.dim]
    if not dims or factors.once:
        return None
    factor = dims[0]
    inner = _inner_size(factors, dims)
    kind = factors.kinds[factor]
    if kind == "whole" or any(size % inner for size in cut.sizes):
        return None
    has_factor = [
        sum(factor in group for group in value) for value in (*factors.operands, *factors.results)
    ]
    outermost = all(
        group[0] == factor
        for value in (*factors.operands, *factors.results)
        for group in value
        if factor in group
    )
    num_operands = len(factors.operands)
    in_results = all(has_factor[num_operands:])
    created = not any(has_factor[:num_operands])
    if (
        not outermost
        or max(has_factor) > 1
        or (kind == "parallel" and not in_results)
        or (kind in PARTIAL and any(has_factor[num_operands:]))
        or (created and eqn.primitive is not broadcast_in_dim_p)
    ):
        return None
    return EquationCut(factors, factor, tuple(size // inner for size in cut.sizes), cut.layers)
