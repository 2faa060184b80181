"""Equations that XLA's partitioner divides wrongly (jaxlib 0.11.2).

These are convolutions with groups: the gradient of a vmapped convolution for its kernel has the examples as groups, and that of a
grouped one has `batch_group_count`. Under some shardings the partitioned program computes other numbers, under `jax.jit` as well.
tests/fuzz/test_splits.py compares every split of every family of primitives with one device: it names the primitives that belong
here when a new jaxlib gets others wrong.
"""

from jax.extend.core import JaxprEqn


def is_shardwise(eqn: JaxprEqn) -> bool:
    """Return whether XLA's partitioner would divide the equation wrongly."""
    if eqn.primitive.name != "conv_general_dilated":
        return False
    return eqn.params["feature_group_count"] > 1 or eqn.params["batch_group_count"] > 1
