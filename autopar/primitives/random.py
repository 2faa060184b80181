"""Random numbers that depend on a key and on the place of an element alone.

With JAX's default, partitionable threefry, a device can make its shard of them on its own.
"""

from jax.extend.core import JaxprEqn

from autopar.primitives.factors import FactorBuilder, OpFactors
from autopar.primitives.pointwise import pointwise
from autopar.primitives.rule_helpers import Rule, leading, shape_of


def _per_key(eqn: JaxprEqn) -> OpFactors:
    """Each key makes an array."""
    build = FactorBuilder()
    keys = build.dims(shape_of(eqn.invars[0]))
    made = build.dims(shape_of(eqn.outvars[0])[len(keys) :])
    return build.build([keys], [(*keys, *made)])


def _wrapping(eqn: JaxprEqn) -> OpFactors:
    """Between keys and the integers they consist of."""
    return leading(eqn, min(len(shape_of(eqn.invars[0])), len(shape_of(eqn.outvars[0]))))


RULES: dict[str, Rule] = {
    "random_bits": _per_key,
    "random_clone": pointwise,
    "random_fold_in": pointwise,
    "random_seed": pointwise,
    "random_split": _per_key,
    "random_unwrap": _wrapping,
    "random_wrap": _wrapping,
    "threefry2x32": pointwise,
}
