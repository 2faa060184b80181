"""Random numbers, which depend only on a key and on the position of an element.

With JAX's default, partitionable threefry, each device generates its own shard.
"""

from jax.extend.core import JaxprEqn

from autopar.primitives.factors import FactorBuilder, OpFactors
from autopar.primitives.pointwise import pointwise
from autopar.primitives.registry import PrimitiveRecord
from autopar.primitives.rule_helpers import leading, leading_of_both, shape_of


def _per_key(eqn: JaxprEqn) -> OpFactors:
    """Shard the keys, each of which generates an array."""
    build = FactorBuilder()
    keys = build.dims(shape_of(eqn.invars[0]))
    made = build.dims(shape_of(eqn.outvars[0])[len(keys) :])
    return build.build([keys], [(*keys, *made)])


def _of_keys(eqn: JaxprEqn) -> OpFactors:
    """Shard the keys and what they generate; keep what one key generates whole."""
    return leading(eqn, len(shape_of(eqn.invars[0])))


RECORDS = {
    "random_bits": PrimitiveRecord(factors=_per_key, is_recomputed=False),
    "random_clone": PrimitiveRecord(factors=pointwise),
    "random_fold_in": PrimitiveRecord(factors=pointwise),
    "random_gamma": PrimitiveRecord(factors=_of_keys, is_recomputed=False, runs_on_shards=True),
    "random_seed": PrimitiveRecord(factors=pointwise),
    "random_split": PrimitiveRecord(factors=_per_key),
    # The last dim of the numbers holds those that a key consists of.
    "random_unwrap": PrimitiveRecord(factors=leading_of_both),
    "random_wrap": PrimitiveRecord(factors=leading_of_both),
    "threefry2x32": PrimitiveRecord(factors=pointwise, is_recomputed=False),
}
