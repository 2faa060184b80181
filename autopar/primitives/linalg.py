"""Linear algebra: matrices are whole, batches of them may be sharded."""

from jax.extend.core import JaxprEqn

from autopar.primitives.equation_work import FlopRule, Shapes, elements, memory_kernel
from autopar.primitives.factors import OpFactors
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


RECORDS = {
    # FLOP to the leading term: Golub and Van Loan, Matrix Computations, 4th edition.
    "cholesky": _decomposition(1 / 3),
    "eig": _decomposition(25),
    "eigh": _decomposition(9),
    "lu": _decomposition(2 / 3),
    "qr": _decomposition(4 / 3),
    "schur": _decomposition(25),
    "svd": _decomposition(22),
    "triangular_solve": _decomposition(1),
    "hessenberg": PrimitiveRecord(factors=_batched()),
    "householder_product": PrimitiveRecord(factors=_batched()),
    "lu_pivots_to_permutation": PrimitiveRecord(factors=_batched(1)),
    "symmetric_product": PrimitiveRecord(factors=_batched()),
    "tridiagonal": PrimitiveRecord(factors=_batched()),
    "tridiagonal_solve": PrimitiveRecord(factors=_batched(1)),
}
