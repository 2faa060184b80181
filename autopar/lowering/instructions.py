"""The instructions of a plan: its schedule with every value named, sent where it is needed and freed after its last use."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jax.extend.core import Var

from autopar.ir.array_sizes import array_bytes
from autopar.ir.graph import aval_of
from autopar.lowering.cross_mesh_resharding import Resharding
from autopar.pipeline.partition import Partition, Task
from autopar.pipeline.pipeline_schedules import Schedule
from simulator.program import Free, Instruction, Program, Recv, Run, Send
from simulator.work import Collective


@dataclass(frozen=True, slots=True)
class ValueNames:
    """What the values of a pipeline are called; `ValueNames.of_cut` makes them.

    A value of a microbatch has the microbatch's number after a dot: `in3.0`, `v17.0`. `in4` is an input that is whole, `t5` what
    microbatches have added up to so far, `v18` a value of the update.

    Attributes:
        base: the name of each value, without that number.
        per_microbatch: the values that each microbatch has.
    """

    base: Mapping[Var, str]
    per_microbatch: frozenset[Var]

    @classmethod
    def of_cut(cls, partition: Partition) -> "ValueNames":
        values = dict.fromkeys(var for reads in partition.reads.values() for var in reads)
        values.update(
            dict.fromkeys(var for results in partition.results.values() for var in results)
        )
        sums = [each.sum for totals in partition.totals.values() for each in totals]
        base = {var: f"v{k}" for k, var in enumerate(values)}
        base.update((var, f"t{k}") for k, var in enumerate(sums))
        base.update((var, f"in{i}") for i, var in enumerate(partition.step.jaxpr.invars))
        batch = {
            partition.step.jaxpr.invars[i]
            for i in partition.step.batch
            if not partition.is_whole_step
        }
        body = {
            var
            for var in values
            if (task := partition.producers.get(var)) and task.phase not in ("U", "S")
        }
        return cls(base, frozenset(batch | body).difference(sums))

    def of(self, var: Var, micro_batch: int) -> str:
        return f"{self.base[var]}.{micro_batch}" if var in self.per_microbatch else self.base[var]


class Crossing(NamedTuple):
    """A value that a stage on one mesh has and a stage on another one reads."""

    var: Var
    source: int
    to: int


type Transfers = Callable[[Crossing], Resharding]
"""How a value gets from the mesh of one stage to that of another."""


def task_of(run: Run) -> Task:
    """The task that an instruction runs; the rounds of an update are told by the number where others have the microbatch."""
    return Task(run.stage, run.phase, run.micro_batch if run.phase == "U" else 0)


def micro_batch_of(run: Run) -> int:
    """Return the microbatch whose values an instruction reads and makes; what an update reads is the same in all of them."""
    return 0 if run.phase == "U" else run.micro_batch


@dataclass(frozen=True, slots=True)
class PipelineProgram:
    """The program of a cut step, and which values its instructions speak of.

    Attributes:
        program: the instructions.
        readers: by mesh and name of every value that tasks read there, the first stage that does, and the value.
        crossings: by name and mesh, each value that is sent there.
        last_reads: for each task the values, of those that tasks made, that nothing on its mesh reads after it, whatever the microbatch.
    """

    program: Program
    readers: Mapping[tuple[int, str], tuple[int, Var]]
    crossings: Mapping[tuple[str, int], Crossing]
    last_reads: Mapping[Task, frozenset[Var]]


def pipeline_program(
    partition: Partition,
    schedule: Schedule,
    meshes: tuple[tuple[int, ...], ...],
    names: ValueNames,
    transfers: Transfers,
) -> PipelineProgram:
    """The program of a cut step on `meshes`, the devices of each mesh."""
    builder = _Builder(partition, schedule, names, transfers)
    program = Program(meshes, tuple(map(tuple, builder.rows())))
    return PipelineProgram(program, builder.readers, builder.crossings, builder.last_reads())


class _Builder:
    def __init__(
        self, partition: Partition, schedule: Schedule, names: ValueNames, transfers: Transfers
    ) -> None:
        self._partition, self._schedule, self._names, self._transfers = (
            partition,
            schedule,
            names,
            transfers,
        )
        mesh_of = schedule.mesh_of
        self._all_runs = [list(self._runs(row)) for row in schedule.rows]
        self.readers: dict[tuple[int, str], tuple[int, Var]] = {}
        self._meshes: dict[str, list[int]] = defaultdict(list)  # that read a value
        self._source: dict[
            str, int
        ] = {}  # the stage that has a value which others may have to be sent
        inputs = set(partition.step.jaxpr.invars)
        for mesh, row in enumerate(self._all_runs):
            for run in row:
                for var in partition.reads[task_of(run)]:
                    name = names.of(var, micro_batch_of(run))
                    self.readers.setdefault((mesh, name), (run.stage, var))
                    self._meshes[name].append(mesh)
                    if var not in inputs:
                        self._source[name] = partition.producers[var].stage
        for i, stages in partition.input_stages.items():
            if i not in partition.step.batch and i in partition.step.carried.values():
                self._source[f"in{i}"] = stages[0]
        self._outputs = {
            names.of(a, 0)
            for a in partition.step.jaxpr.outvars
            if isinstance(a, Var) and a in partition.producers
        }
        batches = range(schedule.pipeline.num_micro_batches)
        self._outputs |= {
            names.of(part, b) for part in partition.concatenated.values() for b in batches
        }
        self._outputs |= {f"in{i}" for i in range(len(partition.step.jaxpr.invars))}
        self.crossings = {
            (name, mesh): Crossing(self.readers[mesh, name][1], source, self.readers[mesh, name][0])
            for name, source in self._source.items()
            for mesh in dict.fromkeys(self._meshes[name])
            if mesh != mesh_of(source)
        }

    def _runs(self, row: tuple[Run, ...]) -> Iterator[Run]:
        """The tasks of a mesh, the update in as many rounds as it takes; tasks with nothing to do are left out.

        A forward pass has an update, too, if its results are sums or means: what completes them.
        """
        update = [run.stage for run in row if run.phase == "U"] or list(
            dict.fromkeys(run.stage for run in row)
        )
        yield from (run for run in row if run.phase != "U" and self._does_something(task_of(run)))
        rounds = (
            max((task.round for task in self._partition.eqns if task.phase == "U"), default=-1) + 1
        )
        for turn in range(rounds):
            yield from (
                Run(stage, "U", turn)
                for stage in update
                if self._does_something(Task(stage, "U", turn))
            )

    def _does_something(self, task: Task) -> bool:
        return any(
            found.get(task)
            for found in (self._partition.eqns, self._partition.totals, self._partition.completed)
        )

    def rows(self) -> Iterator[Iterator[Instruction]]:
        for mesh, runs in enumerate(self._all_runs):
            yield self._row(mesh, runs)

    def last_reads(self) -> dict[Task, frozenset[Var]]:
        found: dict[Task, frozenset[Var]] = {}
        for runs in self._all_runs:
            last = self._last_reader(runs)
            for run in runs:
                task = task_of(run)
                names = {
                    var: self._names.of(var, micro_batch_of(run))
                    for var in self._partition.reads[task]
                }
                mine = frozenset(
                    var
                    for var, name in names.items()
                    if last[name] == run
                    and name not in self._outputs
                    and var in self._partition.producers
                )
                found[task] = found.get(task, mine) & mine
        return found

    def _last_reader(self, runs: list[Run]) -> dict[str, Run]:
        return {
            self._names.of(var, micro_batch_of(run)): run
            for run in runs
            for var in self._partition.reads[task_of(run)]
        }

    def _row(self, mesh: int, runs: list[Run]) -> Iterator[Instruction]:
        partition, names = self._partition, self._names
        last = self._last_reader(runs)
        here: set[str] = set()
        for name, source in self._source.items():
            if name.startswith("in") and self._schedule.mesh_of(source) == mesh:
                yield from self._sends(name)
        for run in runs:
            task = task_of(run)
            for var in partition.reads[task]:
                name = names.of(var, micro_batch_of(run))
                if (name, mesh) in self.crossings and name not in here:
                    here.add(name)
                    yield self._recv(name, mesh)
            yield run
            made = [names.of(var, micro_batch_of(run)) for var in partition.results[task]]
            for name in made:
                yield from self._sends(name)
            done = [
                name for name, final in last.items() if final == run and name not in self._outputs
            ]
            done += [name for name in made if name not in last and name not in self._outputs]
            if done:
                yield Free(tuple(done))

    def _sends(self, name: str) -> Iterator[Send]:
        for mesh in dict.fromkeys(self._meshes.get(name, ())):
            if (name, mesh) in self.crossings:
                crossing = self.crossings[name, mesh]
                item = array_bytes((), aval_of(crossing.var).dtype)
                yield Send(name, mesh, self._transfers(crossing).sent_bytes(item))

    def _recv(self, name: str, mesh: int) -> Recv:
        crossing = self.crossings[name, mesh]
        return Recv(name, self._schedule.mesh_of(crossing.source), self._gather(name, crossing))

    def _gather(self, name: str, crossing: Crossing) -> Collective | None:
        """What completes a value that has arrived in parts."""
        resharding = self._transfers(crossing)
        if not resharding.gathers:
            return None
        num_bytes = resharding.gathered_bytes(array_bytes((), aval_of(crossing.var).dtype))
        groups = resharding.gather_groups
        return Collective(
            f"gather {name}", "all_gather", num_bytes, groups, axis=resharding.mesh.along(groups)
        )
