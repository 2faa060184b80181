"""Export planned steps as jobs for workers: every task exported for devices elsewhere, every value named."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import jax

from autopar.ir.graph import aval_of
from autopar.ir.keys import data_aval, on_data
from autopar.ir.step_graph import StepGraph
from autopar.lowering.compilation import lower_stage
from autopar.lowering.instructions import task_of
from autopar.lowering.job import Array, Call, Input, Job, Output
from autopar.lowering.job_description import JobDescription, describe_job, mesh_of
from autopar.lowering.planned import PlannedStep
from autopar.runtime.create_state import part_of_state
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
        self,
        function: Callable[..., Any],
        avals: Sequence[Any],
        operands: Sequence[Array],
        results: Sequence[Array],
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


def export_job(planned: PlannedStep, platform: str, donated: frozenset[int]) -> JobDescription:
    """Return the job of a planned step with its programs exported, for devices elsewhere.

    Args:
        platform: "cpu" or "cuda".
        donated: numbers of the inputs whose memory the step may reuse.
    """
    functions = {
        function.task: function
        for number, stage in enumerate(planned.plan.stages)
        for function in lower_stage(planned, number, mesh_of(stage).logical.abstract(), donated)
    }
    described, exports = (
        describe_job(planned, functions, donated, keys_as_data=True),
        Exports(platform),
    )
    keys: dict[str, str] = {}
    for run, call in described.job.calls.items():
        if run.task not in keys:
            function = functions[task_of(run)]
            keys[run.task] = exports.add(
                function.jitted, function.in_avals, call.operands, call.results
            )
    calls = {
        run: replace(call, program=keys[call.program]) for run, call in described.job.calls.items()
    }
    return replace(described, job=replace(described.job, programs=exports.programs, calls=calls))


def export_state(step: StepGraph, places: Sequence[Array], platform: str) -> JobDescription:
    """Return the job that makes a state: each mesh computes the outputs that have their `places` on it, of all arguments."""
    meshes = tuple(dict.fromkeys(each.place.mesh for each in places))
    exports = Exports(platform)
    calls, inputs, outputs, wholes = {}, [], [], {}
    for number, mesh in enumerate(meshes):
        made = [
            (o, replace(each, name=f"out{o}"))
            for o, each in enumerate(places)
            if each.place.mesh == mesh
        ]
        operands = tuple(
            Array.of(f"in{i}", aval, mesh, ((),) * aval.ndim)
            for i, aval in enumerate(map(aval_of, step.jaxpr.invars))
        )
        results = tuple(each for _, each in made)
        function = part_of_state(step, [o for o, _ in made], mesh.logical.abstract())
        key = exports.add(function, jax.tree.leaves(step.in_avals), operands, results)
        calls[Run(number, "S")] = Call(key, operands, results)
        inputs += [Input(i, number, each, (each,)) for i, each in enumerate(operands)]
        outputs += [Output(o, number, (each,), each) for o, each in made]
        wholes |= dict(made)
    program = Program(
        tuple(mesh.devices for mesh in meshes), tuple((Run(m, "S"),) for m in range(len(meshes)))
    )
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
    return JobDescription(job, (), tuple(wholes[o] for o in range(len(wholes))))
