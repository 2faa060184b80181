"""Export planned steps as jobs for workers: every task exported for devices elsewhere, every value named."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, Var

from autopar.graph import Atom, aval_of
from autopar.hosts.job import Array, Call, Delivery, Input, Job, Output, StageMesh
from autopar.keys import data_aval, is_key, on_data
from autopar.pipeline.compiling import lower_stage
from autopar.pipeline.cross_mesh_resharding import reshard
from autopar.pipeline.instructions import micro_batch_of, task_of
from autopar.pipeline.lowering import TaskFunction
from autopar.plan import Stage
from autopar.planned import PlannedStep
from autopar.runtime.create_state import part_of_state
from autopar.trace import StepGraph
from simulator.program import Program, Run, walk


@dataclass(slots=True)
class Exports:
    """Programs for a platform, each once.

    Attributes:
        platform: "cpu" or "cuda".
    """

    platform: str
    programs: dict[str, bytes] = field(default_factory=dict)

    def add(
        self, function: Callable[..., Any], avals: Sequence[Any], operands: Sequence[Array], results: Sequence[Array]
    ) -> str:
        """The key of the program of a function from a flat list to one; random keys are numbers to who calls it.

        Args:
            avals: of the operands, as the function wants them.
        """
        jitted = jax.jit(
            on_data(function, avals),
            in_shardings=[each.place.abstract() for each in operands],
            out_shardings=[each.place.abstract() for each in results],
            keep_unused=True,
        )
        exported = jax.export.export(jitted, platforms=[self.platform])(*map(data_aval, avals))
        key = sha256(exported.mlir_module().encode()).hexdigest()
        if key not in self.programs:
            self.programs[key] = bytes(exported.serialize())
        return key


type Constant = jax.Array | np.ndarray


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job, and what the driver knows of the step's arguments and results.

    Attributes:
        inputs: each input of the step, where it is before.
        outputs: each output, where it is afterwards; a constant as itself.
        donated: numbers of the inputs whose memory it may reuse.
        functions: for each task the function that was exported, before it was, and what it takes.
    """

    job: Job
    program: Program
    inputs: tuple[Array, ...]
    outputs: tuple[Array | Constant, ...]
    donated: frozenset[int] = frozenset()
    functions: Mapping[str, tuple[jax.stages.Wrapped, tuple[Any, ...]]] = field(default_factory=dict)


def _mesh_of(stage: Stage) -> StageMesh:
    return StageMesh(stage.devices, stage.mesh_shape, stage.axis_names)


def prepare_state(step: StepGraph, places: Sequence[Array], platform: str) -> Prepared:
    """The job that makes a state: each mesh computes the outputs that have their `places` on it, of all arguments."""
    meshes = tuple(dict.fromkeys(each.place.mesh for each in places))
    exports = Exports(platform)
    calls, inputs, outputs, wholes = {}, [], [], {}
    for number, mesh in enumerate(meshes):
        made = [(o, replace(each, name=f"out{o}")) for o, each in enumerate(places) if each.place.mesh == mesh]
        operands = tuple(
            Array.of(f"in{i}", aval, mesh, ((),) * aval.ndim) for i, aval in enumerate(map(aval_of, step.jaxpr.invars))
        )
        results = tuple(each for _, each in made)
        function = part_of_state(step, [o for o, _ in made], mesh.logical.abstract())
        key = exports.add(function, jax.tree.leaves(step.in_avals), operands, results)
        calls[Run(number, "S")] = Call(key, operands, results)
        inputs += [Input(i, number, each, (each,)) for i, each in enumerate(operands)]
        outputs += [Output(o, number, (each,), each) for o, each in made]
        wholes |= dict(made)
    program = Program(tuple(mesh.devices for mesh in meshes), tuple((Run(m, "S"),) for m in range(len(meshes))))
    job = Job(
        exports.programs,
        program.meshes,
        tuple(walk(program)),
        calls,
        {},
        tuple(inputs),
        tuple(outputs),
        ((),) * len(meshes),
    )
    return Prepared(job, program, (), tuple(wholes[o] for o in range(len(wholes))))


def prepare(planned: PlannedStep, platform: str, donated: frozenset[int]) -> Prepared:
    """Return the job of a planned step.

    Args:
        platform: "cpu" or "cuda".
        donated: numbers of the inputs whose memory the step may reuse.
    """
    return _Exporter(planned, platform, donated).prepared()


class _Exporter:
    def __init__(self, planned: PlannedStep, platform: str, donated: frozenset[int]) -> None:
        self._planned, self._donated = planned, donated
        self._step, self._cut, self._names = planned.step, planned.cut, planned.names
        self._meshes = [_mesh_of(stage) for stage in planned.plan.stages]
        self._exports = Exports(platform)
        self._count = self._step.num_micro_batches

    def prepared(self) -> Prepared:
        program = self._planned.program
        order = tuple(walk(program))
        functions = {
            function.task: function
            for number, mesh in enumerate(self._meshes)
            for function in lower_stage(self._planned, number, mesh.logical.abstract(), self._donated)
        }
        keys = {
            task: self._exports.add(each.jitted, each.in_avals, self._operands(each, 0), self._results(each, 0))
            for task, each in functions.items()
        }
        calls = {
            run: self._call(run, functions[task_of(run)], keys[task_of(run)])
            for _, run in order
            if isinstance(run, Run)
        }
        homes = tuple(self._home(i) for i in range(len(self._step.jaxpr.invars)))
        outputs = self._outputs()
        inputs = tuple(each for i, home in enumerate(homes) for each in self._inputs(i, home))
        deliveries = self._deliveries()
        job = Job(
            programs=self._exports.programs,
            meshes=program.meshes,
            order=order,
            calls=calls,
            deliveries=deliveries,
            spreads=_spreads(inputs, len(deliveries)),
            inputs=inputs,
            outputs=tuple(each for each in outputs if isinstance(each, Output)),
            zeros=self._zeros(),
            chunks=self._step.chunks,
        )
        wholes = tuple(each.whole if isinstance(each, Output) else each for each in outputs)
        jitted = {run.task: (functions[task_of(run)].jitted, functions[task_of(run)].in_avals) for run in calls}
        return Prepared(job, program, homes, wholes, self._donated, jitted)

    def _array(self, stage: int, var: Var, name: str) -> Array:
        values = self._planned.values[stage]
        aval = jax.ShapeDtypeStruct(values.shape(var), aval_of(var).dtype)
        return Array.of(name, aval, self._meshes[stage], values.spec(var))

    def _operands(self, function: TaskFunction, micro_batch: int) -> tuple[Array, ...]:
        return self._named(function.task.stage, (*function.reads, *function.sums), micro_batch)

    def _results(self, function: TaskFunction, micro_batch: int) -> tuple[Array, ...]:
        return self._named(function.task.stage, (*function.results, *function.sums), micro_batch)

    def _named(self, stage: int, variables: Sequence[Var], micro_batch: int) -> tuple[Array, ...]:
        return tuple(self._array(stage, v, self._names.of(v, micro_batch)) for v in variables)

    def _call(self, run: Run, function: TaskFunction, key: str) -> Call:
        micro_batch = micro_batch_of(run)
        operands, results = self._operands(function, micro_batch), self._results(function, micro_batch)
        return Call(key, operands, results, function.donated)

    def _deliveries(self) -> dict[tuple[str, int], Delivery]:
        found = {}
        for number, ((name, to), crossing) in enumerate(self._planned.instructions.crossings.items()):
            sent, wanted = (self._array(stage, crossing.var, name) for stage in (crossing.source, crossing.to))
            ends = [(each.place.mesh.logical, each.place.spec) for each in (sent, wanted)]
            plan = reshard(sent.shape, ends[0], ends[1])
            found[name, to] = Delivery(number, plan, sent.dtype, sent.place.mesh, wanted.place.mesh)
        return found

    def _mesh_of(self, stage: int) -> int:
        return self._planned.schedule.pipeline.mesh_of(stage)

    def _home(self, i: int) -> Array:
        """Input `i` before the step."""
        aval = jax.tree.leaves(self._step.in_avals)[i]
        stage, var = self._cut.input_stages[i][0], self._step.jaxpr.invars[i]
        spec = self._planned.values[stage].spec(var)
        return Array.of(f"in{i}", aval, self._meshes[stage], spec)

    def _inputs(self, i: int, home: Array) -> list[Input]:
        """Input `i` for every mesh that reads it and is not sent it."""
        var, stages = self._step.jaxpr.invars[i], self._cut.input_stages[i]
        is_sent = i in self._step.carried.values()  # by an instruction, to all but the first
        count = self._cut.micro_batches(i)
        is_cut = i in self._step.batch and not self._cut.is_whole_step
        found = []
        for mesh in dict.fromkeys(map(self._mesh_of, stages[:1] if is_sent else stages)):
            names = [f"in{i}.{k}" for k in range(count)] if is_cut else [f"in{i}"]
            reader, read = self._planned.instructions.readers.get((mesh, names[0]), (stages[0], var))
            parts = tuple(self._array(reader, read, name) for name in names)
            found.append(Input(i, mesh, home, parts))
        return found

    def _zeros(self) -> tuple[tuple[Array, ...], ...]:
        found: list[list[Array]] = [[] for _ in self._planned.program.meshes]
        for task, totals in self._cut.totals.items():
            for each in totals:
                found[self._mesh_of(task.stage)].append(self._array(task.stage, each.sum, self._names.of(each.sum, 0)))
        return tuple(map(tuple, found))

    def _outputs(self) -> list[Output | Constant]:
        """Every output, each an array of its own, as `autopar.runtime.argument_placement.outputs_of` has them."""
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
        step, cut = self._step, self._cut
        if isinstance(atom, Literal) or atom in step.jaxpr.constvars:
            value = atom.val if isinstance(atom, Literal) else step.jaxpr.consts[step.jaxpr.constvars.index(atom)]
            return value if is_key(aval_of(atom).dtype) else np.asarray(value, aval_of(atom).dtype)
        if atom in cut.joined:
            part = cut.joined[atom]
            stage = cut.made_by[part].stage
            parts = tuple(self._array(stage, part, self._names.of(part, k)) for k in range(self._count))
            shape = (parts[0].shape[0] * self._count, *parts[0].shape[1:])
            return Output(o, self._mesh_of(stage), parts, replace(parts[0], name=f"out{o}", shape=shape))
        if atom in cut.made_by:
            stage = cut.made_by[atom].stage
            made = self._array(stage, atom, self._names.of(atom, 0))
        else:  # an input as it is
            i = step.jaxpr.invars.index(atom)
            stage, made = cut.input_stages[i][0], self._home(i)
        return Output(o, self._mesh_of(stage), (made,), made)


def _spreads(inputs: Sequence[Input], number: int) -> dict[tuple[int, int], Delivery]:
    """What brings inputs from their homes to the other meshes that read them, as these want them; numbered from `number` on."""
    found = {}
    for each in inputs:
        home, place = each.home.place, each.parts[0].place
        if place.mesh.devices != home.mesh.devices:
            plan = reshard(each.home.shape, (home.mesh.logical, home.spec), (place.mesh.logical, place.spec))
            found[each.number, each.mesh] = Delivery(number + len(found), plan, each.home.dtype, home.mesh, place.mesh)
    return found
