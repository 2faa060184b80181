"""The instructions of a plan: its schedule with named values, transfers, and frees after last uses.

Liveness and transfers follow from the data dependences between tasks (`Partition.reads` and
`Partition.results`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jax.extend.core import Var

from autopar.ir.array_sizes import array_bytes
from autopar.ir.graph import aval_of, variables
from autopar.lowering.cross_mesh_resharding import Resharding
from autopar.pipeline.partition import Partition, Task
from autopar.pipeline.pipeline_schedules import Schedule
from simulator.program import Free, Instruction, Program, Recv, Run, Send
from simulator.work import Collective


@dataclass(frozen=True, slots=True)
class ValueNames:
    """The names of the values of a program.

    The name of a microbatch's value ends with a dot and the number of the microbatch: `in3.0`,
    `v17.0`. `in4` is an input that is not divided into microbatches, `t5` a running sum over
    microbatches, `v18` a value of the update.

    Attributes:
        base: name of each value, without the microbatch.
        per_microbatch: values that each microbatch has one of.
    """

    base: Mapping[Var, str]
    per_microbatch: frozenset[Var]

    @classmethod
    def of_partition(cls, partition: Partition) -> "ValueNames":
        """Return the names of all values that tasks of `partition` read or compute for others."""
        step = partition.step
        values = dict.fromkeys(var for reads in partition.reads.values() for var in reads)
        values |= dict.fromkeys(var for results in partition.results.values() for var in results)
        sums = [total.sum for totals in partition.totals.values() for total in totals]
        base = {var: f"v{k}" for k, var in enumerate(values)}
        base |= {var: f"t{k}" for k, var in enumerate(sums)}
        base |= {var: f"in{i}" for i, var in enumerate(step.jaxpr.invars)}
        divided = () if partition.is_whole_step else step.batch
        per_microbatch = {step.jaxpr.invars[i] for i in divided}
        for var in values:
            producer = partition.producers.get(var)
            if producer is not None and producer.phase not in ("U", "S"):
                per_microbatch.add(var)
        return cls(base, frozenset(per_microbatch).difference(sums))

    def of(self, var: Var, micro_batch: int) -> str:
        """Return the name of a value, for one microbatch if each has one of it."""
        return f"{self.base[var]}.{micro_batch}" if var in self.per_microbatch else self.base[var]


class Crossing(NamedTuple):
    """A value that one stage computes and a stage on another mesh reads.

    Attributes:
        var: the value.
        source: number of the stage that has it.
        to: number of the first stage on the receiving mesh that reads it.
    """

    var: Var
    source: int
    to: int


type Transfers = Callable[[Crossing], Resharding]
"""(crossing) -> how the value is resharded from the mesh of one stage to that of the other."""


def task_of(run: Run) -> Task:
    """Return the task of an instruction. An update has its round in place of a microbatch."""
    return Task(run.stage, run.phase, run.micro_batch if run.phase == "U" else 0)


def micro_batch_of(run: Run) -> int:
    """Return the microbatch whose values an instruction reads and computes; 0 for an update."""
    return 0 if run.phase == "U" else run.micro_batch


@dataclass(frozen=True, slots=True)
class PipelineProgram:
    """The program of a partitioned step, with the values that its instructions name.

    Attributes:
        program: the instructions.
        readers: for the mesh and name of every value that tasks read, the first stage there that
            reads it, and the value.
        crossings: for the name and the receiving mesh, each value that is sent.
        last_reads: for each task the inputs and the results of tasks that nothing on its mesh reads
            after it, in any microbatch. Results that leave the step are no part of it.
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
    """Return the program of a partitioned step.

    Args:
        partition: the step as tasks.
        schedule: the order of tasks on each mesh.
        meshes: devices of each mesh.
        names: names of the values.
        transfers: resharding of each value that crosses between meshes.
    """
    builder = _ProgramBuilder(partition, schedule, names, transfers)
    program = Program(meshes, tuple(map(tuple, builder.rows())))
    return PipelineProgram(program, builder.readers, builder.crossings, builder.last_reads())


class _ProgramBuilder:
    """Adds transfers and frees to the tasks of a schedule.

    Attributes:
        runs: tasks of each mesh that have something to do, in order.
        readers, crossings: see `PipelineProgram`.
        reading_meshes: meshes that read each value.
        source: stage that has each value which other meshes may read.
        outputs: names of the values that live until the end of the step.
    """

    def __init__(
        self,
        partition: Partition,
        schedule: Schedule,
        names: ValueNames,
        transfers: Transfers,
    ) -> None:
        self._partition = partition
        self._schedule = schedule
        self._names = names
        self._transfers = transfers
        self.runs = [list(self._runs(row)) for row in schedule.rows]
        self.readers: dict[tuple[int, str], tuple[int, Var]] = {}
        self.reading_meshes: dict[str, list[int]] = defaultdict(list)
        self.source: dict[str, int] = {}
        self._collect_reads()
        self.outputs = self._output_names()
        self.crossings = {
            (name, mesh): Crossing(self.readers[mesh, name][1], source, self.readers[mesh, name][0])
            for name, source in self.source.items()
            for mesh in dict.fromkeys(self.reading_meshes[name])
            if mesh != schedule.mesh_of(source)
        }

    def _runs(self, row: tuple[Run, ...]) -> Iterator[Run]:
        """Yield the tasks of a mesh that have something to do, and all rounds of its updates.

        A schedule without updates has them as well if results of the step are sums or means: they
        complete these.
        """
        updating = [run.stage for run in row if run.phase == "U"]
        stages = updating or list(dict.fromkeys(run.stage for run in row))
        yield from (run for run in row if run.phase != "U" and self._has_work(task_of(run)))
        rounds = max((task.round for task in self._partition.eqns if task.phase == "U"), default=-1)
        for round_ in range(rounds + 1):
            for stage in stages:
                if self._has_work(Task(stage, "U", round_)):
                    yield Run(stage, "U", round_)

    def _has_work(self, task: Task) -> bool:
        partition = self._partition
        return any(
            work.get(task) for work in (partition.eqns, partition.totals, partition.completed)
        )

    def _collect_reads(self) -> None:
        partition = self._partition
        inputs = set(partition.step.jaxpr.invars)
        for mesh, runs in enumerate(self.runs):
            for run in runs:
                for var in partition.reads[task_of(run)]:
                    name = self._names.of(var, micro_batch_of(run))
                    self.readers.setdefault((mesh, name), (run.stage, var))
                    self.reading_meshes[name].append(mesh)
                    if var not in inputs:
                        self.source[name] = partition.producers[var].stage
        for i, stages in partition.input_stages.items():
            if i not in partition.step.batch and i in partition.step.carried.values():
                self.source[f"in{i}"] = stages[0]

    def _output_names(self) -> set[str]:
        """Return the names of inputs and of outputs of the step: they are never freed."""
        partition = self._partition
        jaxpr = partition.step.jaxpr
        outputs = variables(jaxpr.outvars)
        names = {self._names.of(var, 0) for var in outputs if var in partition.producers}
        return names | {f"in{i}" for i in range(len(jaxpr.invars))}

    def rows(self) -> Iterator[Iterator[Instruction]]:
        """Yield the instructions of each mesh."""
        for mesh, runs in enumerate(self.runs):
            yield self._row(mesh, runs)

    def last_reads(self) -> dict[Task, frozenset[Var]]:
        """Return `PipelineProgram.last_reads`."""
        partition = self._partition
        last_reads: dict[Task, frozenset[Var]] = {}
        for runs in self.runs:
            last_reader = self._last_reader(runs)
            for run in runs:
                task = task_of(run)
                names = {
                    var: self._names.of(var, micro_batch_of(run)) for var in partition.reads[task]
                }
                last = frozenset(
                    var
                    for var, name in names.items()
                    if last_reader[name] == run
                    and (name not in self.outputs or var not in partition.producers)
                )
                last_reads[task] = last_reads.get(task, last) & last
        return last_reads

    def _last_reader(self, runs: list[Run]) -> dict[str, Run]:
        """Return the last of the tasks that reads each value."""
        return {
            self._names.of(var, micro_batch_of(run)): run
            for run in runs
            for var in self._partition.reads[task_of(run)]
        }

    def _row(self, mesh: int, runs: list[Run]) -> Iterator[Instruction]:
        """Yield the instructions of a mesh: each task with its receives, sends and frees."""
        last_reader = self._last_reader(runs)
        received: set[str] = set()
        for name, source in self.source.items():
            if name.startswith("in") and self._schedule.mesh_of(source) == mesh:
                yield from self._sends(name)
        for run in runs:
            task, micro_batch = task_of(run), micro_batch_of(run)
            for var in self._partition.reads[task]:
                name = self._names.of(var, micro_batch)
                if (name, mesh) in self.crossings and name not in received:
                    received.add(name)
                    yield self._recv(name, mesh)
            yield run
            results = [self._names.of(var, micro_batch) for var in self._partition.results[task]]
            for name in results:
                yield from self._sends(name)
            unread = [name for name in results if name not in last_reader]
            read = [name for name, last in last_reader.items() if last == run]
            dead = [name for name in (*read, *unread) if name not in self.outputs]
            if dead:
                yield Free(tuple(dead))

    def _sends(self, name: str) -> Iterator[Send]:
        for mesh in dict.fromkeys(self.reading_meshes.get(name, ())):
            if (name, mesh) in self.crossings:
                crossing = self.crossings[name, mesh]
                item_bytes = array_bytes((), aval_of(crossing.var).dtype)
                yield Send(name, mesh, self._transfers(crossing).sent_bytes(item_bytes))

    def _recv(self, name: str, mesh: int) -> Recv:
        crossing = self.crossings[name, mesh]
        return Recv(name, self._schedule.mesh_of(crossing.source), self._gather(name, crossing))

    def _gather(self, name: str, crossing: Crossing) -> Collective | None:
        """Return the all_gather that completes a value that arrives in parts, if it does."""
        resharding = self._transfers(crossing)
        if not resharding.gathers:
            return None
        num_bytes = resharding.gathered_bytes(array_bytes((), aval_of(crossing.var).dtype))
        groups = resharding.gather_groups
        return Collective(
            f"gather {name}",
            "all_gather",
            num_bytes,
            groups,
            axis=resharding.mesh.axes_of_groups(groups),
        )
