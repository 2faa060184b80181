"""Lowering of a stage: its tasks as jitted functions on the mesh of the stage."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import NamedSharding, PartitionSpec

from autopar.ir import graph
from autopar.ir.evaluate import Numbered, compiler_options, evaluate
from autopar.ir.graph import variables
from autopar.ir.host_memory import in_its_memory, is_on_host, memory_kind
from autopar.ir.spec import AnyMesh, Spec, partition_spec, replicated
from autopar.lowering.shardwise import pinned_specs, shardwise
from autopar.lowering.stage_values import StageValues
from autopar.microbatch.accumulation import (
    LocalAccumulation,
    accumulate,
    accumulate_locally,
    add_to_total,
    finish_total,
    gather,
)
from autopar.microbatch.batch_rows import put_rows
from autopar.pipeline.partition import Task
from autopar.pipeline.stage_graph import StageGraph
from autopar.plan_stages import Stage
from autopar.sharding.manual_regions import on_devices

type _ShardingOfSpec = Callable[[Spec], NamedSharding | PartitionSpec | None]
"""(spec) -> the sharding to constrain a value to; None for no constraint."""


@dataclass(frozen=True)
class TaskFunction:
    """A task as a jitted function of a flat list of arrays.

    Attributes:
        task: the task.
        reads: values of its first operands.
        results: values of its first results.
        sums: values that it accumulates: operands after `reads`, and results after `results`.
        jitted: the function; its sums are donated.
        in_avals: shapes and dtypes of its operands.
        in_shardings: shardings of its operands.
        donated: positions of the operands whose memory the results may take.
    """

    task: Task
    reads: tuple[Var, ...]
    results: tuple[Var, ...]
    sums: tuple[Var, ...]
    jitted: jax.stages.Wrapped
    in_avals: tuple[jax.ShapeDtypeStruct, ...]
    in_shardings: tuple[NamedSharding, ...]
    donated: tuple[int, ...]

    @property
    def on_host(self) -> tuple[int, ...]:
        """Positions of the operands in host memory."""
        return tuple(k for k, var in enumerate(self.reads) if is_on_host(var))

    @property
    def reused(self) -> tuple[Var, ...]:
        """Operands whose memory the results may take."""
        operands = (*self.reads, *self.sums)
        return tuple(operands[k] for k in self.donated)


class StageLowering:
    """Lowers the tasks of one stage to functions on its mesh.

    With deferred axes, each device accumulates over examples of its own (`StageValues`). To such a
    device the batch is as small as its part, so its gradient of a mean over examples is larger.
    Values from stages that divide microbatches into other parts are scaled by that factor.

    Attributes:
        partition: the whole step as tasks.
        graph: the stage.
        stage: the plan of the stage.
        mesh: the mesh that it is lowered for.
        values: shapes and specs of the stage's values.
        donated: inputs of the step whose memory the tasks may reuse.
        last_reads: for each task, inputs and results of tasks whose memory it may reuse.
    """

    def __init__(
        self,
        stage_graph: StageGraph,
        stages: Sequence[Stage],
        mesh: AnyMesh,
        donated: frozenset[int] = frozenset(),
        last_reads: Mapping[Task, frozenset[Var]] | None = None,
    ) -> None:
        """Lower a stage for `mesh`.

        Args:
            stage_graph: the stage.
            stages: plans of all stages.
            mesh: mesh of the stage, abstract or of devices.
            donated: numbers of the step's inputs whose memory it may reuse.
            last_reads: for each task, inputs and results of tasks that nothing on the mesh reads
                after it.
        """
        number = stage_graph.stage
        self.partition = stage_graph.partition
        self.graph = stage_graph
        self.stage = stages[number]
        self.mesh = mesh
        self.values = StageValues(stage_graph, self.stage)
        self.donated = {
            self.partition.step.jaxpr.invars[i]
            for i in donated
            if self.partition.input_stages[i][0] == number
        }
        self.last_reads = last_reads or {}
        self._local_graph = stage_graph  # what one device computes
        if self.stage.deferred and not self.partition.is_whole_step:
            self._local_graph = stage_graph.divided(self.values.ways)
        self._scales = self._received_scales([other.mesh.ways(other.deferred) for other in stages])
        self._pinned = pinned_specs(self.stage)

    def _received_scales(self, ways: Sequence[int]) -> dict[Var, float]:
        """Return the factors of values from stages that divide microbatches into other parts.

        Args:
            ways: number of parts in each stage.
        """
        scales: dict[Var, float] = {}
        jaxpr = self.partition.step.jaxpr
        sources = graph.sources(jaxpr, jaxpr.eqns)
        for var in self.graph.received:
            producer = self.partition.producers.get(var)
            if producer is None or producer.phase == "U":
                continue
            source_ways = ways[producer.stage]
            if var not in self.partition.batch_facts.rows or source_ways == self.values.ways:
                continue
            divided = self.partition.step.split_microbatches(max(self.values.ways, source_ways))
            source = sources[var]
            assert divided.microbatching is not None
            assert source is not None
            if power := divided.microbatching.powers[source]:
                scales[var] = (self.values.ways / source_ways) ** -power
        return scales

    def sharding(self, var: Var) -> NamedSharding:
        """Return the sharding of a value between tasks."""
        spec = partition_spec(self.values.spec(var))
        return NamedSharding(self.mesh, spec, memory_kind=memory_kind(var))

    def functions(self) -> list[TaskFunction]:
        """Return all tasks of the stage."""
        return [self._function(task) for task in self.graph.tasks]

    def _function(self, task: Task) -> TaskFunction:
        """Return a task as a jitted function, with its shardings and donated operands."""
        reads, results = self.partition.reads[task], self.partition.results[task]
        sums = tuple(total.sum for total in self.partition.totals.get(task, ()))
        if task.phase == "S":
            run = partial(self._run_whole_step, task)
        elif task.phase == "U":
            run = partial(self._run_update, task)
        elif self.stage.deferred:
            run = self._local_run(task)
        else:
            run = partial(self._run, self.graph, self._sharding_of, task)
        operands = (*reads, *sums)
        in_shardings = tuple(map(self.sharding, operands))
        in_avals = tuple(
            jax.ShapeDtypeStruct(
                self.values.shape(var),
                graph.aval_of(var).dtype,
                weak_type=graph.aval_of(var).weak_type,
            )
            for var in operands
        )
        donated = *self._reusable(task, sums), *range(len(reads), len(operands))
        jitted = jax.jit(
            run,
            in_shardings=in_shardings,
            out_shardings=[*map(self.sharding, (*results, *sums))],
            donate_argnums=donated,
            keep_unused=True,  # programs identify tasks, and so must show every operand
            compiler_options=compiler_options(
                (eqn for _, eqn in self.graph.tasks[task]), self.mesh
            ),
        )
        return TaskFunction(task, reads, results, sums, jitted, in_avals, in_shardings, donated)

    def _run(
        self, stage_graph: StageGraph, sharding_of: _ShardingOfSpec, task: Task, *operands: Any
    ) -> list[Any]:
        """Run a forward or backward task.

        Args:
            stage_graph: graph of the stage, or of one device's part of it.
            sharding_of: sharding that a spec stands for.
            task: the task.
            operands: the values that the task reads, then its sums.
        """
        totals = stage_graph.partition.totals.get(task, ())
        reads = stage_graph.partition.reads[task]
        env = self._constants(stage_graph)
        reading = zip((*reads, *(total.sum for total in totals)), operands, strict=True)
        env |= {var: in_its_memory(var, operand) for var, operand in reading}
        for whole_var, var in zip(self.partition.reads[task], reads, strict=True):
            if whole_var in self._scales:
                env[var] = (env[var] * self._scales[whole_var]).astype(env[var].dtype)
        self.run_eqns(stage_graph.tasks[task], env, sharding_of)
        sums = []
        whole = self.partition.step
        count = whole.num_micro_batches
        chunks = whole.chunks * count // stage_graph.partition.step.num_micro_batches
        for total in totals:
            part = jnp.asarray(graph.read(total.part, env))
            if total.index is not None:
                sums.append(put_rows(env[total.sum], part, env[total.index], count, chunks))
            else:
                sums.append(add_to_total(total.combine, env[total.sum], part, count))
        return [*(env[var] for var in stage_graph.partition.results[task]), *sums]

    def _run_whole_step(self, task: Task, *operands: Any) -> list[Any]:
        """Run the whole step, microbatches one after the other."""
        step = self.partition.step
        env = self._constants(self.graph)
        env |= dict(zip(self.partition.reads[task], operands, strict=True))
        if step.microbatching is None:
            self.run_eqns(enumerate(step.jaxpr.eqns), env)
        elif self.stage.deferred:
            run_eqns = partial(self.run_eqns, sharding_of=self._local_sharding_of)
            pin = partial(self._constrain, self._local_sharding_of, "out")
            accumulate_locally(step, self._local_accumulation(), env, run_eqns, pin)
            self.run_eqns(step.microbatching.tail, env)
        else:
            pin = partial(self._constrain, self._sharding_of, "out")
            accumulate(step, env, self.run_eqns, pin)
            self.run_eqns(step.microbatching.tail, env)
        return [env[var] for var in self.partition.results[task]]

    def _local_accumulation(self) -> LocalAccumulation:
        """Return how each device accumulates the whole step's gradients along the deferred axes."""
        step, stage = self.partition.step, self.stage
        assert step.microbatching is not None
        results = tuple(
            self._pinned.get((number, "out"), {}).get(r, replicated(graph.aval_of(var).ndim))
            for number, eqn in step.microbatching.marks
            for r, var in enumerate(eqn.outvars)
        )
        inputs = tuple(value.spec for value in stage.inputs)
        parts = step.split_microbatches(self.values.ways)
        return LocalAccumulation(parts, self.mesh, stage.deferred, inputs, results)

    def _run_update(self, task: Task, *operands: Any) -> list[Any]:
        """Run a round of the update. The first round completes what was accumulated."""
        env = self._constants(self.graph)
        env |= dict(zip(self.partition.reads[task], operands, strict=True))
        count = self.partition.step.num_micro_batches
        num_parts = self._local_graph.step.num_micro_batches
        totals = self.partition.completed.get(task, ())
        local_totals = self._local_graph.partition.completed.get(task, ())
        for total, local_total in zip(totals, local_totals, strict=True):
            combine = local_total.combine
            value = finish_total(combine, env[total.sum], count, num_parts)
            if total.sum in self.values.per_device:
                value = value[0] if combine == "same" else value.sum(0)
            sharding = self.sharding(total.total)
            env[total.total] = jax.lax.with_sharding_constraint(value, sharding)
        self.run_eqns(self.graph.tasks[task], env)
        return [env[var] for var in self.partition.results[task]]

    def _local_run(self, task: Task) -> Callable[..., list[Any]]:
        """Return a forward or backward task that each device runs on examples of its own."""
        sums = [total.sum for total in self.partition.totals.get(task, ())]
        operands = (*self.partition.reads[task], *sums)
        results = (*self.partition.results[task], *sums)

        def local(*shards: Any) -> list[Any]:
            values = self._run(
                self._local_graph,
                self._local_sharding_of,
                task,
                *map(self._local_operand, operands, shards),
            )
            return [
                value[None] if var in self.values.per_device else value
                for var, value in zip(results, values, strict=True)
            ]

        ones = (axis for axis, size in self.mesh.shape.items() if size == 1)
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(partition_spec(self._deferred_spec(var)) for var in operands),
            out_specs=[partition_spec(self._deferred_spec(var)) for var in results],
            axis_names={*self.stage.deferred, *ones},
            # The equations were traced without a mesh, and nothing is differentiated through this.
            check_vma=False,
        )

    def _deferred_spec(self, var: Var) -> Spec:
        """Return the spec of a value with its deferred axes alone."""
        deferred = self.stage.deferred
        return tuple(
            tuple(axis for axis in axes if axis in deferred) for axes in self.values.spec(var)
        )

    def _local_operand(self, var: Var, shard: Any) -> Any:
        """Return a value as one device computes with it.

        Examples stay on their device. A parameter that is sharded along a deferred axis is
        gathered.
        """
        if var in self.values.per_device:
            return shard[0]
        if var in self.partition.batch_facts.rows or var in self.values.joined:
            return shard
        return gather(shard, self._deferred_spec(var))

    def _constants(self, stage_graph: StageGraph) -> dict[Var, Any]:
        jaxpr = stage_graph.step.jaxpr
        return dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))

    def run_eqns(
        self,
        eqns: Iterable[Numbered],
        env: dict[Var, Any],
        sharding_of: _ShardingOfSpec | None = None,
    ) -> None:
        """Run numbered equations with the shardings that the plan pins.

        Args:
            eqns: numbered equations of the stage.
            env: values by variable; results are added.
            sharding_of: sharding that a spec stands for; by default over the whole mesh.
        """
        sharding_of = sharding_of or self._sharding_of
        numbered = [(number, on_devices(eqn, self.mesh)) for number, eqn in eqns]
        before = partial(self._constrain, sharding_of, "in")
        after = partial(self._constrain, sharding_of, "out")
        evaluate(numbered, env, before, after, shardwise(self.mesh, self._pinned))

    def _constrain(
        self, sharding_of: _ShardingOfSpec, side: str, number: int, values: Sequence[Any]
    ) -> list[Any]:
        """Return operands or results of an equation, constrained to their pinned shardings."""
        values = list(values)
        for index, spec in self._pinned.get((number, side), {}).items():
            sharding = sharding_of(spec)
            if sharding is not None and values[index] is not None:  # None belongs to another branch
                values[index] = jax.lax.with_sharding_constraint(values[index], sharding)
        return values

    def _sharding_of(self, spec: Spec) -> NamedSharding:
        return NamedSharding(self.mesh, partition_spec(spec))

    def _local_sharding_of(self, spec: Spec) -> PartitionSpec | None:
        """Return the sharding along the axes that are not deferred; None if there are none."""
        deferred = self.stage.deferred
        free = {axis for axis, size in self.mesh.shape.items() if size > 1 and axis not in deferred}
        if not free:
            return None
        return partition_spec(tuple(tuple(axis for axis in axes if axis in free) for axes in spec))

    def _reusable(self, task: Task, sums: Sequence[Var]) -> list[int]:
        """Return positions of the operands, sums aside, whose memory a result may take.

        Nothing reads such an operand later, and a result has the same shape, dtype and spec. State
        that the task updates comes first, then other values after their last use.
        """
        reads, results = self.partition.reads[task], self.partition.results[task]
        if task.phase == "S":  # XLA pairs them itself, and uses the rest for temporaries
            outvars = set(variables(self.partition.step.jaxpr.outvars))
            returned_inputs = outvars.difference(results)
            reusable = self.donated - returned_inputs
            return [k for k, var in enumerate(reads) if var in reusable]
        specs: dict[Any, set[Spec]] = defaultdict(set)
        for var in (*results, *sums):
            specs[self._array_type(var)].add(self.values.spec(var))
        num_left = Counter(map(self._array_type, results))
        updated = self._updated(task)
        last_reads = self.last_reads.get(task, frozenset())
        dead = updated | last_reads.intersection(self.partition.producers)
        positions = []
        for k in sorted(range(len(reads)), key=lambda k: reads[k] not in updated):
            array_type = self._array_type(reads[k])
            # XLA pairs operands with results by shape alone, so all such results need this spec.
            is_paired = specs[array_type] == {self.values.spec(reads[k])}
            if reads[k] in dead and num_left[array_type] and is_paired:
                num_left[array_type] -= 1
                positions.append(k)
        return positions

    def _array_type(self, var: Var) -> tuple[tuple[int, ...], Any, str | None]:
        return self.values.shape(var), graph.aval_of(var).dtype, memory_kind(var)

    def _updated(self, task: Task) -> set[Var]:
        """Return the donated inputs that an update reads last and computes the next values of.

        An input that the step returns, too, such as the last parameters of L-BFGS, stays.
        """
        if task.phase != "U":
            return set()
        step = self.partition.step
        next_value = {step.jaxpr.invars[i]: step.jaxpr.outvars[o] for o, i in step.carried.items()}
        results = set(self.partition.results[task])
        return {
            var
            for var in self.donated.intersection(self.last_reads.get(task, ()))
            if next_value.get(var) in results and var not in step.jaxpr.outvars
        }
