"""Creation of a state on the devices where a training step reads it, as a job."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import Literal

from autopar.ir import graph
from autopar.ir.evaluate import evaluate, unchanged
from autopar.ir.spec import AnyMesh
from autopar.ir.step_graph import StepGraph
from autopar.lowering.job import Array, Call, Input, Job, Output, StageMesh
from autopar.lowering.shardwise import shardwise
from autopar.runtime.executable import Executable
from simulator.program import Program, Run, walk

type RunState = Callable[[Sequence[Any]], Mapping[int, Any]]
"""Runs the job of a state on the leaves of the arguments; returns each output by its number."""

type LoadState = Callable[[StepGraph, Sequence[Array]], RunState]
"""Loads the job that computes the outputs of a traced function at the given places."""

type CompilePart = Callable[[StageMesh, Sequence[int], Sequence[Array], Sequence[Array]], str]
"""(mesh, output numbers, operands, results) to the key of the program that computes the outputs."""


class CreateStateExecutable:
    """A function that returns a state, compiled for every mesh that stores a part of it.

    Each mesh computes the part that it stores. The compiler partitions that computation by the
    shardings of the results.

    Attributes:
        step: the traced function.
        train_step: the executable whose first argument is the state.
        out_shardings: a pytree like the state with the shardings that `train_step` expects.
        compile_seconds: seconds of compiling.
    """

    def __init__(self, step: StepGraph, train_step: Executable, load: LoadState) -> None:
        """Compile the function.

        Args:
            step: the traced function.
            train_step: the executable whose first argument is the state.
            load: loads the job where `train_step` runs.
        """
        self.step = step
        self.train_step = train_step
        count = len(step.jaxpr.outvars)
        shardings = jax.tree.leaves(train_step.in_shardings)[:count]
        self.out_shardings: Any = jax.tree.unflatten(step.out_tree, shardings)
        start = time.perf_counter()
        self._run = load(step, train_step.description.inputs[:count])
        self.compile_seconds = time.perf_counter() - start

    @property
    def placed_by(self) -> Executable:
        """The step whose plan places the values: the training step."""
        return self.train_step

    def shard_args(self, *args: Any) -> tuple[Any, ...]:
        """Return `args` unchanged, since every mesh receives all of them."""
        return args

    def __call__(self, *args: Any) -> Any:
        """Return the state."""
        outputs = self._run(self.step.leaves(args))
        return self.step.result.joined([outputs[o] for o in range(len(outputs))])

    def get_output_placement_specs(self) -> Any:
        """Return a pytree like the state, with the training step's `PlacementSpec`s."""
        specs = jax.tree.leaves(self.train_step.get_input_placement_specs())
        return jax.tree.unflatten(self.step.result.tree, specs[: len(self.step.result.paths)])


def state_job(
    step: StepGraph,
    outputs: Sequence[Array],
    compile_part: CompilePart,
    keys_as_data: bool,
) -> Job:
    """Return the job that creates a state: each mesh computes the outputs that it stores.

    Every mesh reads all arguments, replicated over its devices.

    Args:
        step: the traced function.
        outputs: type and place of each output.
        compile_part: compiles the part of one mesh.
        keys_as_data: whether random keys are passed as the integers that they consist of.
    """
    meshes = tuple(dict.fromkeys(output.place.mesh for output in outputs))
    avals = [graph.aval_of(var) for var in step.jaxpr.invars]
    calls: dict[Run, Call] = {}
    job_inputs: list[Input] = []
    job_outputs: list[Output] = []
    for number, mesh in enumerate(meshes):
        operands = tuple(
            Array.of(f"in{i}", aval, mesh, ((),) * aval.ndim, keys_as_data)
            for i, aval in enumerate(avals)
        )
        stored = [o for o, output in enumerate(outputs) if output.place.mesh == mesh]
        results = tuple(replace(outputs[o], name=f"out{o}") for o in stored)
        program = compile_part(mesh, stored, operands, results)
        calls[Run(number, "S")] = Call(program, operands, results)
        job_inputs += [Input(i, number, array, (array,)) for i, array in enumerate(operands)]
        job_outputs += [Output(o, number, array) for o, array in zip(stored, results, strict=True)]
    rows = tuple((Run(number, "S"),) for number in range(len(meshes)))
    program = Program(tuple(mesh.devices for mesh in meshes), rows)
    return Job(
        programs={},
        meshes=program.meshes,
        order=tuple(walk(program)),
        calls=calls,
        deliveries={},
        inputs=tuple(job_inputs),
        outputs=tuple(job_outputs),
        zeros=((),) * len(meshes),
    )


def part_of_state(
    step: StepGraph, outputs: Sequence[int], mesh: AnyMesh
) -> Callable[..., list[jax.Array]]:
    """Return a function of the arguments' leaves that computes only some of the outputs.

    Args:
        step: the traced function.
        outputs: numbers of the outputs.
        mesh: the mesh that computes them.
    """
    jaxpr = step.jaxpr
    wanted = [jaxpr.outvars[o] for o in outputs]
    eqns = graph.needed(enumerate(jaxpr.eqns), wanted)

    def run(*args: Any) -> list[jax.Array]:
        env = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*args, *jaxpr.consts), strict=True))
        evaluate(eqns, env, unchanged, unchanged, shardwise(mesh))
        values = (atom.val if isinstance(atom, Literal) else env[atom] for atom in wanted)
        return [
            jax.lax.convert_element_type(value, graph.aval_of(atom).dtype)
            for value, atom in zip(values, wanted, strict=True)
        ]

    return run


def state_avals(step: StepGraph) -> Any:
    """Return the state that a traced function returns, as a pytree of ShapeDtypeStructs."""
    avals = map(graph.aval_of, step.jaxpr.outvars)
    return jax.tree.unflatten(
        step.out_tree, [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    )
