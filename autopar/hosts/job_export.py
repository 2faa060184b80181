"""Export of jobs to workers: programs are compiled for devices of other hosts and serialized."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import jax

from autopar.ir.graph import all_eqns, listed, source_line
from autopar.ir.keys import data_aval, on_data
from autopar.ir.step_graph import StepGraph
from autopar.lowering.compilation import lower_stage
from autopar.lowering.instructions import task_of
from autopar.lowering.job import Array, Job, StageMesh
from autopar.lowering.job_description import JobDescription, describe_job, mesh_of
from autopar.lowering.planned import PlannedStep
from autopar.runtime.create_state import part_of_state, state_job

_CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print"})
"""Primitives that call functions of this process."""


@dataclass(slots=True)
class Exports:
    """Programs exported for one platform, without duplicates.

    Attributes:
        platform: "cpu" or "cuda".
        programs: serialized programs by key, the SHA-256 of their text.
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
        """Export a function and return the key of its program.

        The program takes and returns the data of random keys.

        Args:
            function: takes arrays as arguments and returns a list of arrays.
            avals: types of the arguments.
            operands: types and places of the arguments as the program takes them.
            results: types and places of the results.
        """
        jitted = jax.jit(
            on_data(function, avals),
            in_shardings=[operand.place.abstract() for operand in operands],
            out_shardings=[result.place.abstract() for result in results],
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
        planned: the traced step and its plan.
        platform: "cpu" or "cuda".
        donated: numbers of the inputs whose memory the step may reuse.

    Raises:
        ValueError: the step calls Python.
    """
    _check_callbacks(planned.step)
    functions = {
        function.task: function
        for number, stage in enumerate(planned.plan.stages)
        for function in lower_stage(planned, number, mesh_of(stage).logical.abstract(), donated)
    }
    description = describe_job(planned, functions, donated, keys_as_data=True)
    exports = Exports(platform)
    key_of_task: dict[str, str] = {}
    for run, call in description.job.calls.items():
        if run.task not in key_of_task:
            function = functions[task_of(run)]
            key_of_task[run.task] = exports.add(
                function.jitted, function.in_avals, call.operands, call.results
            )
    calls = {
        run: replace(call, program=key_of_task[call.program])
        for run, call in description.job.calls.items()
    }
    job = replace(description.job, programs=exports.programs, calls=calls)
    return replace(description, job=job)


def _check_callbacks(step: StepGraph) -> None:
    """Raise ValueError if a step calls Python, whose functions programs for hosts don't contain."""
    callbacks = [
        f"{eqn.primitive.name} ({source_line(eqn)})"
        for eqn in all_eqns(step.jaxpr)
        if eqn.primitive.name in _CALLBACKS
    ]
    if callbacks:
        raise ValueError(
            f"{step.name} calls Python by {listed(callbacks)}, and hosts run compiled programs"
            " without it; leave the call out, or run the step in one process, without"
            " autopar.init(cluster='ray')"
        )


def export_state(step: StepGraph, places: Sequence[Array], platform: str) -> Job:
    """Return the job that creates a state, with its programs exported for devices elsewhere.

    Args:
        step: the traced function that returns the state.
        places: type and place of each output.
        platform: "cpu" or "cuda".
    """
    exports = Exports(platform)
    avals = jax.tree.leaves(step.in_avals)

    def export(
        mesh: StageMesh,
        outputs: Sequence[int],
        operands: Sequence[Array],
        results: Sequence[Array],
    ) -> str:
        function = part_of_state(step, outputs, mesh.logical.abstract())
        return exports.add(function, avals, operands, results)

    job = state_job(step, places, export, keys_as_data=True)
    return replace(job, programs=exports.programs)
