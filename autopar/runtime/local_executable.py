"""The executable of a planned step on the devices of this process."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar import report
from autopar.devices import Device, check_host_memory
from autopar.ir.graph import Atom, aval_of
from autopar.ir.keys import is_key
from autopar.lowering.instructions import task_of
from autopar.lowering.job import Delivery, Output
from autopar.lowering.job_description import describe_job
from autopar.lowering.planned import PlannedStep
from autopar.pipeline.partition import Task
from autopar.runtime.ambient_mesh import check_axes_are_auto, without_ambient_mesh
from autopar.runtime.carriers import default_carrier
from autopar.runtime.executable import Executable
from autopar.runtime.loaded_job import Carrier, LoadedJob, Values, is_at
from autopar.runtime.preparing import Preparer
from autopar.runtime.tasks import CompiledTask, compile_tasks
from autopar.runtime.timing import dummy_inputs, executed_timeline
from autopar.util import memory_of
from simulator.engine.timeline import Timeline
from simulator.memory import MemoryUse


class LocalExecutable(Executable):
    """A planned step on the devices of this process; see `Executable`.

    Attributes:
        meshes: for each stage its devices.
        job: the step's job, loaded on these devices.
        homes: for each input its sharding before the step.
    """

    tasks: Mapping[Task, CompiledTask]

    @without_ambient_mesh()
    def __init__(
        self,
        planned: PlannedStep,
        meshes: Sequence[Mesh],
        donated: frozenset[int] = frozenset(),
        plan_seconds: float = 0.0,
        carrier: Callable[[Delivery, Mapping[int, Device]], Carrier] = default_carrier,
    ) -> None:
        """Compile a planned step.

        Args:
            planned: the traced step and its plan.
            meshes: for each stage its devices.
            donated: numbers of the inputs whose memory the step may reuse.
            plan_seconds: seconds that tracing and planning took.
            carrier: returns the carrier of a delivery between these devices.

        Raises:
            ValueError: there are several stages, and the mesh of `jax.set_mesh` has explicit axes.
        """
        start = time.perf_counter()
        if len(meshes) > 1:
            check_axes_are_auto()
        if planned.plan.offloaded or planned.plan.offloaded_results:
            check_host_memory(device for mesh in meshes for device in mesh.devices.flat)
        self.planned = planned
        self.meshes = tuple(meshes)
        self.plan_seconds = plan_seconds
        self.tasks = compile_tasks(planned, meshes, donated)
        functions = {task: compiled.function for task, compiled in self.tasks.items()}
        self.description = describe_job(planned, functions, donated, keys_as_data=False)
        devices: dict[int, Device] = {
            number: device
            for stage, mesh in zip(planned.plan.stages, meshes, strict=True)
            for number, device in zip(stage.devices, mesh.devices.flat, strict=True)
        }
        self.job = LoadedJob(
            self.description.job,
            devices,
            lambda run, _: self.tasks[task_of(run)].compiled,
            lambda delivery: carrier(delivery, devices),
        )
        self.homes = [self.job.sharding(array) for array in self.description.inputs]
        preparation = planned.step.preparation
        prepared = [self.job.sharding(array) for array in self.description.prepared]
        count = 0 if preparation is None else len(preparation.places)
        self._prepare = None if preparation is None else Preparer(preparation, prepared[:count])
        first = planned.first_pass
        self._first_pass = first and LocalExecutable(first, meshes, carrier=carrier)
        self._completed = prepared[count:]
        self._outputs = self._output_sources()
        self.in_shardings = jax.tree.unflatten(self.step.in_tree, self.homes)
        out_shardings = [
            self.job.sharding(output.value) if isinstance(output, Output) else self._replicated
            for output in self._outputs
        ]
        self.out_shardings = jax.tree.unflatten(self.step.out_tree, out_shardings)
        self.compile_seconds = time.perf_counter() - start

    @property
    def _replicated(self) -> NamedSharding:
        """The sharding of constants."""
        return NamedSharding(self.meshes[0], PartitionSpec())

    def _output_sources(self) -> list[Output | jax.stages.Wrapped]:
        """Return for each output the job's output, or a function that returns the constant."""
        outputs = {output.number: output for output in self.description.job.outputs}
        sources: list[Output | jax.stages.Wrapped] = []
        for o, atom in enumerate(self.step.jaxpr.outvars):
            if o in outputs:
                sources.append(outputs[o])
            else:
                constant = partial(_constant, self.step.jaxpr, atom)
                sources.append(jax.jit(constant, out_shardings=self._replicated))
        return sources

    # -- running

    @override
    @without_ambient_mesh()
    def shard_args(self, *args: Any) -> tuple[Any, ...]:
        inputs = jax.device_put(self.step.leaves(args), self.homes)
        return self.step.arguments.joined(inputs)

    @override
    @without_ambient_mesh()
    def __call__(self, *args: Any) -> Any:
        leaves = self.step.leaves(args)
        paths = self.step.in_paths[: len(leaves)]  # further inputs are no arguments
        for path, leaf, home in zip(paths, leaves, self.homes, strict=True):
            if not is_at(leaf, home):
                given = getattr(leaf, "sharding", "no sharding")
                raise ValueError(
                    f"argument {path}: given {given}, expected {home}; place the arguments with"
                    " `shard_args`"
                )
        values = self.job.run(self.inputs(leaves), {})
        results = [self._take(output, values) for output in self._outputs]
        return self.step.result.joined(results)

    def inputs(self, leaves: Sequence[jax.Array]) -> dict[int, jax.Array]:
        """Return the inputs of the job by number: the arguments, and what is computed from them."""
        given = self._prepared(leaves)
        if self.first_pass is not None:
            results = self.first_pass(*self._read_by_first_pass(given))
            given += jax.device_put(list(results), self._completed)
            # Several programs with collectives could block all threads of virtual devices.
            if self.platform == "cpu":
                jax.block_until_ready(given)
        return dict(enumerate(given))

    def inputs_of_first_pass(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the inputs of the first pass, from the arguments of a step that has one."""
        return list(self._read_by_first_pass(self._prepared(leaves)))

    def _prepared(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the arguments, and what is computed from them before any microbatch."""
        return [*leaves, *(self._prepare(leaves) if self._prepare else [])]

    def _read_by_first_pass(self, given: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Return the inputs of the first pass, placed where it reads them."""
        assert self.first_pass is not None
        assert self.step.first_pass is not None
        return self.first_pass.shard_args(*(given[i] for i in self.step.first_pass.reads))

    def _take(self, output: "Output | jax.stages.Wrapped", values: Sequence[Values]) -> jax.Array:
        """Return an output; a constant gets new memory, which the next step may reuse."""
        return self.job.take(output, values) if isinstance(output, Output) else output()

    @override
    def sync(self) -> None:
        for device in self.devices:
            jax.device_put(0, device).block_until_ready()

    # -- description

    @property
    def devices(self) -> list[Device]:
        """The devices of all stages, each once."""
        return list(dict.fromkeys(device for mesh in self.meshes for device in mesh.devices.flat))

    @property
    @override
    def first_pass(self) -> "LocalExecutable | None":
        return self._first_pass

    @property
    @override
    def present(self) -> Mapping[int, Device]:
        return self.job.devices

    @property
    @override
    def platform(self) -> str:
        return self.meshes[0].devices.flat[0].platform

    def _device_ids(self, numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.job.devices[number].id for number in numbers)

    def _text(self, task: Task, status: report.TaskStatus) -> str:
        if status == "optimized":
            return self.tasks[task].compiled.as_text() or ""
        function = self.tasks[task].function
        lowered = function.jitted.lower(*function.in_avals)
        if status == "annotated":
            return lowered.as_text()
        return report.partitioned(lowered, self.meshes[task.stage].devices.size)

    @override
    def get_stage_allocation_size(self) -> dict[Task, MemoryUse]:
        return {task: memory_of(compiled.compiled) for task, compiled in self.tasks.items()}

    # -- time

    def _dummy_inputs(self) -> list[jax.Array]:
        return dummy_inputs(self)

    @override
    def execution_timeline(self) -> Timeline:
        executed_timeline(self, dummy_inputs(self))  # the first step is slower
        return executed_timeline(self, dummy_inputs(self))


def _constant(jaxpr: Any, atom: Atom) -> Any:
    """Return the value of an output that is a constant, with the weak type of the trace."""
    value = atom.val if isinstance(atom, Literal) else jaxpr.consts[jaxpr.constvars.index(atom)]
    aval = aval_of(atom)
    if is_key(aval.dtype):
        return value
    if aval.weak_type and not aval.shape:
        return np.asarray(value).item()
    return jnp.asarray(value, aval.dtype)
