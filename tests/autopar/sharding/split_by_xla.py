"""Run an equation under a candidate as plans do, with constraints for XLA's partitioner."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from jax.lax import scatter_sub_p

from autopar.ir.evaluate import bind
from autopar.ir.spec import LogicalMesh
from autopar.ir.step_graph import StepGraph
from autopar.lowering.compilation import lower_stage
from autopar.lowering.planned import PlannedStep
from autopar.plan import MemorySplit, Plan, TimeSplit
from autopar.planning.step_planner import stage_of
from autopar.primitives import op_factors
from autopar.primitives.factors import OpFactors
from autopar.sharding.candidates import Option
from autopar.sharding.imposed_constraints import Constraint
from autopar.sharding.mesh_costs import Seconds
from autopar.sharding.options import ShardingOptions
from autopar.sharding.plan_shardings import Shardings
from autopar.tracing.trace import trace
from tests.autopar.sharding.shard_by_shard import candidates, device_mesh

COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def step_of(eqn: JaxprEqn, operands: Sequence[Any]) -> StepGraph:
    """Return a step of the equation alone."""

    def step(*operands: Any) -> Any:
        return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))

    return trace(step, operands, ())


def plan_of(step: StepGraph, factors: OpFactors, option: Option, mesh: LogicalMesh) -> Plan:
    """Return the plan of a step of one equation with the specs of `option`."""
    specs = [factors.operand_spec(k, option.assignment) for k in range(len(factors.operands))]
    constraints = [Constraint(0, "in", k, spec) for k, spec in enumerate(specs)]
    constraints += [Constraint(0, "out", r, spec) for r, spec in enumerate(option.results)]
    none = Seconds(0.0, 0.0, 0.0)
    shardings = Shardings(
        tuple(specs),
        option.results,
        tuple(constraints),
        ("other",) * len(specs),
        0.0,
        none,
        0.0,
        None,
        0.0,
    )
    return Plan(
        step=step.name,
        fingerprint=step.fingerprint,
        method="one candidate",
        options=ShardingOptions(),
        cluster="cpu-virtual",
        num_micro_batches=1,
        stages=(stage_of(step, mesh, shardings),),
        predicted_seconds=0.0,
        predicted_split=TimeSplit(**none._asdict()),
        predicted_bytes=0,
        predicted_memory=MemorySplit(),
        gap=None,
        planning_seconds=0.0,
    )


def differing(
    step: StepGraph,
    factors: OpFactors,
    option: Option,
    operands: Sequence[Any],
    expected: Sequence[np.ndarray],
    mesh: LogicalMesh,
) -> str:
    """Describe what differs from one device, or from the plan; "" if nothing does.

    That is the first result that is not as `expected`, and by how much; or collectives that the
    candidate does not have.
    """
    planned = PlannedStep(step, plan_of(step, factors, option, mesh))
    (function,) = lower_stage(planned, 0, device_mesh(mesh))
    compiled = function.jitted.lower(*operands).compile()
    results = compiled(*operands)
    for r, (x, y) in enumerate(zip(map(_plain, results), expected, strict=True)):
        largest = float(
            np.abs(y, where=np.isfinite(y), out=np.zeros_like(y, np.float64)).max(initial=1.0)
        )
        if not np.allclose(x, y, rtol=1e-4, atol=1e-4 * largest, equal_nan=True):
            return (
                f"result {r} is off by {np.abs(x - y).max()} where values reach {np.abs(y).max()}"
            )
    kinds = {collective[0] for collective in option.collectives}
    # On two axes XLA may sum whole results and permute or slice them; it gathers what it subtracts.
    if "reduce_scatter" in kinds or step.jaxpr.eqns[0].primitive is scatter_sub_p:
        return ""
    found = {name.replace("-", "_") for name in COLLECTIVE.findall(compiled.as_text())}
    return f"XLA adds {sorted(found - kinds)}" if found - kinds else ""


def wrong_splits(
    eqn: JaxprEqn, operands: Sequence[Any], mesh: LogicalMesh
) -> Iterator[tuple[Option, str]]:
    """Yield each candidate of an equation on `mesh` with the description of `differing`."""
    factors = op_factors(eqn)
    step = step_of(eqn, operands)
    expected = [_plain(result) for result in bind(eqn, operands)]
    for option in candidates(eqn, factors, mesh):
        yield option, differing(step, factors, option, operands, expected, mesh)


def _plain(value: Any) -> np.ndarray:
    """Return a numpy array that can be compared; random keys are replaced by their data."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
