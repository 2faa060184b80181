"""The job of a planned step: every value named, and where each is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np
from jax.extend.core import Literal, Var

from autopar.ir.graph import Atom, aval_of
from autopar.ir.keys import is_key
from autopar.lowering.cross_mesh_resharding import reshard
from autopar.lowering.instructions import micro_batch_of, task_of
from autopar.lowering.job import Array, Call, Delivery, Input, Job, Output, StageMesh
from autopar.lowering.planned import PlannedStep
from autopar.lowering.stage_lowering import TaskFunction
from autopar.pipeline.partition import Task
from autopar.plan import Stage
from simulator.program import Run, walk

type Constant = jax.Array | np.ndarray


@dataclass(frozen=True, slots=True)
class JobDescription:
    """A job, and what its caller knows of the step's arguments and results.

    Attributes:
        inputs: each input of the step, where it is before.
        outputs: each output, where it is afterwards; a constant as itself.
        donated: numbers of the inputs whose memory it may reuse.
        functions: what tasks run, by name.
    """

    job: Job
    inputs: tuple[Array, ...]
    outputs: tuple[Array | Constant, ...]
    donated: frozenset[int] = frozenset()
    functions: Mapping[str, TaskFunction] = field(default_factory=dict)


def mesh_of(stage: Stage) -> StageMesh:
    """Return the mesh of a stage."""
    return StageMesh(stage.devices, stage.mesh_shape, stage.axis_names)


def describe_job(
    planned: PlannedStep,
    functions: Mapping[Task, TaskFunction],
    donated: frozenset[int],
    keys_as_data: bool,
) -> JobDescription:
    """Return the job of a planned step; its calls name programs by task.

    Args:
        functions: what tasks run.
        donated: numbers of the inputs whose memory the step may reuse.
        keys_as_data: whether random keys are the numbers that they consist of: between processes.
    """
    return _Describer(planned, functions, donated, keys_as_data).description()


class _Describer:
    def __init__(
        self,
        planned: PlannedStep,
        functions: Mapping[Task, TaskFunction],
        donated: frozenset[int],
        keys_as_data: bool,
    ) -> None:
        self._planned, self._functions, self._donated, self._keys_as_data = (
            planned,
            functions,
            donated,
            keys_as_data,
        )
        self._step, self._partition, self._names = planned.step, planned.partition, planned.names
        self._meshes = [mesh_of(stage) for stage in planned.plan.stages]
        self._count = self._step.num_micro_batches

    def description(self) -> JobDescription:
        program = self._planned.program
        order = tuple(walk(program))
        homes = tuple(self._home(i) for i in range(len(self._step.jaxpr.invars)))
        outputs = self._outputs()
        inputs = tuple(each for i, home in enumerate(homes) for each in self._inputs(i, home))
        deliveries = self._deliveries()
        job = Job(
            programs={},
            meshes=program.meshes,
            order=order,
            calls={run: self._call(run) for _, run in order if isinstance(run, Run)},
            deliveries=deliveries,
            spreads=_spreads(inputs, len(deliveries)),
            inputs=inputs,
            outputs=tuple(each for each in outputs if isinstance(each, Output)),
            zeros=self._zeros(),
            chunks=self._step.chunks,
        )
        wholes = tuple(each.whole if isinstance(each, Output) else each for each in outputs)
        functions = {task.name: function for task, function in self._functions.items()}
        return JobDescription(job, homes, wholes, self._donated, functions)

    def _array(self, stage: int, var: Var, name: str) -> Array:
        values = self._planned.values[stage]
        aval = jax.ShapeDtypeStruct(values.shape(var), aval_of(var).dtype)
        return Array.of(name, aval, self._meshes[stage], values.spec(var), self._keys_as_data)

    def _named(self, stage: int, variables: Sequence[Var], micro_batch: int) -> tuple[Array, ...]:
        return tuple(self._array(stage, v, self._names.of(v, micro_batch)) for v in variables)

    def _call(self, run: Run) -> Call:
        function, micro_batch = self._functions[task_of(run)], micro_batch_of(run)
        operands = self._named(run.stage, (*function.reads, *function.sums), micro_batch)
        results = self._named(run.stage, (*function.results, *function.sums), micro_batch)
        return Call(run.task, operands, results, function.donated)

    def _deliveries(self) -> dict[tuple[str, int], Delivery]:
        found = {}
        for number, ((name, to), crossing) in enumerate(
            self._planned.instructions.crossings.items()
        ):
            sent, wanted = (
                self._array(stage, crossing.var, name) for stage in (crossing.source, crossing.to)
            )
            ends = [(each.place.mesh.logical, each.place.spec) for each in (sent, wanted)]
            plan = reshard(sent.shape, ends[0], ends[1])
            found[name, to] = Delivery(number, plan, sent.dtype, sent.place.mesh, wanted.place.mesh)
        return found

    def _mesh_of(self, stage: int) -> int:
        return self._planned.schedule.mesh_of(stage)

    def _home(self, i: int) -> Array:
        """Input `i` before the step."""
        aval = jax.tree.leaves(self._step.in_avals)[i]
        stage, var = self._partition.input_stages[i][0], self._step.jaxpr.invars[i]
        spec = self._planned.values[stage].spec(var)
        return Array.of(f"in{i}", aval, self._meshes[stage], spec, self._keys_as_data)

    def _inputs(self, i: int, home: Array) -> list[Input]:
        """Input `i` for every mesh that reads it and is not sent it."""
        var, stages = self._step.jaxpr.invars[i], self._partition.input_stages[i]
        is_sent = i in self._step.carried.values()  # by an instruction, to all but the first
        names = [self._names.of(var, k) for k in range(self._partition.input_microbatches(i))]
        found = []
        for mesh in dict.fromkeys(map(self._mesh_of, stages[:1] if is_sent else stages)):
            reader, read = self._planned.instructions.readers.get(
                (mesh, names[0]), (stages[0], var)
            )
            parts = tuple(self._array(reader, read, name) for name in names)
            found.append(Input(i, mesh, home, parts))
        return found

    def _zeros(self) -> tuple[tuple[Array, ...], ...]:
        found: list[list[Array]] = [[] for _ in self._planned.program.meshes]
        for task, totals in self._partition.totals.items():
            for each in totals:
                found[self._mesh_of(task.stage)].append(
                    self._array(task.stage, each.sum, self._names.of(each.sum, 0))
                )
        return tuple(map(tuple, found))

    def _outputs(self) -> list[Output | Constant]:
        """Every output, each an array of its own, which the next step may be given as an argument whose memory it reuses.

        An output that is also another one, or an argument that the caller keeps, is copied.
        """
        taken = {f"in{i}" for i in range(len(self._step.jaxpr.invars)) if i not in self._donated}
        outputs = []
        for o, atom in enumerate(self._step.jaxpr.outvars):
            output = self._output(o, atom)
            if isinstance(output, Output) and len(output.parts) == 1:
                name = output.parts[0].name
                output = replace(output, is_copy=name in taken)
                taken.add(name)
            outputs.append(output)
        return outputs

    def _output(self, o: int, atom: Atom) -> Output | Constant:
        step, partition = self._step, self._partition
        if isinstance(atom, Literal) or atom in step.jaxpr.constvars:
            value = (
                atom.val
                if isinstance(atom, Literal)
                else step.jaxpr.consts[step.jaxpr.constvars.index(atom)]
            )
            return value if is_key(aval_of(atom).dtype) else np.asarray(value, aval_of(atom).dtype)
        if atom in partition.concatenated:
            part = partition.concatenated[atom]
            stage = partition.producers[part].stage
            parts = tuple(
                self._array(stage, part, self._names.of(part, k)) for k in range(self._count)
            )
            shape = (parts[0].shape[0] * self._count, *parts[0].shape[1:])
            return Output(
                o, self._mesh_of(stage), parts, replace(parts[0], name=f"out{o}", shape=shape)
            )
        if atom in partition.producers:
            stage = partition.producers[atom].stage
            made = self._array(stage, atom, self._names.of(atom, 0))
        else:  # an input as it is
            i = step.jaxpr.invars.index(atom)
            stage, made = partition.input_stages[i][0], self._home(i)
        return Output(o, self._mesh_of(stage), (made,), made)


def _spreads(inputs: Sequence[Input], number: int) -> dict[tuple[int, int], Delivery]:
    """What brings inputs from their homes to the other meshes that read them, as these want them; numbered from `number` on."""
    found = {}
    for each in inputs:
        home, place = each.home.place, each.parts[0].place
        if place.mesh.devices != home.mesh.devices:
            plan = reshard(
                each.home.shape, (home.mesh.logical, home.spec), (place.mesh.logical, place.spec)
            )
            found[each.number, each.mesh] = Delivery(
                number + len(found), plan, each.home.dtype, home.mesh, place.mesh
            )
    return found
