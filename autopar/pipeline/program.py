"""The instructions of a pipeline: its schedule with every value named, sent where it is needed and freed when it no longer is."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from jax.extend.core import Var

from autopar.graph import aval_of
from autopar.pipeline.cut import Cut, Task
from autopar.pipeline.schedules import Schedule
from autopar.work import array_bytes
from simulator.program import Free, Instruction, Program, Recv, Run, Send


@dataclass(frozen=True)
class Names:
    """What the values of a pipeline are called.

    A value of a microbatch has the microbatch's number after a dot: `in3.0`, `v17.0`. `in4` is an input that is whole, `t5` what
    microbatches have added up to so far, `v18` a value of the update.
    """

    cut: Cut

    def __post_init__(self) -> None:
        step = self.cut.step
        values = dict.fromkeys(var for reads in self.cut.reads.values() for var in reads)
        values.update(dict.fromkeys(var for results in self.cut.results.values() for var in results))
        made = {var: f"v{k}" for k, var in enumerate(values)}
        made.update((each.sum, f"t{k}") for k, each in enumerate(e for ts in self.cut.totals.values() for e in ts))
        made.update((var, f"in{i}") for i, var in enumerate(step.jaxpr.invars))
        batch = {step.jaxpr.invars[i] for i in step.batch}
        body = {var for var in values if (task := self.cut.made_by.get(var)) and task.phase != "U"}
        object.__setattr__(self, "_base", made)
        object.__setattr__(
            self, "_per_microbatch", (batch | body) - {e.sum for ts in self.cut.totals.values() for e in ts}
        )

    def of(self, var: Var, micro_batch: int) -> str:
        base: str = self._base[var]  # pyright: ignore[reportAttributeAccessIssue]
        per_microbatch: set[Var] = self._per_microbatch  # pyright: ignore[reportAttributeAccessIssue]
        return f"{base}.{micro_batch}" if var in per_microbatch else base


def task_of(run: Run) -> Task:
    """The task that an instruction runs; the rounds of an update are told by the number where others have the microbatch."""
    return Task(run.stage, run.phase, run.micro_batch if run.phase == "U" else 0)


def pipeline_program(cut: Cut, schedule: Schedule, meshes: tuple[tuple[int, ...], ...]) -> Program:
    """The program of a cut step.

    Args:
        meshes: the devices of each mesh.
    """
    return Program(meshes, tuple(_Builder(cut, schedule).rows()))


class _Builder:
    def __init__(self, cut: Cut, schedule: Schedule) -> None:
        self.cut, self.schedule = cut, schedule
        self.names = Names(cut)
        self.mesh_of = schedule.pipeline.mesh_of
        self.runs = [list(self._runs(row)) for row in schedule.rows]
        self.readers: dict[str, list[int]] = defaultdict(list)  # meshes, in the order of stages
        self.source: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        inputs = set(cut.step.jaxpr.invars)
        for mesh, runs in enumerate(self.runs):
            for run in runs:
                for var in cut.reads[task_of(run)]:
                    name = self.names.of(var, run.micro_batch)
                    self.readers[name].append(mesh)
                    self.bytes[name] = array_bytes(aval_of(var).shape, aval_of(var).dtype)
                    if var not in inputs:
                        self.source[name] = self.mesh_of(cut.made_by[var].stage)
        for i, stages in cut.input_stages.items():
            if i not in cut.step.batch and i in cut.step.carried.values():
                self.source[f"in{i}"] = self.mesh_of(stages[0])
        self.outputs = {self.names.of(a, 0) for a in cut.step.jaxpr.outvars if isinstance(a, Var) and a in cut.made_by}
        batches = range(schedule.pipeline.num_micro_batches)
        self.outputs |= {self.names.of(part, b) for part in cut.joined.values() for b in batches}
        self.outputs |= {f"in{i}" for i in range(len(cut.step.jaxpr.invars)) if i not in cut.step.batch}

    def _runs(self, row: tuple[Run, ...]) -> Iterator[Run]:
        """The tasks of a mesh, the update in as many rounds as it takes; tasks with nothing to do are left out.

        A forward pass has an update, too, if its results are sums or means: what completes them.
        """
        update = [run.stage for run in row if run.phase == "U"] or list(dict.fromkeys(run.stage for run in row))
        yield from (run for run in row if run.phase != "U" and self._does_something(task_of(run)))
        rounds = max((task.round for task in self.cut.eqns if task.phase == "U"), default=-1) + 1
        for turn in range(rounds):
            yield from (Run(stage, "U", turn) for stage in update if self._does_something(Task(stage, "U", turn)))

    def _does_something(self, task: Task) -> bool:
        return any(found.get(task) for found in (self.cut.eqns, self.cut.totals, self.cut.completed))

    def rows(self) -> Iterator[tuple[Instruction, ...]]:
        for mesh, runs in enumerate(self.runs):
            yield tuple(self._row(mesh, runs))

    def _row(self, mesh: int, runs: list[Run]) -> Iterator[Instruction]:
        last: dict[str, Run] = {}
        for run in runs:
            last.update((self.names.of(var, run.micro_batch), run) for var in self.cut.reads[task_of(run)])
        here: set[str] = set()
        for name, source in self.source.items():
            if name.startswith("in") and source == mesh:
                yield from self._sends(name, mesh)
        for run in runs:
            task = task_of(run)
            for var in self.cut.reads[task]:
                name = self.names.of(var, run.micro_batch)
                if self.source.get(name, mesh) != mesh and name not in here:
                    here.add(name)
                    yield Recv(name, self.source[name])
            yield run
            for var in self.cut.results[task]:
                yield from self._sends(self.names.of(var, run.micro_batch), mesh)
            done = [name for name, final in last.items() if final == run and name not in self.outputs]
            done += [
                n
                for var in self.cut.results[task]
                if (n := self.names.of(var, run.micro_batch)) not in last and n not in self.outputs
            ]
            if done:
                yield Free(tuple(done))

    def _sends(self, name: str, mesh: int) -> Iterator[Send]:
        for other in dict.fromkeys(self.readers.get(name, ())):
            if other != mesh:
                yield Send(name, other, self.bytes[name])
