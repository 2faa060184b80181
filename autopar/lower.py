"""From a plan to what runs: the constrained step for a mesh, and the `Program` that is executed and simulated."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import Var
from jax.sharding import NamedSharding, PartitionSpec

from autopar import graph
from autopar.evaluate import Numbered, compiler_options, evaluate
from autopar.microbatch.accumulation import Apart, accumulate, accumulate_apart
from autopar.plan import Plan, Stage
from autopar.sharding.manual_regions import on_devices
from autopar.sharding.memory_roles import MEMORY_ROLES
from autopar.sharding.spec import AnyMesh, Spec, partition_spec, replicated
from autopar.shardwise import Wanted, shardwise, wanted_by
from autopar.target import compile_for, target_mesh
from autopar.trace import StepGraph
from simulator.cluster import Cluster
from simulator.hlo import held_at_peak, parse_hlo
from simulator.memory import Role, added, with_roles
from simulator.program import Program, Run
from simulator.work import with_axes

WHOLE_STEP = Run(0, "S")
"""The one instruction of a plan without a pipeline."""


def jit_step(step: StepGraph, plan: Plan, mesh: AnyMesh, donate_argnums: Sequence[int] = ()) -> jax.stages.Wrapped:
    """The step as a jitted function of its own arguments, partitioned over `mesh` as `plan` says.

    Raises:
        PlanError: the plan is for another step.
    """
    plan.check(step.fingerprint)
    (stage,) = plan.stages

    def shardings(specs: Sequence[Spec]) -> list[NamedSharding]:
        return [NamedSharding(mesh, partition_spec(spec)) for spec in specs]

    return jax.jit(
        _constrained(step, stage, mesh),
        in_shardings=jax.tree.unflatten(step.in_tree, shardings([value.spec for value in stage.inputs])),
        out_shardings=jax.tree.unflatten(step.out_tree, shardings([value.spec for value in stage.outputs])),
        donate_argnums=donate_argnums,
        compiler_options=compiler_options(step.jaxpr.eqns, mesh) if stage.mesh.num_devices > 1 else None,
    )


def program_of(plan: Plan) -> Program:
    """Who runs what, without bodies: enough to execute."""
    (stage,) = plan.stages
    return Program(meshes=(tuple(range(stage.mesh.num_devices)),), instructions=((WHOLE_STEP,),))


def compile_program(
    step: StepGraph, plan: Plan, cluster: Cluster, donate_argnums: Sequence[int] = ()
) -> tuple[Program, float]:
    """The plan's program with its body and memory as XLA compiles them for `cluster`, and the seconds that took."""
    (stage,) = plan.stages
    jitted = jit_step(step, plan, target_mesh(cluster, stage.mesh_shape, stage.axis_names), donate_argnums)
    compiled = compile_for(jitted, step.in_avals, cluster)
    program = program_of(plan)
    bodies = {WHOLE_STEP.task: with_axes(parse_hlo(compiled.hlo_text), stage.mesh.along)}
    memory = with_roles(compiled.memory, _arguments_by_role(step, stage), held_at_peak(compiled.hlo_text))
    return Program(program.meshes, program.instructions, bodies, (memory,)), compiled.compile_seconds


def _arguments_by_role(step: StepGraph, stage: Stage) -> Mapping[Role, int]:
    """Bytes of the inputs on one device; JAX drops those that nobody reads."""
    read = {atom for eqn in step.jaxpr.eqns for atom in eqn.invars if isinstance(atom, Var)}
    read.update(atom for atom in step.jaxpr.outvars if isinstance(atom, Var))
    found: dict[Role, int] = {}
    for var, value in zip(step.jaxpr.invars, stage.inputs, strict=True):
        if var in read:
            found = added(found, {MEMORY_ROLES[value.role]: value.device_bytes(stage.mesh)})
    return found


def jit_values(step: StepGraph, executed: tuple[Plan, AnyMesh] | None = None) -> jax.stages.Wrapped:
    """The step as a jitted function of its leaves that returns what its equations make, by their numbers.

    What equations make inside of loops and branches is left out.

    Args:
        executed: the plan of a step without microbatches, and the devices it runs on; one device by default.
    """

    def run(*leaves: Any) -> dict[int, list[Any]]:
        env = dict(zip((*step.jaxpr.invars, *step.jaxpr.constvars), (*leaves, *step.jaxpr.consts), strict=True))
        if executed is None:
            evaluate(enumerate(step.jaxpr.eqns), env, _as_is, _as_is)
        else:
            _equations(wanted_by(executed[0].stages[0]), executed[1])(enumerate(step.jaxpr.eqns), env)
        made = enumerate(step.jaxpr.eqns)
        return {n: [env[var] for var in eqn.outvars] for n, eqn in made if all(var in env for var in eqn.outvars)}

    if executed is None:
        return jax.jit(run)
    plan, mesh = executed
    return jax.jit(run, in_shardings=[NamedSharding(mesh, partition_spec(v.spec)) for v in plan.stages[0].inputs])


def _as_is(number: int, values: list[Any]) -> list[Any]:
    return values


def _equations(wanted: Wanted, mesh: AnyMesh) -> Callable[[Iterable[Numbered], dict[Var, Any]], None]:
    """Return a function that runs numbered equations and puts their operands and results where they are wanted."""
    constrain = _constraints(wanted, partial(_sharding, mesh))
    apply = shardwise(mesh, wanted)

    def run_eqns(eqns: Iterable[Numbered], env: dict[Var, Any]) -> None:
        here = ((number, on_devices(eqn, mesh)) for number, eqn in eqns)
        evaluate(here, env, before=partial(constrain, "in"), after=partial(constrain, "out"), apply=apply)

    return run_eqns


def _constrained(step: StepGraph, stage: Stage, mesh: AnyMesh) -> Callable[..., Any]:
    """The step, with the stage's constraints imposed on its intermediate values."""
    wanted = wanted_by(stage)
    run_eqns = _equations(wanted, mesh)
    apart = _apart(step, stage, mesh)

    def run(*args: Any) -> Any:
        env = dict(zip(step.jaxpr.invars, jax.tree.leaves(args), strict=True))
        env.update(zip(step.jaxpr.constvars, step.jaxpr.consts, strict=True))
        if step.microbatching is None:
            run_eqns(enumerate(step.jaxpr.eqns), env)
        else:
            if apart is None:
                whole = _constraints(wanted, partial(_sharding, mesh))
                accumulate(step, env, run_eqns, partial(whole, "out"))
            else:
                inside = _constraints(wanted, partial(_inside, mesh=mesh, manual=apart.axes))
                local = partial(
                    evaluate, before=partial(inside, "in"), after=partial(inside, "out"), apply=shardwise(mesh, wanted)
                )
                accumulate_apart(step, apart, env, local, partial(inside, "out"))
            run_eqns(step.microbatching.tail, env)
        return jax.tree.unflatten(step.out_tree, [graph.read(atom, env) for atom in step.jaxpr.outvars])

    return run


def _apart(step: StepGraph, stage: Stage, mesh: AnyMesh) -> Apart | None:
    """How devices accumulate apart, if the plan has them do so."""
    if not stage.deferred or step.microbatching is None:
        return None
    wanted = {(c.eqn, c.index): c.spec for c in stage.constraints if c.side == "out"}
    results = tuple(
        wanted.get((number, r), replicated(graph.aval_of(var).ndim))
        for number, eqn in step.microbatching.marks
        for r, var in enumerate(eqn.outvars)
    )
    parts = step.cut(stage.mesh.ways(stage.deferred))
    return Apart(parts, mesh, stage.deferred, tuple(value.spec for value in stage.inputs), results)


def _constraints(
    wanted: Wanted, place: Callable[[Spec], NamedSharding | PartitionSpec | None]
) -> Callable[[str, int, list[Any]], list[Any]]:
    """A function of side, equation number and values that gives the values where `place` has the wanted specs."""

    def constrain(side: str, number: int, values: list[Any]) -> list[Any]:
        values = list(values)
        for index, spec in wanted.get((number, side), {}).items():
            sharding = place(spec)
            if sharding is not None and values[index] is not None:  # a branch sees its own
                values[index] = jax.lax.with_sharding_constraint(values[index], sharding)
        return values

    return constrain


def _sharding(mesh: AnyMesh, spec: Spec) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(spec))


def _inside(spec: Spec, mesh: AnyMesh, manual: Sequence[str]) -> PartitionSpec | None:
    """`spec` for a device that computes apart along `manual`; None where the compiler has nothing to partition."""
    free = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in manual]
    return partition_spec(tuple(tuple(axis for axis in axes if axis in free) for axes in spec)) if free else None
