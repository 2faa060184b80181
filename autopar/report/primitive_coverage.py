"""Which primitives a step uses, and what planning knows of each."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from autopar.ir.flatten import flatten
from autopar.primitives import MissingRuleError, op_factors, record_of

if TYPE_CHECKING:
    import pandas as pd


def primitives(train_step: Callable[..., Any], *args: Any) -> "pd.DataFrame":
    """Return a table of the primitives of a step and of what planning knows of each.

    See `autopar.primitives.registry` for the meaning of records and for how to add one.

    Args:
        train_step: any function that JAX can trace.
        *args: its arguments; `jax.ShapeDtypeStruct`s suffice.

    Returns:
        A row per primitive, the most frequent first, with these columns:

        - `primitive`: its name.
        - `count`: number of its equations.
        - `sharding`: "rule"; "replicated" if every device computes it whole; "refused" if it can't
          be planned, because it has effects or operands that are no arrays; "no results" if it has
          none to shard.
        - `on_shards`: whether its parameters are adapted to shards.
        - `fusion`: how XLA:GPU fuses it, a `FusionClass`.
        - `movement`: what it does to elements if it does no arithmetic, a `Movement`, or empty.
        - `algebra`: how its result scales, an `Algebra`; empty if it is nonlinear or unknown.
    """
    import pandas as pd  # takes a second to import, and only tables need it

    jaxpr = flatten(jax.make_jaxpr(train_step)(*args))
    counts = Counter(eqn.primitive for eqn in jaxpr.eqns)
    examples = {eqn.primitive: eqn for eqn in reversed(jaxpr.eqns)}
    rows = []
    for primitive, count in counts.most_common():
        record = record_of(examples[primitive])
        rows.append(
            {
                "primitive": primitive.name,
                "count": count,
                "sharding": _sharding(examples[primitive]),
                "on_shards": record.local is not None,
                "fusion": record.fusion,
                "movement": record.movement or "",
                "algebra": record.algebra or "",
            }
        )
    columns = ["primitive", "count", "sharding", "on_shards", "fusion", "movement", "algebra"]
    return pd.DataFrame(rows, columns=columns)


def _sharding(eqn: Any) -> str:
    """Return whether an equation has a sharding rule."""
    record = record_of(eqn)
    if not eqn.outvars:
        return "no results"
    if record.passes_through:
        return "rule"
    try:
        op_factors(eqn)
    except MissingRuleError:
        return "refused"
    return "replicated" if record.is_replicated_only else "rule"
