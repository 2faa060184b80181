"""Linear algebra: whole matrices, of which a batch may be sharded."""

from jax.extend.core import JaxprEqn

from autopar.primitives.factors import OpFactors
from autopar.primitives.rule_helpers import Rule, leading, shape_of


def _batched(core: int = 2) -> Rule:
    """The last `core` dims of the first operand are one problem, those before count the problems."""

    def rule(eqn: JaxprEqn) -> OpFactors:
        return leading(eqn, len(shape_of(eqn.invars[0])) - core)

    return rule


RULES: dict[str, Rule] = {
    "cholesky": _batched(),
    "eig": _batched(),
    "eigh": _batched(),
    "hessenberg": _batched(),
    "householder_product": _batched(),
    "lu": _batched(),
    "lu_pivots_to_permutation": _batched(1),
    "qr": _batched(),
    "schur": _batched(),
    "svd": _batched(),
    "symmetric_product": _batched(),
    "triangular_solve": _batched(),
    "tridiagonal": _batched(),
    "tridiagonal_solve": _batched(1),
}
