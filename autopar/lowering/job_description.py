"""Describe a planned step as a job: the name, place and shape of every value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, Var

from autopar.ir.graph import Atom, aval_of
from autopar.ir.host_memory import memory_kind
from autopar.ir.keys import is_key
from autopar.lowering.cross_mesh_resharding import reshard
from autopar.lowering.instructions import micro_batch_of, task_of
from autopar.lowering.job import Array, Call, Delivery, Input, Job, Output, Place, StageMesh
from autopar.lowering.planned import PlannedStep
from autopar.lowering.stage_lowering import TaskFunction
from autopar.pipeline.partition import Task
from autopar.plan_stages import Stage
from simulator.program import Run, walk

type Constant = jax.Array | np.ndarray


@dataclass(frozen=True, slots=True)
class JobDescription:
    """A job with what its caller needs to call it.

    Attributes:
        job: the job.
        inputs: each leaf of the step's arguments, where it is before the step.
        outputs: each output where it is after the step; a constant as itself.
        donated: numbers of the inputs whose memory the step may reuse.
        functions: function of each task, by the task's name.
        prepared: each input that is computed from the arguments before the step.
    """

    job: Job
    inputs: tuple[Array, ...]
    outputs: tuple[Array | Constant, ...]
    donated: frozenset[int] = frozenset()
    functions: Mapping[str, TaskFunction] = field(default_factory=dict)
    prepared: tuple[Array, ...] = ()


def mesh_of(stage: Stage) -> StageMesh:
    """Return the mesh of a stage."""
    return StageMesh(stage.devices, stage.mesh_shape, stage.axis_names)


def describe_job(
    planned: PlannedStep,
    functions: Mapping[Task, TaskFunction],
    donated: frozenset[int],
    keys_as_data: bool,
) -> JobDescription:
    """Return the job of a planned step, whose calls name programs by task.

    Args:
        planned: the step with its plan.
        functions: function of each task.
        donated: numbers of the inputs whose memory the step may reuse.
        keys_as_data: whether random keys are stored as key data, as between processes.
    """
    return _Describer(planned, functions, donated, keys_as_data).description()


class _Describer:
    """Derives the parts of a job; see `describe_job` for the arguments."""

    def __init__(
        self,
        planned: PlannedStep,
        functions: Mapping[Task, TaskFunction],
        donated: frozenset[int],
        keys_as_data: bool,
    ) -> None:
        self._planned = planned
        self._functions = functions
        self._donated = donated
        self._keys_as_data = keys_as_data
        self._step = planned.step
        self._partition = planned.partition
        self._names = planned.names
        self._meshes = [mesh_of(stage) for stage in planned.plan.stages]

    def description(self) -> JobDescription:
        program = self._planned.program
        order = tuple(walk(program))
        homes = tuple(self._home(i) for i in range(len(self._step.jaxpr.invars)))
        inputs = tuple(input_ for i, home in enumerate(homes) for input_ in self._inputs(i, home))
        outputs = self._outputs()
        deliveries = self._deliveries()
        job = Job(
            programs={},
            meshes=program.meshes,
            order=order,
            calls={run: self._call(run) for _, run in order if isinstance(run, Run)},
            deliveries=deliveries,
            spreads=_spreads(inputs, len(deliveries)),
            inputs=inputs,
            outputs=tuple(output for output in outputs if isinstance(output, Output)),
            zeros=self._zeros(),
            chunks=self._step.chunks,
            positions=self._step.positions,
            memory_budget=self._planned.program_budget,
        )
        whole_outputs = tuple(
            output.value if isinstance(output, Output) else output for output in outputs
        )
        functions = {task.name: function for task, function in self._functions.items()}
        count = self._step.in_tree.num_leaves
        prepared = homes[count : self._step.positions]
        return JobDescription(job, homes[:count], whole_outputs, self._donated, functions, prepared)

    def _array(self, stage: int, var: Var, name: str) -> Array:
        values = self._planned.values[stage]
        aval = jax.ShapeDtypeStruct(values.shape(var), aval_of(var).dtype)
        mesh, spec = self._meshes[stage], values.spec(var)
        return Array.of(name, aval, mesh, spec, self._keys_as_data, memory_kind(var))

    def _arrays(self, stage: int, variables: Sequence[Var], micro_batch: int) -> tuple[Array, ...]:
        return tuple(self._array(stage, var, self._names.of(var, micro_batch)) for var in variables)

    def _call(self, run: Run) -> Call:
        function = self._functions[task_of(run)]
        micro_batch = micro_batch_of(run)
        operands = self._arrays(run.stage, (*function.reads, *function.sums), micro_batch)
        results = self._arrays(run.stage, (*function.results, *function.sums), micro_batch)
        return Call(run.task, operands, results, function.donated)

    def _deliveries(self) -> dict[tuple[str, int], Delivery]:
        deliveries = {}
        crossings = self._planned.instructions.crossings
        for number, ((name, mesh), crossing) in enumerate(crossings.items()):
            sent = self._array(crossing.source, crossing.var, name)
            received = self._array(crossing.to, crossing.var, name)
            deliveries[name, mesh] = _delivery(number, sent, received.place)
        return deliveries

    def _mesh_of(self, stage: int) -> int:
        return self._planned.schedule.mesh_of(stage)

    def _home(self, i: int) -> Array:
        """Return input `i` as it is before the step."""
        aval = self._step.input_avals[i]
        stage = self._partition.input_stages[i][0]
        var, mesh = self._step.jaxpr.invars[i], self._meshes[stage]
        spec = self._planned.values[stage].spec(var)
        return Array.of(f"in{i}", aval, mesh, spec, self._keys_as_data, memory_kind(var))

    def _inputs(self, i: int, home: Array) -> list[Input]:
        """Return input `i` for every mesh that reads it, unless an instruction sends it there."""
        var = self._step.jaxpr.invars[i]
        stages = self._partition.input_stages[i]
        if i in self._step.carried.values():  # instructions send it to the other stages
            stages = stages[:1]
        names = [self._names.of(var, k) for k in range(self._partition.input_microbatches(i))]
        readers = self._planned.instructions.readers
        inputs = []
        for mesh in dict.fromkeys(map(self._mesh_of, stages)):
            reader, read = readers.get((mesh, names[0]), (stages[0], var))
            parts = tuple(self._array(reader, read, name) for name in names)
            if i == self._step.positions:  # every mesh makes its own
                home = replace(home, place=parts[0].place)
            inputs.append(Input(i, mesh, home, parts))
        return inputs

    def _zeros(self) -> tuple[tuple[Array, ...], ...]:
        """Return for each mesh the sums that microbatches are added to."""
        sums: list[list[Array]] = [[] for _ in self._planned.program.meshes]
        for task, totals in self._partition.totals.items():
            variables = [total.sum for total in totals]
            sums[self._mesh_of(task.stage)] += self._arrays(task.stage, variables, 0)
        return tuple(map(tuple, sums))

    def _outputs(self) -> list[Output | Constant]:
        """Return every output as an array that shares its memory with no other one.

        The caller may donate an output to the next step. So an output that is also another output,
        or an argument that the caller keeps, is copied.
        """
        taken = {f"in{i}" for i in range(len(self._step.jaxpr.invars)) if i not in self._donated}
        outputs = []
        for o, atom in enumerate(self._step.jaxpr.outvars):
            output = self._output(o, atom)
            if isinstance(output, Output):
                output = replace(output, is_copy=output.value.name in taken)
                taken.add(output.value.name)
            outputs.append(output)
        return outputs

    def _output(self, o: int, atom: Atom) -> Output | Constant:
        jaxpr, partition = self._step.jaxpr, self._partition
        if isinstance(atom, Literal):
            return _constant(atom.val, atom)
        if atom in jaxpr.constvars:
            return _constant(jaxpr.consts[jaxpr.constvars.index(atom)], atom)
        if atom in partition.producers:
            stage = partition.producers[atom].stage
            value = self._array(stage, atom, self._names.of(atom, 0))
        else:  # an input that the step returns
            i = jaxpr.invars.index(atom)
            stage = partition.input_stages[i][0]
            value = self._home(i)
        return Output(o, self._mesh_of(stage), value)


def _constant(value: Any, atom: Atom) -> Constant:
    return value if is_key(aval_of(atom).dtype) else np.asarray(value, aval_of(atom).dtype)


def _delivery(number: int, value: Array, destination: Place) -> Delivery:
    source = value.place
    plan = reshard(
        value.shape,
        (source.mesh.logical, source.spec),
        (destination.mesh.logical, destination.spec),
    )
    return Delivery(number, plan, value.dtype, source.mesh, destination.mesh)


def _spreads(inputs: Sequence[Input], first_number: int) -> dict[tuple[int, int], Delivery]:
    """Return the deliveries of inputs from their homes to the other meshes that read them.

    They are numbered from `first_number` on.
    """
    spreads = {}
    for input_ in inputs:
        place = input_.parts[0].place
        if place.mesh.devices != input_.home.place.mesh.devices:
            number = first_number + len(spreads)
            spreads[input_.number, input_.mesh] = _delivery(number, input_.home, place)
    return spreads
