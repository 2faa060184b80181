"""Planned steps on the devices of this process."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import Var
from jax.sharding import Mesh

from autopar import graph, report
from autopar.pipeline.partition import Task
from autopar.planned import PlannedStep
from autopar.runtime.argument_placement import Inputs, outputs_of
from autopar.runtime.dispatch import Dispatcher
from autopar.runtime.executable import Executable
from autopar.runtime.tasks import CompiledTask, compile_tasks
from autopar.runtime.timing import dummy_inputs, executed_timeline
from autopar.runtime.transports import Transport, default_transport
from autopar.runtime.value_placement import Places
from autopar.target import memory_of
from autopar.util import benchmark_func
from simulator.memory import MemoryUse
from simulator.timeline import Timeline


class LocalExecutable(Executable):
    """One step on the devices of this process; see `Executable`.

    Attributes:
        meshes: the devices of each stage.
        inputs, outputs, dispatcher: the parts of a call: arguments in, instructions, results out.
    """

    tasks: Mapping[Task, CompiledTask]

    def __init__(
        self,
        planned: PlannedStep,
        meshes: Sequence[Mesh],
        donated: frozenset[int] = frozenset(),
        plan_seconds: float = 0.0,
        transport: Transport = default_transport,
    ) -> None:
        """Compile a planned step.

        Args:
            donated: numbers of the inputs whose memory the step may reuse.
            transport: how values get from mesh to mesh.
        """
        self.planned, self.meshes, self.plan_seconds = planned, tuple(meshes), plan_seconds
        start = time.perf_counter()
        places = Places(planned, meshes)
        self.tasks = compile_tasks(planned, meshes, donated)
        self.inputs, self.outputs = Inputs(places), outputs_of(places, donated)
        self.dispatcher = Dispatcher(places, self.tasks, transport)
        self.in_shardings: Any = jax.tree.unflatten(self.step.in_tree, self.inputs.homes)
        self.out_shardings: Any = jax.tree.unflatten(self.step.out_tree, [each.sharding for each in self.outputs])
        self.compile_seconds = time.perf_counter() - start

    # -- running

    def shard_args(self, *args: Any) -> tuple[Any, ...]:
        return tuple(jax.device_put(arg, shardings) for arg, shardings in zip(args, self.in_shardings, strict=True))

    def __call__(self, *args: Any) -> Any:
        leaves = self.step.leaves(args)
        for leaf, home in zip(leaves, self.inputs.homes, strict=True):
            if (sharding := getattr(leaf, "sharding", None)) is not home and sharding != home:
                raise ValueError("an argument is not where the plan wants it; see shard_args")
        values = self.inputs.start(leaves)
        self.dispatcher.run(values)
        return jax.tree.unflatten(self.step.out_tree, [each.take(values) for each in self.outputs])

    # -- what it is

    def get_input_placement_specs(self) -> Any:
        avals = jax.tree.leaves(self.step.in_avals)
        mesh_of = self.planned.schedule.pipeline.mesh_of
        meshes = [mesh_of(self.planned.cut.input_stages[i][0]) for i in range(len(avals))]
        return jax.tree.unflatten(self.step.in_tree, map(report.placed, avals, self.inputs.homes, meshes))

    def get_output_placement_specs(self) -> Any:
        specs = []
        for atom, output in zip(self.step.jaxpr.outvars, self.outputs, strict=True):
            aval = graph.aval_of(atom)
            if isinstance(atom, Var) and atom in self.planned.cut.joined:
                aval = aval.update(shape=(aval.shape[0] * self.step.num_micro_batches, *aval.shape[1:]))
            specs.append(report.placed(aval, output.sharding, output.mesh))
        return jax.tree.unflatten(self.step.out_tree, specs)

    # -- what it needs

    @property
    def devices(self) -> list[Any]:
        """The devices of all stages, each once."""
        return list(dict.fromkeys(device for mesh in self.meshes for device in mesh.devices.flat))

    def get_stage_allocation_size(self) -> dict[Task, MemoryUse]:
        return {task: memory_of(each.compiled) for task, each in self.tasks.items()}

    @property
    def platform(self) -> str:
        return self.meshes[0].devices.flat[0].platform

    def _text(self, task: Task, status: report.TaskStatus) -> str:
        if status == "optimized":
            return self.tasks[task].compiled.as_text() or ""
        function = self.tasks[task].function
        lowered = function.jitted.lower(*function.in_avals)
        if status == "annotated":
            return lowered.as_text()
        return report.partitioned(lowered, self.meshes[task.stage].devices.size)

    # -- how long it takes

    def profile_with_dummy_inputs(self, warmup: int = 1, number: int = 3, repeat: int = 3) -> np.ndarray:
        leaves = dummy_inputs(self)

        def run() -> None:
            results = jax.tree.leaves(self(*jax.tree.unflatten(self.step.in_tree, leaves)))
            for output, i in self.step.carried.items():
                leaves[i] = results[output]

        return benchmark_func(run, self.sync, warmup, repeat, number)

    def dump_stage_execution_trace(self, file: str | Path) -> Timeline:
        executed_timeline(self, dummy_inputs(self))  # the first time is slower
        timeline = executed_timeline(self, dummy_inputs(self))
        timeline.save_chrome_trace(file)
        return timeline

    def sync(self) -> None:
        for device in self.devices:
            jax.device_put(0, device).block_until_ready()
