"""A backend for the hosts of a Ray cluster: workers compile and run what the driver exports."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, override

from autopar.checkpoint.manifest import SavedArray
from autopar.devices import Devices, logical_mesh
from autopar.hosts.arrays import DistributedArray, plain
from autopar.hosts.driver import RayHosts
from autopar.hosts.job_export import export_state
from autopar.hosts.layout import check_plan, cluster_of_hosts, mesh_shape
from autopar.hosts.remote_batches import put_on_workers, read_by_workers
from autopar.hosts.remote_executable import RemoteExecutable
from autopar.ir.step_graph import StepGraph
from autopar.lowering.job import Array, Place
from autopar.lowering.placement_specs import PlacementSpec
from autopar.lowering.planned import PlannedStep
from autopar.methods import PlanningMethod
from autopar.plan import Plan
from autopar.planning.method_planning import Target
from autopar.runtime.batch_reading import Batches
from autopar.runtime.create_state import CreateStateExecutable
from autopar.runtime.executable import Executable
from autopar.runtime.local_backend import Backend, Present
from simulator.hardware.heterogeneous import AnyCluster


class RayBackend(Backend):
    """The hosts of a Ray cluster."""

    def __init__(self, hosts: RayHosts) -> None:
        self.hosts = hosts

    @override
    def target(self, method: PlanningMethod) -> Target:
        mesh = logical_mesh(mesh_shape(self.hosts.layout, method.devices))
        return Target(mesh, self.cluster(method.cluster, {}), platform=self.hosts.platform)

    @override
    def devices_of_plan(self, plan: Plan, devices: Devices) -> Present:
        check_plan(self.hosts.layout, plan, devices)
        return {}

    @override
    def hardware(self, present: Present) -> AnyCluster:
        return cluster_of_hosts(self.hosts.layout)

    @override
    def load(
        self,
        planned: PlannedStep,
        present: Present,
        donated: frozenset[int] = frozenset(),
        plan_seconds: float = 0.0,
    ) -> RemoteExecutable:
        return RemoteExecutable(planned, self.hosts, donated, plan_seconds)

    @override
    def load_state(self, step: StepGraph, executable: Executable) -> CreateStateExecutable:
        return CreateStateExecutable(step, executable, partial(_RemoteState, self.hosts))

    @override
    def put(self, specs: Sequence[PlacementSpec]) -> Callable[[int, Any], DistributedArray]:
        return put_on_workers(self.hosts, specs)

    @override
    def read(
        self, batches: Batches, specs: Sequence[PlacementSpec], steps: Iterator[int], prefetch: int
    ) -> Iterator[list[DistributedArray]]:
        return read_by_workers(self.hosts, batches, specs, steps, prefetch)

    @override
    def restore(
        self, folder: Path, wanted: Sequence[tuple[SavedArray, PlacementSpec]], verify: bool
    ) -> list[DistributedArray]:
        return self.hosts.restore(
            folder, [(saved, Place.of(spec)) for saved, spec in wanted], verify
        )


class _RemoteState:
    """The job of a state on the workers, which forget it when this object is garbage."""

    def __init__(self, hosts: RayHosts, step: StepGraph, places: Sequence[Array]) -> None:
        job = export_state(step, places, hosts.platform)
        self._hosts = hosts
        self._outputs = {output.number: output.value for output in job.outputs}
        self._number = hosts.load(job, self)

    def __call__(self, leaves: Sequence[Any]) -> Mapping[int, DistributedArray]:
        return self._hosts.run(self._number, [plain(leaf) for leaf in leaves], self._outputs)
