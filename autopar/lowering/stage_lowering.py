"""The tasks of a plan as jitted functions, each on the mesh of its stage."""

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
from autopar.ir.spec import AnyMesh, Spec, partition_spec, replicated
from autopar.ir.step_graph import Combine
from autopar.lowering.shardwise import pinned_specs, shardwise
from autopar.lowering.stage_values import StageValues
from autopar.microbatch.accumulation import (
    Apart,
    accumulate,
    accumulate_apart,
    added,
    gathered,
    scaled,
)
from autopar.pipeline.partition import Task
from autopar.pipeline.stage_graph import StageGraph, numbers_of
from autopar.plan import Stage
from autopar.sharding.manual_regions import on_devices

type Place = Callable[[Spec], NamedSharding | PartitionSpec | None]


@dataclass(frozen=True)
class TaskFunction:
    """A task, ready to be compiled.

    Attributes:
        reads: values it takes first.
        results: values it gives first.
        sums: what it accumulates, taken after `reads` and given back after `results`.
        jitted: a function of a flat list of arrays, to a flat list; sums are donated. It is named after the step.
        in_avals, in_shardings: of its operands.
        donated: positions of the operands whose memory the results may take.
        reused: those operands.
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
    def reused(self) -> tuple[Var, ...]:
        operands = (*self.reads, *self.sums)
        return tuple(operands[k] for k in self.donated)


class StageLowering:
    """What a stage's plan means for its tasks on a mesh.

    To a device that computes apart (`StageValues`) a batch is as small as its part, and so the gradient of a mean over examples is
    larger: what comes from stages that see parts of another size is scaled.
    """

    def __init__(
        self,
        found: StageGraph,
        stages: Sequence[Stage],
        mesh: AnyMesh,
        donated: frozenset[int] = frozenset(),
        last_reads: Mapping[Task, frozenset[Var]] | None = None,
    ) -> None:
        """Lower the stage for `mesh`.

        Args:
            stages: the plans of all stages.
            donated: numbers of the step's inputs whose memory it may reuse.
            last_reads: for each task, the values whose memory it may reuse because nobody reads them after it.
        """
        stage = stages[found.stage]
        self.partition, self.graph, self.stage, self.mesh = found.partition, found, stage, mesh
        self.values = StageValues(found, stage)
        self.donated = {
            self.partition.step.jaxpr.invars[i]
            for i in donated
            if self.partition.input_stages[i][0] == found.stage
        }
        self.last_reads = last_reads or {}
        self._local = (
            found.divided(self.values.ways)
            if stage.deferred and not self.partition.is_whole_step
            else found
        )
        self._scales = self._scales_of([each.mesh.ways(each.deferred) for each in stages])
        self._wanted = pinned_specs(stage)

    def _scales_of(self, ways: Sequence[int]) -> dict[Var, float]:
        """The factor of what comes from stages that see larger or smaller parts of a microbatch."""
        found: dict[Var, float] = {}
        made = numbers_of(self.partition.step)
        for var in self.graph.received:
            maker = self.partition.producers.get(var)
            if (
                maker is None
                or maker.phase == "U"
                or var not in self.partition.batch_facts.rows
                or ways[maker.stage] == self.values.ways
            ):
                continue
            micro = self.partition.step.cut(max(self.values.ways, ways[maker.stage])).microbatching
            assert micro is not None
            if power := micro.powers[made[var]]:
                found[var] = (self.values.ways / ways[maker.stage]) ** -power
        return found

    def sharding(self, var: Var) -> NamedSharding:
        """Where a value is when a task gets or gives it."""
        return NamedSharding(self.mesh, partition_spec(self.values.spec(var)))

    def functions(self) -> list[TaskFunction]:
        """All tasks of the stage."""
        return [self._function(task) for task in self.graph.tasks]

    def _function(self, task: Task) -> TaskFunction:
        reads, results = self.partition.reads[task], self.partition.results[task]
        sums = tuple(each.sum for each in self.partition.totals.get(task, ()))
        if task.phase == "S":
            run = partial(self._whole_step, task)
        elif task.phase == "U":
            run = partial(self._update, task)
        elif self.stage.deferred:
            run = self._run_apart(task)
        else:
            run = partial(self._run, self.graph, self._placed, task)
        operands = (*reads, *sums)
        in_shardings = tuple(map(self.sharding, operands))
        avals = tuple(
            jax.ShapeDtypeStruct(
                self.values.shape(v), graph.aval_of(v).dtype, weak_type=graph.aval_of(v).weak_type
            )
            for v in operands
        )
        donated = *self._used_up(task, sums), *range(len(reads), len(operands))
        jitted = jax.jit(
            run,
            in_shardings=in_shardings,
            out_shardings=[*map(self.sharding, (*results, *sums))],
            donate_argnums=donated,
            keep_unused=True,  # what runs is told by the program's text, so that must show every operand
            compiler_options=compiler_options(
                (eqn for _, eqn in self.graph.tasks[task]), self.mesh
            ),
        )
        return TaskFunction(task, reads, results, sums, jitted, avals, in_shardings, donated)

    def _run(self, found: StageGraph, place: Place, task: Task, *operands: Any) -> list[Any]:
        """A forward or backward task; `found` is the stage's graph or that of a device's part."""
        accumulated = found.partition.totals.get(task, ())
        read = (*found.partition.reads[task], *(each.sum for each in accumulated))
        env = self._constants(found) | dict(zip(read, operands, strict=True))
        for mine, var in zip(self.partition.reads[task], found.partition.reads[task], strict=True):
            if mine in self._scales:
                env[var] = (env[var] * self._scales[mine]).astype(env[var].dtype)
        self.run_eqns(found.tasks[task], env, place)
        totals = []
        for each in accumulated:
            part, total = jnp.asarray(graph.read(each.part, env)), env[each.sum]
            totals.append(added(each.combine, total, part, self.partition.step.num_micro_batches))
        return [*(env[var] for var in found.partition.results[task]), *totals]

    def _whole_step(self, task: Task, *operands: Any) -> list[Any]:
        """The whole step, microbatches one after the other."""
        step = self.partition.step
        env = self._constants(self.graph) | dict(
            zip(self.partition.reads[task], operands, strict=True)
        )
        if step.microbatching is None:
            self.run_eqns(enumerate(step.jaxpr.eqns), env)
        else:
            if self.stage.deferred:
                local = self._local_accumulation()
                pin = partial(self._constrain, self._placed_apart, "out")
                accumulate_apart(
                    step, local, env, partial(self.run_eqns, place=self._placed_apart), pin
                )
            else:
                pin = partial(self._constrain, self._placed, "out")
                accumulate(step, env, self.run_eqns, pin)
            self.run_eqns(step.microbatching.tail, env)
        return [env[var] for var in self.partition.results[task]]

    def _local_accumulation(self) -> Apart:
        """How devices accumulate gradients of the whole step for themselves, along the deferred axes."""
        step, stage = self.partition.step, self.stage
        assert step.microbatching is not None
        results = tuple(
            self._wanted.get((number, "out"), {}).get(r, replicated(graph.aval_of(var).ndim))
            for number, eqn in step.microbatching.marks
            for r, var in enumerate(eqn.outvars)
        )
        inputs = tuple(value.spec for value in stage.inputs)
        return Apart(step.cut(self.values.ways), self.mesh, stage.deferred, inputs, results)

    def _update(self, task: Task, *operands: Any) -> list[Any]:
        """A round of the update; the first completes what was accumulated."""
        env = self._constants(self.graph) | dict(
            zip(self.partition.reads[task], operands, strict=True)
        )
        count, parts = self.partition.step.num_micro_batches, self._local.step.num_micro_batches
        kinds: list[Combine] = [
            each.combine for each in self._local.partition.completed.get(task, ())
        ]
        for each, combine in zip(self.partition.completed.get(task, ()), kinds, strict=True):
            value = scaled(combine, env[each.sum], count, parts)
            if self.stage.deferred:
                value = value[0] if combine == "same" else value.sum(0)
            env[each.total] = jax.lax.with_sharding_constraint(value, self.sharding(each.total))
        self.run_eqns(self.graph.tasks[task], env)
        return [env[var] for var in self.partition.results[task]]

    def _run_apart(self, task: Task) -> Callable[..., list[Any]]:
        """A forward or backward task in which each device along the deferred axes has examples of its own."""
        deferred, sums = (
            self.stage.deferred,
            [each.sum for each in self.partition.totals.get(task, ())],
        )
        operands, results = (
            (*self.partition.reads[task], *sums),
            (*self.partition.results[task], *sums),
        )

        def along(var: Var) -> Spec:
            return tuple(
                tuple(axis for axis in axes if axis in deferred) for axes in self.values.spec(var)
            )

        def local(*shards: Any) -> list[Any]:
            given = []
            for var, shard in zip(operands, shards, strict=True):
                if var in self.values.apart:
                    given.append(shard[0])
                else:  # a parameter may be in parts; examples stay where they are
                    given.append(
                        shard
                        if var in self.partition.batch_facts.rows
                        else gathered(shard, along(var))
                    )
            made = self._run(self._local, self._placed_apart, task, *given)
            return [
                value[None] if var in self.values.apart else value
                for var, value in zip(results, made, strict=True)
            ]

        ones = (axis for axis, size in self.mesh.shape.items() if size == 1)
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(partition_spec(along(var)) for var in operands),
            out_specs=[partition_spec(along(var)) for var in results],
            axis_names={*deferred, *ones},
            check_vma=False,  # the equations were traced without a mesh, and nothing is differentiated through this
        )

    def _constants(self, found: StageGraph) -> dict[Var, Any]:
        return dict(zip(found.step.jaxpr.constvars, found.step.jaxpr.consts, strict=True))

    def run_eqns(
        self, eqns: Iterable[Numbered], env: dict[Var, Any], place: Place | None = None
    ) -> None:
        """Run numbered equations on the values in `env`, with their operands and results put where the plan wants them.

        Args:
            place: what a spec means for a value; by default a sharding over the mesh.
        """
        place = place or self._placed
        here = [(number, on_devices(eqn, self.mesh)) for number, eqn in eqns]
        before, after = (
            partial(self._constrain, place, "in"),
            partial(self._constrain, place, "out"),
        )
        evaluate(here, env, before, after, shardwise(self.mesh, self._wanted))

    def _constrain(self, place: Place, side: str, number: int, values: Sequence[Any]) -> list[Any]:
        values = list(values)
        for index, spec in self._wanted.get((number, side), {}).items():
            sharding = place(spec)
            if sharding is not None and values[index] is not None:  # a branch sees its own
                values[index] = jax.lax.with_sharding_constraint(values[index], sharding)
        return values

    def _placed(self, spec: Spec) -> NamedSharding:
        return NamedSharding(self.mesh, partition_spec(spec))

    def _placed_apart(self, spec: Spec) -> PartitionSpec | None:
        """For a device that computes apart; None where the compiler has nothing to partition."""
        free = [
            axis
            for axis, size in self.mesh.shape.items()
            if size > 1 and axis not in self.stage.deferred
        ]
        return (
            partition_spec(tuple(tuple(a for a in axes if a in free) for axes in spec))
            if free
            else None
        )

    def _used_up(self, task: Task, sums: Sequence[Var]) -> list[int]:
        """The operands, sums aside, whose memory a result takes: nothing reads them later, and a result is like them.

        A state that is updated comes first, then what nobody reads any more.
        """
        reads, results = self.partition.reads[task], self.partition.results[task]
        if task.phase == "S":  # XLA pairs them, and uses the memory of the others for temporaries
            kept = {
                var for var in self.partition.step.jaxpr.outvars if isinstance(var, Var)
            }.difference(results)
            return [k for k, var in enumerate(reads) if var in self.donated - kept]

        def kind(var: Var) -> tuple[tuple[int, ...], Any]:
            return self.values.shape(var), graph.aval_of(var).dtype

        specs: dict[Any, set[Spec]] = defaultdict(set)
        for var in (*results, *sums):
            specs[kind(var)].add(self.values.spec(var))
        left = Counter(map(kind, results))
        updated = self._updated(task)
        last = self.last_reads.get(task, ())
        found = []
        for k in sorted(range(len(reads)), key=lambda k: reads[k] not in updated):
            var = reads[k]
            # The compiler pairs operands with results by their shape alone.
            if (
                (var in updated or var in last)
                and left[kind(var)]
                and specs[kind(var)] == {self.values.spec(var)}
            ):
                left[kind(var)] -= 1
                found.append(k)
        return found

    def _updated(self, task: Task) -> set[Var]:
        """The donated inputs that an update reads last, and whose next values it makes."""
        step = self.partition.step
        later = [t for t in self.graph.tasks if t.phase == "U" and t.round > task.round]
        after = {var for other in later for var in self.partition.reads[other]}
        next_of = {step.jaxpr.invars[i]: step.jaxpr.outvars[o] for o, i in step.carried.items()}
        made = set(self.partition.results[task]) if task.phase == "U" else set()
        return {
            var
            for var in self.partition.reads[task]
            if var in self.donated - after and next_of.get(var) in made
        }
