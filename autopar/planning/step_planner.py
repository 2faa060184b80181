"""Planning of a traced step as one program: from shardings to a plan."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from math import inf
from typing import Any

from jax.extend.core import Var
from jax.extend.core.primitives import name_p

from autopar._cpython import builds_graphs
from autopar.analysis.axis_uses import with_axis_uses
from autopar.analysis.reasons import print_if_asked
from autopar.analysis.replay import equation_name
from autopar.ir.control_flow import endless_loops
from autopar.ir.graph import aval_of, listed
from autopar.ir.host_memory import is_on_host, to_host_p
from autopar.ir.spec import LogicalMesh
from autopar.ir.step_graph import Remat, StepGraph
from autopar.lowering.planned import PlannedStep
from autopar.microbatch.exactness import exactness_of, exactness_warnings
from autopar.plan import MemorySplit, Plan, TimeSplit
from autopar.plan_stages import OffloadedValue, ShardingConstraint, Stage, Value
from autopar.planning.recompute_planning import shard_recomputing
from autopar.primitives import record_of, runs_on_shards
from autopar.recompute.offloading import offloaded_inputs
from autopar.recompute.recompute_candidates import ChosenEquations
from autopar.sharding.options import ShardingOptions
from autopar.sharding.pins import check_patterns
from autopar.sharding.plan_shardings import Shardings, plan_shardings
from simulator.costs.cost_model import ClusterCosts, CostModel
from simulator.hardware.cluster import Cluster


@builds_graphs
def make_planned(
    step: StepGraph,
    mesh: LogicalMesh,
    cluster: Cluster,
    options: ShardingOptions,
    method: str,
    costs: CostModel | None = None,
    memory_budget: float | None = None,
    remat: Remat = "keep",
    offloads: bool = False,
    limit: float = inf,
) -> PlannedStep:
    """Return the cheapest plan for `step` on `mesh`, and the step as it runs.

    The step computes values of its forward pass again, or fetches them, as the plan says.

    No device is touched.

    Args:
        step: the traced step.
        mesh: logical mesh over the cluster's first devices.
        cluster: the cluster to plan for.
        options: limits on shardings.
        method: name of the method, for the plan.
        costs: costs of work on the cluster; by default those that `cluster` implies.
        memory_budget: bytes of one device that the step may use; by default the device's memory
            less its reserve.
        remat: what the backward pass computes again; `step` is traced accordingly.
        offloads: whether values of the forward pass may be in host memory until the backward pass
            reads them.
        limit: seconds of a known plan. Only faster ones are looked for, unless the step repeats
            equations or offloads.

    Raises:
        MemoryBudgetError: no plan fits.
        NoFasterError: no plan that fits takes less than `limit`.
        MissingRuleError, ShardingError, InfeasibleError, TimeoutError: see `plan_shardings`.
        ValueError: the mesh has more devices than the cluster.
    """
    if mesh.num_devices > cluster.num_devices:
        raise ValueError(
            f"a mesh of shape {mesh.shape} needs {mesh.num_devices} devices, but cluster"
            f" {cluster.name!r} has {cluster.num_devices}; use a smaller mesh, or more hosts by"
            " cluster=simulator.load_cluster(NAME).with_size(hosts=...)"
        )
    check_patterns(options.pins, step)
    budget = cluster.device.usable_bytes if memory_budget is None else memory_budget
    costs = costs or ClusterCosts(cluster)
    equations = ChosenEquations()
    if remat == "auto" or offloads:
        repeats = remat == "auto"
        found = shard_recomputing(step, mesh, costs, options, budget, repeats, offloads)
        equations, step, shardings = found.equations, found.step, found.shardings
    else:
        shardings = plan_shardings(step, mesh, costs, options, budget, limit=limit)
    plan = Plan(
        step=step.name,
        fingerprint=step.fingerprint,
        method=method,
        options=options,
        cluster=cluster.name,
        num_micro_batches=step.num_micro_batches,
        stages=(stage_of(step, mesh, shardings),),
        predicted_seconds=shardings.seconds,
        predicted_split=TimeSplit(**shardings.split._asdict()),
        predicted_bytes=round(shardings.peak_bytes),
        predicted_memory=MemorySplit.of(shardings.roles_at_peak, round(shardings.peak_bytes)),
        gap=shardings.gap,
        planning_seconds=shardings.solve_seconds,
        memory_limited=shardings.memory_limited or equations != ChosenEquations(),
        **asdict(exactness_of(step)),
        remat=remat,
        recomputed=tuple(sorted(equations.repeated)),
        offloaded=offloaded_inputs(step),
        offloaded_results=tuple(sorted(equations.offloaded)),
        warnings=(
            *shardings.warnings,
            *coverage_warnings(step),
            *_gap_warnings(equations, cluster),
        ),
    )
    plan = with_axis_uses(step, plan)
    if options.mode == "manual":
        return PlannedStep(step, _left_to_xla(step, plan))
    print_if_asked(step, plan, costs, options)
    return PlannedStep(step, plan)


def _gap_warnings(equations: ChosenEquations, cluster: Cluster) -> Iterator[str]:
    """Yield a warning if the peak is uncertain because the backward pass repeats equations.

    The largest excess that `experiments/validation/memory_budgets.py` found is 15 % (seed 29 with
    `--cluster dgx_h100`).
    """
    if equations.repeated and cluster.device.xla_target is not None:
        yield (
            "the backward pass computes values again: XLA may leave gaps between them and need"
            " more memory than predicted, 15 % in the worst plan measured;"
            ' autopar.compile_step(..., fidelity="compiled") says how much'
        )


def _left_to_xla(step: StepGraph, plan: Plan) -> Plan:
    """Return the plan with constraints only on shardwise equations and on named values.

    XLA decides the rest; the plan's other shardings only say what it probably does.
    """
    (stage,) = plan.stages
    eqns = step.jaxpr.eqns

    def stays(constraint: ShardingConstraint) -> bool:
        eqn = eqns[constraint.eqn]
        return runs_on_shards(eqn) or (eqn.primitive is name_p and constraint.side == "out")

    stage = stage.model_copy(update={"constraints": tuple(filter(stays, stage.constraints))})
    warning = (
        "shardings inside are left to XLA: predicted time and memory assume the simplest"
        " propagation"
    )
    return plan.model_copy(update={"stages": (stage,), "warnings": (warning, *plan.warnings)})


def stage_of(step: StepGraph, mesh: LogicalMesh, shardings: Shardings) -> Stage:
    """Return a solved sharding as a stage of a plan.

    Args:
        step: the step that was sharded.
        mesh: its logical mesh.
        shardings: the solved sharding.
    """
    inputs = [
        Value(path=path, role=role, spec=spec, on_host=is_on_host(var), **_array(aval))
        for path, role, var, aval, spec in zip(
            step.in_paths,
            shardings.roles,
            step.jaxpr.invars,
            step.input_avals,
            shardings.inputs,
            strict=True,
        )
    ]
    outputs = [
        Value(
            path=f"result/{path}".removesuffix("/"),
            role="output",
            spec=spec,
            on_host=is_on_host(atom),
            **_array(aval_of(atom)),
        )
        for path, atom, spec in zip(
            step.out_paths, step.jaxpr.outvars, shardings.outputs, strict=True
        )
    ]
    constraints = []
    for constraint in shardings.constraints:
        eqn = step.jaxpr.eqns[constraint.eqn]
        atoms = eqn.invars if constraint.side == "in" else eqn.outvars
        constraints.append(
            ShardingConstraint(
                eqn=constraint.eqn,
                side=constraint.side,
                index=constraint.index,
                spec=constraint.spec,
                name=equation_name(eqn),
                **_array(aval_of(atoms[constraint.index])),
            )
        )
    return Stage(
        mesh_shape=mesh.shape,
        axis_names=mesh.axis_names,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        constraints=tuple(constraints),
        offloaded=tuple(_offloaded_values(step, shardings)),
        deferred=shardings.deferred,
        devices=tuple(range(mesh.num_devices)),
    )


def _offloaded_values(step: StepGraph, shardings: Shardings) -> Iterator[OffloadedValue]:
    """Yield the values that the step moves to host memory and back."""
    makers = {var: eqn for eqn in step.jaxpr.eqns for var in eqn.outvars}
    for eqn in step.jaxpr.eqns:
        if eqn.primitive is not to_host_p or eqn.outvars[0] in step.jaxpr.outvars:
            continue
        (source,) = eqn.invars
        if isinstance(source, Var) and source in shardings.specs:
            name, spec = equation_name(makers[source]), shardings.specs[source]
            yield OffloadedValue(spec=spec, name=name, **_array(aval_of(source)))


def _array(aval: Any) -> dict[str, Any]:
    return {"shape": aval.shape, "dtype": str(aval.dtype), "itemsize": aval.dtype.itemsize}


def coverage_warnings(step: StepGraph) -> tuple[str, ...]:
    """Return a warning for each primitive without a sharding rule, and for loops of unknown length.

    Such primitives are planned as replicated. Constraints that are left out have one, too.
    """
    counts = Counter(
        eqn.primitive.name
        for eqn in step.jaxpr.eqns
        if eqn.outvars and record_of(eqn).is_replicated_only
    )
    warnings = [
        f"{count} x {name}: computed whole on every device, there is no better rule for it in"
        " autopar/primitives"
        for name, count in sorted(counts.items())
    ]
    for name, count in sorted(endless_loops(step.jaxpr.eqns).items()):
        loop = "it" if name == "while_loop" else "its loop"
        warnings.append(
            f"{count} x {name}: how often {loop} runs is not known, its costs count once"
        )
    if step.unconstrained:
        warnings.append(
            "jax.lax.with_sharding_constraint has no effect, the planner decides the sharding:"
            f" {listed(step.unconstrained)}; to force one, name the value by"
            " jax.ad_checkpoint.checkpoint_name and give ShardingOptions(pins={name: spec})"
        )
    return (*warnings, *exactness_warnings(step))
