"""The tasks of a pipeline as jitted functions, each on the mesh of its stage."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding

from autopar import graph
from autopar.evaluate import evaluate
from autopar.pipeline.cut import Cut, Task
from autopar.pipeline.memory import MeshMemory
from autopar.pipeline.planned import PlannedPipeline
from autopar.pipeline.stage_graph import StageGraph
from autopar.plan import Stage
from autopar.sharding.manual import on_devices
from autopar.sharding.spec import Spec, partition_spec, replicated
from autopar.target import compile_for, target_mesh
from simulator.cluster import Cluster
from simulator.hlo import parse_hlo
from simulator.memory import MemoryUse
from simulator.program import Program, Run
from simulator.work import Body


@dataclass(frozen=True)
class TaskFunction:
    """A task, ready to be compiled.

    Attributes:
        reads: values it takes first; `totals`: what it accumulates, taken after them and given back after `results`.
        jitted: a function of a flat list of arrays, to a flat list; totals are donated.
        in_shardings: of its operands.
    """

    task: Task
    reads: tuple[Var, ...]
    results: tuple[Var, ...]
    totals: tuple[Var, ...]
    jitted: jax.stages.Wrapped
    in_shardings: tuple[NamedSharding, ...]

    @property
    def in_avals(self) -> list[jax.ShapeDtypeStruct]:
        avals = [graph.aval_of(var) for var in (*self.reads, *self.totals)]
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]


class StageLowering:
    """What a stage's plan means for its values and tasks on a mesh."""

    def __init__(
        self, cut: Cut, found: StageGraph, stage: Stage, mesh: Mesh, donated: frozenset[int] = frozenset()
    ) -> None:
        self.cut, self.graph, self.stage, self.mesh = cut, found, stage, mesh
        self.donated = {cut.step.jaxpr.invars[i] for i in donated if cut.input_stages[i][0] == found.stage}
        jaxpr = found.step.jaxpr
        self.specs: dict[Var, Spec] = {var: value.spec for var, value in zip(jaxpr.invars, stage.inputs, strict=True)}
        self._wanted: dict[tuple[int, str], dict[int, NamedSharding]] = defaultdict(dict)
        for constraint in stage.constraints:
            sharding = NamedSharding(mesh, partition_spec(constraint.spec))
            self._wanted[constraint.eqn, constraint.side][constraint.index] = sharding
            if constraint.side == "out":
                self.specs.setdefault(jaxpr.eqns[constraint.eqn].outvars[constraint.index], constraint.spec)
        for atom, value in zip(jaxpr.outvars, stage.outputs, strict=True):
            if isinstance(atom, Var) and atom not in jaxpr.invars:
                self.specs[atom] = value.spec

    @property
    def number(self) -> int:
        return self.graph.stage

    def sharding(self, var: Var) -> NamedSharding:
        """Where a value is when a task gets or gives it."""
        return NamedSharding(self.mesh, partition_spec(self.specs.get(var, replicated(graph.aval_of(var).ndim))))

    def functions(self) -> list[TaskFunction]:
        """All tasks of the stage."""
        return [self._function(task) for task in self.graph.tasks]

    def _function(self, task: Task) -> TaskFunction:
        accumulated = self.cut.totals.get(task, ())
        reads, results = self.cut.reads[task], self.cut.results[task]
        totals = tuple(each.total for each in accumulated)
        micro = self.cut.step.microbatching
        assert micro is not None
        jaxpr = self.graph.step.jaxpr
        constants = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
        after_last = {each.total: each.combine for ts in self.cut.totals.values() for each in ts}
        eqns = [(number, on_devices(eqn, self.mesh)) for number, eqn in self.graph.tasks[task]]

        def run(*operands: Any) -> list[Any]:
            env = {**constants, **dict(zip((*reads, *totals), operands, strict=True))}
            if task.phase == "U":
                for var in reads:
                    if after_last.get(var) == "mean":
                        env[var] = (env[var] / micro.count).astype(env[var].dtype)
            evaluate(eqns, env, partial(self._constrain, "in"), partial(self._constrain, "out"))
            added = []
            for each in accumulated:
                part, total = jnp.asarray(graph.read(each.part, env)), env[each.total]
                added.append(part.astype(total.dtype) if each.combine == "same" else total + part)
            return [*(env[var] for var in results), *added]

        in_shardings = tuple(map(self.sharding, (*reads, *totals)))
        jitted = jax.jit(
            run,
            in_shardings=in_shardings,
            out_shardings=[*map(self.sharding, (*results, *totals))],
            donate_argnums=(*self._used_up(task), *range(len(reads), len(in_shardings))),
        )
        return TaskFunction(task, reads, results, totals, jitted, in_shardings)

    def _used_up(self, task: Task) -> list[int]:
        """The operands, of an update, that nothing reads after it and whose next values it makes."""
        step = self.cut.step
        later = [t for t in self.graph.tasks if t.phase == "U" and t.round > task.round]
        after = {var for other in later for var in self.cut.reads[other]}
        next_of = {step.jaxpr.invars[i]: step.jaxpr.outvars[o] for o, i in step.carried.items()}
        return [
            k
            for k, var in enumerate(self.cut.reads[task])
            if task.phase == "U"
            and var in self.donated
            and var not in after
            and next_of.get(var) in self.cut.results[task]
        ]

    def _constrain(self, side: str, number: int, values: Sequence[Any]) -> list[Any]:
        values = list(values)
        for index, sharding in self._wanted.get((number, side), {}).items():
            if values[index] is not None:  # a branch sees its own
                values[index] = jax.lax.with_sharding_constraint(values[index], sharding)
        return values


def compile_pipeline(planned: PlannedPipeline, cluster: Cluster, donated: frozenset[int]) -> tuple[Program, float]:
    """The program with bodies and memory as XLA compiles its tasks for `cluster`, and the seconds that took.

    Tasks that are the same program, as those of identical layers are, are compiled once.
    """
    start = time.perf_counter()
    compiled: dict[tuple[str, tuple[int, ...]], tuple[Body, MemoryUse]] = {}
    bodies: dict[str, Body] = {}
    memory = MeshMemory(planned)
    for found, stage in zip(planned.graphs, planned.plan.stages, strict=True):
        mesh = target_mesh(cluster, stage.mesh_shape, stage.axis_names)
        lowered = StageLowering(planned.cut, found, stage, mesh, donated)
        memory.add_stage(lowered)
        for function in lowered.functions():
            key = function.jitted.lower(*function.in_avals).as_text(), stage.mesh_shape
            if key not in compiled:
                target = compile_for(function.jitted, tuple(function.in_avals), cluster)
                compiled[key] = parse_hlo(target.hlo_text), target.memory
            body, used = compiled[key]
            bodies[Run(function.task.stage, function.task.phase, function.task.round).task] = body
            memory.add_task(function.task, used)
    program = planned.program
    return replace(program, bodies=bodies, memory=memory.peaks(program)), time.perf_counter() - start
