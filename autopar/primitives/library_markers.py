"""Primitives that libraries put around computations: markers of Equinox, choices of platform.

They have the values of simple JAX operations. The records go by name, so Equinox is not imported.
"""

from jax.extend.core import JaxprEqn

from autopar.primitives.factors import FactorBuilder, Kind, OpFactors
from autopar.primitives.pointwise import pointwise
from autopar.primitives.registry import PrimitiveRecord
from autopar.primitives.rule_helpers import ShardingRule, shape_of


def _over_all(kind: Kind) -> ShardingRule:
    """Return the rule of a reduction over all dims of its operand."""

    def rule(eqn: JaxprEqn) -> OpFactors:
        build = FactorBuilder()
        operand = tuple(build.new(size, kind) for size in shape_of(eqn.invars[0]))
        return build.build([operand], [()])

    return rule


_MARK = PrimitiveRecord(movement="identity", is_view=True)

RECORDS = {
    "nonbatchable": _MARK,
    "nondifferentiable_backward": _MARK,
    "nontraceable": _MARK,
    # an uninitialized number, from which JAX makes the results of a scan
    "empty2": PrimitiveRecord(factors=pointwise, fusion="elementwise"),
    # a number without operands, by which `jax.lax.platform_dependent` chooses
    "platform_index": PrimitiveRecord(factors=pointwise, fusion="elementwise"),
    "select_if_vmap": PrimitiveRecord(
        factors=pointwise, fusion="elementwise", algebra="selection", data=slice(1, None)
    ),
    "unvmap_all": PrimitiveRecord(factors=_over_all("min"), fusion="reduction"),
    "unvmap_any": PrimitiveRecord(factors=_over_all("max"), fusion="reduction"),
    "unvmap_max": PrimitiveRecord(factors=_over_all("max"), fusion="reduction"),
}


def raises_error(eqn: JaxprEqn) -> bool:
    """Return whether an equation calls the function by which `equinox.error_if` ends a step.

    Its results are never read, because it raises an error.
    """
    if eqn.primitive.name != "pure_callback":
        return False
    function = getattr(eqn.params["callback"], "callback_func", None)
    return getattr(function, "__module__", None) == "equinox._errors"
