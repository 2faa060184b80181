"""Backends: where steps run. This process is one; the hosts of a Ray cluster are another (`autopar.hosts.ray_backend`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax

from autopar.devices import Device, Devices, cluster_of, device_mesh, devices_of_plan, submeshes
from autopar.ir.spec import LogicalMesh
from autopar.ir.step_graph import StepGraph
from autopar.lowering.placement_specs import PlacementSpec
from autopar.lowering.planned import PlannedStep
from autopar.methods import Method, PlanningMethod
from autopar.plan import Plan
from autopar.planning.method_planning import Target, any_cluster
from autopar.runtime.batch_reading import Batches, Reader, ahead
from autopar.runtime.create_state import CreateStateExecutable
from autopar.runtime.executable import Executable
from autopar.runtime.local_executable import LocalExecutable
from simulator.hardware.heterogeneous import AnyCluster

type Present = Mapping[int, Device]
"""The devices of this process that a plan may use, by the numbers that plans give them; none where they are on other hosts."""


class Backend(Protocol):
    """Devices that planned steps are compiled for and run on."""

    def target(self, method: PlanningMethod) -> Target:
        """Return the hardware that a method plans for here.

        Raises:
            ValueError: it means devices that are not here.
        """
        ...

    def devices_of_plan(self, plan: Plan, devices: Devices) -> Present:
        """Return the devices for a plan that was made elsewhere, of those that the user means.

        Raises:
            ValueError: they are not as many as the plan has.
        """
        ...

    def devices_of(self, executable: Executable) -> Present:
        """Return the devices that a step runs on.

        Raises:
            ValueError: it runs elsewhere.
        """
        ...

    def cluster(self, method: Method, present: Present) -> AnyCluster:
        """Return the hardware of devices as the cost model knows it; a method may say another one."""
        ...

    def load(
        self,
        planned: PlannedStep,
        present: Present,
        donated: frozenset[int] = frozenset(),
        plan_seconds: float = 0.0,
    ) -> Executable:
        """Compile a planned step.

        Args:
            donated: numbers of the inputs whose memory the step may reuse.
        """
        ...

    def load_state(self, step: StepGraph, executable: Executable) -> Any:
        """Compile a function that makes the state that is the first argument of `executable`, where that wants it."""
        ...

    def put(self, specs: Sequence[PlacementSpec]) -> Callable[[int, Any], Any]:
        """Return a function of a number and an array that puts the array where that spec says."""
        ...

    def read(
        self, batches: Batches, specs: Sequence[PlacementSpec], steps: Iterator[int], prefetch: int
    ) -> Iterator[list[Any]]:
        """Return the arrays of each batch, read where they go while `prefetch` more are being read.

        Raises:
            DataLoaderError: a batch can't be read.
        """
        ...

    def restore(
        self, folder: Path, wanted: Sequence[tuple[Any, PlacementSpec]], verify: bool
    ) -> list[Any] | None:
        """Return the arrays of a checkpoint, read by the hosts that they go to; None if this process is to read them.

        Args:
            wanted: `autopar.checkpoint.manifest.SavedArray`s, and where they go.
        """
        ...


class LocalBackend:
    """The devices of this process."""

    def target(self, method: PlanningMethod) -> Target:
        """See `Backend`."""
        mesh = device_mesh(method.devices)
        present = dict(enumerate(mesh.devices.flat))
        logical, platform = LogicalMesh(mesh.devices.shape, mesh.axis_names), present[0].platform
        return Target(logical, self.cluster(method, present), present, platform)

    def devices_of_plan(self, plan: Plan, devices: Devices) -> Present:
        """See `Backend`."""
        return dict(enumerate(devices_of_plan(devices, plan)))

    def devices_of(self, executable: Executable) -> Present:
        """See `Backend`."""
        if not isinstance(executable, LocalExecutable):
            raise ValueError(
                "the step runs on other hosts, which have been left since; call it first"
            )
        return executable.job.devices

    def cluster(self, method: Method, present: Present) -> AnyCluster:
        """See `Backend`."""
        given = method.cluster if isinstance(method, PlanningMethod) else None
        return (
            cluster_of(device_mesh(list(present.values()))) if given is None else any_cluster(given)
        )

    def load(
        self,
        planned: PlannedStep,
        present: Present,
        donated: frozenset[int] = frozenset(),
        plan_seconds: float = 0.0,
    ) -> LocalExecutable:
        """See `Backend`."""
        return LocalExecutable(
            planned, submeshes(present, planned.plan.stages), donated, plan_seconds
        )

    def load_state(self, step: StepGraph, executable: Executable) -> CreateStateExecutable:
        """See `Backend`."""
        shardings = jax.tree.leaves(executable.in_shardings[0])
        return CreateStateExecutable(
            step, shardings, jax.tree.leaves(executable.get_input_placement_specs()[0])
        )

    def put(self, specs: Sequence[PlacementSpec]) -> Callable[[int, Any], jax.Array]:
        """See `Backend`."""
        shardings = [spec.sharding() for spec in specs]
        return lambda i, leaf: jax.device_put(leaf, shardings[i])

    def read(
        self, batches: Batches, specs: Sequence[PlacementSpec], steps: Iterator[int], prefetch: int
    ) -> Iterator[list[jax.Array]]:
        """See `Backend`; a thread reads."""
        reader = Reader(batches, {i: spec.sharding() for i, spec in enumerate(specs)})
        thread = ThreadPoolExecutor(1, "autopar-reader")
        try:
            for reading in ahead((thread.submit(reader.read, step) for step in steps), prefetch):
                yield list(reading.result().values())
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    def restore(
        self, folder: Path, wanted: Sequence[tuple[Any, PlacementSpec]], verify: bool
    ) -> None:
        """See `Backend`."""


LOCAL = LocalBackend()

_current: Backend = LOCAL


def backend() -> Backend:
    """Return where steps run now."""
    return _current


def use_backend(new: Backend) -> None:
    """Have steps that are compiled from now on run there."""
    global _current
    _current = new
