"""The rule table: for each primitive, what its equation does to array dims (`OpFactors`).

To teach the planner a primitive, write a function from its equation to `OpFactors` and enter it in the `RULES` of its
family; a pointwise one only needs its name in `POINTWISE`. tests/autopar/sharding/test_rules.py then runs every sharding that
the rule allows and compares it with the unsharded equation.
"""

from jax.core import ShapedArray
from jax.extend.core import JaxprEqn

from autopar.primitives import (
    contract,
    index,
    linalg,
    loops,
    order,
    random,
    reduce,
    shape,
    shard_map,
)
from autopar.primitives.factors import OpFactors
from autopar.primitives.pointwise import POINTWISE, pointwise
from autopar.primitives.rule_helpers import Rule, replicated

__all__ = [
    "PASS_THROUGH",
    "POINTWISE",
    "REPLICATED",
    "RULES",
    "MissingRuleError",
    "is_replicated_only",
    "op_factors",
]

PASS_THROUGH = frozenset(
    {"accumulate", "device_put", "optimization_barrier", "sharding_constraint"}
)
"""Primitives whose i-th result is their i-th operand."""

REPLICATED = frozenset({
    *("cholesky_update", "custom_linear_solve", "pure_callback", "random_gamma", "rng_bit_generator", "rng_uniform"),
})  # fmt: skip
"""Primitives that every device computes whole, for want of a better rule."""

RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE, pointwise),
    **shape.RULES,
    **reduce.RULES,
    **contract.RULES,
    **loops.RULES,
    **index.RULES,
    **order.RULES,
    **linalg.RULES,
    **shard_map.RULES,
    **random.RULES,
    **dict.fromkeys(REPLICATED, replicated),
}


class MissingRuleError(NotImplementedError):
    """The step uses a primitive that has no rule, and that can't be computed whole on every device either."""

    def __init__(self, eqn: JaxprEqn) -> None:
        shapes = ", ".join(str(atom.aval) for atom in eqn.invars)
        results = ", ".join(str(var.aval) for var in eqn.outvars)
        super().__init__(
            f"no sharding rule for primitive {eqn.primitive.name!r}, used as ({shapes}) -> ({results})"
            f" in {str(eqn.source_info.name_stack) or 'the step'}: it has effects, or works on something other than arrays;"
            " rules live in autopar/primitives"
        )


def op_factors(eqn: JaxprEqn) -> OpFactors:
    """The factors of `eqn`, from the rule of its primitive; without one, every device computes it whole.

    Raises:
        MissingRuleError: there is no rule for the primitive, which has effects or works on something other than arrays.
    """
    rule = RULES.get(eqn.primitive.name)
    if rule is None:
        if eqn.effects or not all(
            isinstance(atom.aval, ShapedArray) for atom in (*eqn.invars, *eqn.outvars)
        ):
            raise MissingRuleError(eqn)
        rule = replicated
    return rule(eqn)


def is_replicated_only(name: str) -> bool:
    """Whether the primitive is planned as replicated for want of a better rule; a plan says so."""
    return name in REPLICATED or name not in RULES.keys() | PASS_THROUGH
