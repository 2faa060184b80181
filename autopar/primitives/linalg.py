"""Linear algebra: matrices are whole, batches of them and right-hand sides may be sharded."""

from math import prod

from jax.extend.core import JaxprEqn

from autopar.primitives.equation_work import FlopRule, Shapes, elements, memory_kernel
from autopar.primitives.factors import FactorBuilder, OpFactors
from autopar.primitives.registry import PrimitiveRecord
from autopar.primitives.rule_helpers import ShardingRule, leading, shape_of


def _batched(core: int = 2) -> ShardingRule:
    """Return a rule that shards all dims but the last `core` ones, which are one problem."""

    def rule(eqn: JaxprEqn) -> OpFactors:
        return leading(eqn, len(shape_of(eqn.invars[0])) - core)

    return rule


def _cubic(factor: float) -> FlopRule:
    """Return the rule of `factor` x n**3 FLOP per square matrix of n rows."""

    def flops(eqn: JaxprEqn, operands: Shapes) -> float:
        return factor * elements(eqn, operands) * operands[0][-1]

    return flops


def _decomposition(factor: float) -> PrimitiveRecord:
    """Return the record of a matrix decomposition that takes `factor` x n**3 FLOP."""
    return PrimitiveRecord(factors=_batched(), work=memory_kernel(_cubic(factor)))


def _triangular_solve(eqn: JaxprEqn) -> OpFactors:
    """Share the batch of matrices and the right-hand sides, which are columns if left_side."""
    matrix, sides = map(shape_of, eqn.invars)
    build = FactorBuilder()
    batch = build.dims(matrix[:-2])
    unknowns, solved = (-2, -1) if eqn.params["left_side"] else (-1, -2)
    of_sides = {
        unknowns: build.new(sides[unknowns], "whole"),
        solved: build.new(sides[solved]),
    }
    of_result = (*batch, of_sides[-2], of_sides[-1])
    return build.build([(*batch, *build.dims(matrix[-2:], "whole")), of_result], [of_result])


def _triangular_solve_flops(_: JaxprEqn, operands: Shapes) -> float:
    """Return n**2 FLOP per right-hand side of n unknowns."""
    matrix, sides = operands
    return float(prod(sides) * matrix[-1])


RECORDS = {
    # FLOP to the leading term: Golub and Van Loan, Matrix Computations, 4th edition.
    "cholesky": _decomposition(1 / 3),
    "eig": _decomposition(25),
    "eigh": _decomposition(9),
    "lu": _decomposition(2 / 3),
    "qr": _decomposition(4 / 3),
    "schur": _decomposition(25),
    "svd": _decomposition(22),
    "triangular_solve": PrimitiveRecord(
        factors=_triangular_solve,
        work=memory_kernel(_triangular_solve_flops),
        algebra="linear",
        data=slice(1, 2),
        runs_on_shards=True,
    ),
    "hessenberg": PrimitiveRecord(factors=_batched()),
    "householder_product": PrimitiveRecord(factors=_batched()),
    "lu_pivots_to_permutation": PrimitiveRecord(factors=_batched(1)),
    "symmetric_product": PrimitiveRecord(factors=_batched()),
    "tridiagonal": PrimitiveRecord(factors=_batched()),
    "tridiagonal_solve": PrimitiveRecord(factors=_batched(1)),
}
