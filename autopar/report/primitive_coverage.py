"""The primitives of a step, and their coverage by the registry of primitives."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from autopar.ir.flatten import flatten
from autopar.planning.plan_step import packed_step
from autopar.primitives import MissingRuleError, op_factors, record_of

if TYPE_CHECKING:
    import pandas as pd


def primitives(train_step: Callable[..., Any], *args: Any) -> "pd.DataFrame":
    """Return a table of the primitives of a step with their records in the registry.

    `autopar.primitives.registry` documents the records, and how to add one.

    Args:
        train_step: any function that JAX can trace.
        *args: its arguments; `jax.ShapeDtypeStruct`s suffice.

    Returns:
        A row per primitive, the most frequent first, with these columns:

        - `primitive`: its name.
        - `count`: number of its equations.
        - `sharding`: "rule"; "replicated" if every device computes it whole; "refused" if it can't
          be planned, because it has effects or operands that are not arrays; "no results" if it
          has no results to shard.
        - `on_shards`: whether its parameters are adapted to shards.
        - `fusion`: its `FusionClass`, by which XLA:GPU fuses it.
        - `movement`: its `Movement` if it only moves elements, else empty.
        - `algebra`: its `Algebra`, by which its result scales with its operands; empty if it is
          nonlinear or unknown.
    """
    import pandas as pd  # imported late because it takes a second

    step, arrays, _ = packed_step(train_step, args, ())
    jaxpr = flatten(jax.make_jaxpr(step)(*arrays))
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
