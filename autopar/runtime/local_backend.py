"""Backends: the devices of this process, or the hosts of a Ray cluster.

`autopar.hosts.ray_backend` has the latter.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, override

import jax
import numpy as np

from autopar.devices import Device, Devices, cluster_of, device_mesh, devices_of_plan, submeshes
from autopar.ir.spec import LogicalMesh
from autopar.ir.step_graph import StepGraph
from autopar.lowering.job import Array, Delivery, StageMesh
from autopar.lowering.placement_specs import PlacementSpec
from autopar.lowering.planned import PlannedStep
from autopar.methods import PlanningMethod
from autopar.plan import Plan
from autopar.planning.method_planning import Target, any_cluster
from autopar.runtime.batch_reading import Batches, Reader, ahead
from autopar.runtime.create_state import (
    CreateStateExecutable,
    RunState,
    part_of_state,
    state_job,
)
from autopar.runtime.executable import Executable
from autopar.runtime.loaded_job import Carrier, LoadedJob
from autopar.runtime.local_executable import LocalExecutable
from simulator.hardware.heterogeneous import AnyCluster

type Present = Mapping[int, Device]
"""Devices of this process by their number in plans; empty if the devices are on other hosts."""


class Backend(ABC):
    """Devices that planned steps are compiled for and run on.

    Attributes:
        hosts: the hosts of a Ray cluster; None for this process.
    """

    hosts: Any = None

    @abstractmethod
    def target(self, method: PlanningMethod) -> Target:
        """Return the hardware that a method plans for.

        Raises:
            ValueError: the method names devices that the backend does not have.
        """

    @abstractmethod
    def devices_of_plan(self, plan: Plan, devices: Devices) -> Present:
        """Return the devices that run a plan from elsewhere.

        Args:
            plan: the plan.
            devices: the devices that the user asks for.

        Raises:
            ValueError: their number differs from the plan's.
        """

    def devices_of(self, executable: Executable) -> Present:
        """Return the devices of this process that a step runs on.

        Raises:
            ValueError: the step was compiled for another backend.
        """
        if executable.hosts is not self.hosts:
            raise ValueError(
                "the step was compiled for other devices than those of the last autopar.init;"
                " compile it after that call"
            )
        return executable.present

    @abstractmethod
    def hardware(self, present: Present) -> AnyCluster:
        """Return the cost model's description of the given devices."""

    def cluster(self, given: AnyCluster | str | Path | None, present: Present) -> AnyCluster:
        """Return the cluster that the cost model describes.

        Args:
            given: the cluster of a method; None for the devices.
            present: the devices.
        """
        return self.hardware(present) if given is None else any_cluster(given)

    @abstractmethod
    def load(
        self,
        planned: PlannedStep,
        present: Present,
        donated: frozenset[int] = frozenset(),
        plan_seconds: float = 0.0,
    ) -> Executable:
        """Compile a planned step.

        Args:
            planned: the traced step and its plan.
            present: the devices of this process that it runs on.
            donated: numbers of the inputs whose memory the step may reuse.
            plan_seconds: seconds that tracing and planning took.
        """

    @abstractmethod
    def load_state(self, step: StepGraph, executable: Executable) -> CreateStateExecutable:
        """Compile a function that creates a state.

        Args:
            step: the traced function.
            executable: the step whose first argument is the state, and which says where it goes.
        """

    @abstractmethod
    def put(self, specs: Sequence[PlacementSpec]) -> Callable[[int, Any], Any]:
        """Return a function of a number and an array that puts the array where that spec says."""

    @abstractmethod
    def read(
        self, batches: Batches, specs: Sequence[PlacementSpec], steps: Iterator[int], prefetch: int
    ) -> Iterator[list[Any]]:
        """Yield the arrays of each batch, read by the processes that own the target devices.

        Args:
            batches: the batches and the user's function that reads them.
            specs: the place of each array.
            steps: numbers of the batches.
            prefetch: number of further batches that are read meanwhile.

        Raises:
            DataLoaderError: a batch can't be read.
        """

    @abstractmethod
    def restore(
        self, folder: Path, wanted: Sequence[tuple[Any, PlacementSpec]], verify: bool
    ) -> list[Any] | None:
        """Return the arrays of a checkpoint, read by the hosts that store them.

        Args:
            folder: the folder of the checkpoint.
            wanted: `autopar.checkpoint.manifest.SavedArray`s and their places.
            verify: whether to compare checksums.

        Returns:
            The arrays, or None if this process should read them itself.
        """


class LocalBackend(Backend):
    """The devices of this process."""

    @override
    def target(self, method: PlanningMethod) -> Target:
        mesh = device_mesh(method.devices)
        present = dict(enumerate(mesh.devices.flat))
        logical = LogicalMesh(mesh.devices.shape, mesh.axis_names)
        return Target(logical, self.cluster(method.cluster, present), present, present[0].platform)

    @override
    def devices_of_plan(self, plan: Plan, devices: Devices) -> Present:
        return dict(enumerate(devices_of_plan(devices, plan)))

    @override
    def hardware(self, present: Present) -> AnyCluster:
        return cluster_of(device_mesh(list(present.values())))

    @override
    def load(
        self,
        planned: PlannedStep,
        present: Present,
        donated: frozenset[int] = frozenset(),
        plan_seconds: float = 0.0,
    ) -> LocalExecutable:
        meshes = submeshes(present, planned.plan.stages)
        return LocalExecutable(planned, meshes, donated, plan_seconds)

    @override
    def load_state(self, step: StepGraph, executable: Executable) -> CreateStateExecutable:
        return CreateStateExecutable(
            step, executable, partial(_load_state_job, self.devices_of(executable))
        )

    @override
    def put(self, specs: Sequence[PlacementSpec]) -> Callable[[int, Any], jax.Array]:
        shardings = [spec.sharding() for spec in specs]
        return lambda i, leaf: jax.device_put(leaf, shardings[i])

    @override
    def read(
        self, batches: Batches, specs: Sequence[PlacementSpec], steps: Iterator[int], prefetch: int
    ) -> Iterator[list[jax.Array]]:
        reader = Reader(batches, {i: spec.sharding() for i, spec in enumerate(specs)})
        thread = ThreadPoolExecutor(1, "autopar-reader")
        try:
            for reading in ahead((thread.submit(reader.read, step) for step in steps), prefetch):
                yield list(reading.result().values())
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    @override
    def restore(
        self, folder: Path, wanted: Sequence[tuple[Any, PlacementSpec]], verify: bool
    ) -> None:
        return None


def _load_state_job(devices: Present, step: StepGraph, places: Sequence[Array]) -> RunState:
    """Compile the job of a state for devices of this process."""
    avals = jax.tree.leaves(step.in_avals)
    programs: dict[str, jax.stages.Compiled] = {}

    def compile_part(
        mesh: StageMesh,
        outputs: Sequence[int],
        operands: Sequence[Array],
        results: Sequence[Array],
    ) -> str:
        jitted = jax.jit(
            part_of_state(step, outputs, mesh.on(devices)),
            in_shardings=[operand.place.sharding(devices) for operand in operands],
            out_shardings=[result.place.sharding(devices) for result in results],
        )
        name = f"mesh{len(programs)}"
        programs[name] = jitted.lower(*avals).compile()
        return name

    job = state_job(step, places, compile_part, keys_as_data=False)
    loaded = LoadedJob(job, devices, lambda _, call: programs[call.program], _no_carrier)

    def run(leaves: Sequence[Any]) -> dict[int, jax.Array]:
        arrays = [leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for leaf in leaves]
        values = loaded.run({}, dict(enumerate(arrays)))
        return {output.number: loaded.take(output, values) for output in job.outputs}

    return run


def _no_carrier(delivery: Delivery) -> Carrier:
    raise AssertionError("the job of a state has no deliveries")


LOCAL = LocalBackend()

_current: Backend = LOCAL


def backend() -> Backend:
    """Return the backend that steps are compiled for now."""
    return _current


def use_backend(new: Backend) -> None:
    """Compile steps for another backend from now on."""
    global _current
    _current = new
