"""The hosts of a Ray cluster as a backend: planned steps are exported here, and compiled and run there."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from autopar.checkpoint.manifest import SavedArray
from autopar.devices import Devices, logical_mesh
from autopar.hosts.arrays import DistributedArray
from autopar.hosts.driver import RayHosts, check_plan, cluster_of_hosts, mesh_shape
from autopar.hosts.remote_batches import put_on_workers, read_by_workers
from autopar.hosts.remote_create_state import RemoteCreateState
from autopar.hosts.remote_executable import RemoteExecutable
from autopar.ir.step_graph import StepGraph
from autopar.lowering.job import Place
from autopar.lowering.placement_specs import PlacementSpec
from autopar.lowering.planned import PlannedStep
from autopar.methods import Method, PlanningMethod
from autopar.plan import Plan
from autopar.planning.method_planning import Target, any_cluster
from autopar.runtime.batch_reading import Batches
from autopar.runtime.executable import Executable
from autopar.runtime.local_backend import Present
from simulator.hardware.heterogeneous import AnyCluster


class RayBackend:
    """The hosts of a Ray cluster; see `autopar.runtime.local_backend.Backend`."""

    def __init__(self, hosts: RayHosts) -> None:
        self.hosts = hosts

    def target(self, method: PlanningMethod) -> Target:
        """See `Backend`."""
        mesh = logical_mesh(mesh_shape(self.hosts, method.devices))
        return Target(mesh, self.cluster(method, {}), platform=self.hosts.platform)

    def devices_of_plan(self, plan: Plan, devices: Devices) -> Present:
        """See `Backend`."""
        check_plan(self.hosts, plan, devices)
        return {}

    def devices_of(self, executable: Executable) -> Present:
        """See `Backend`."""
        if not isinstance(executable, RemoteExecutable) or executable.hosts is not self.hosts:
            raise ValueError("the step has not been compiled for these hosts yet; call it first")
        return {}

    def cluster(self, method: Method, present: Present) -> AnyCluster:
        """See `Backend`."""
        given = method.cluster if isinstance(method, PlanningMethod) else None
        return cluster_of_hosts(self.hosts) if given is None else any_cluster(given)

    def load(
        self,
        planned: PlannedStep,
        present: Present,
        donated: frozenset[int] = frozenset(),
        plan_seconds: float = 0.0,
    ) -> RemoteExecutable:
        """See `Backend`."""
        return RemoteExecutable(planned, self.hosts, donated, plan_seconds)

    def load_state(self, step: StepGraph, executable: Executable) -> RemoteCreateState:
        """See `Backend`."""
        assert isinstance(executable, RemoteExecutable)
        return RemoteCreateState(step, executable)

    def put(self, specs: Sequence[PlacementSpec]) -> Callable[[int, Any], DistributedArray]:
        """See `Backend`."""
        return put_on_workers(self.hosts, specs)

    def read(
        self, batches: Batches, specs: Sequence[PlacementSpec], steps: Iterator[int], prefetch: int
    ) -> Iterator[list[DistributedArray]]:
        """See `Backend`."""
        return read_by_workers(self.hosts, batches, specs, steps, prefetch)

    def restore(
        self, folder: Path, wanted: Sequence[tuple[SavedArray, PlacementSpec]], verify: bool
    ) -> list[DistributedArray]:
        """See `Backend`."""
        return self.hosts.restore(
            folder, [(saved, Place.of(spec)) for saved, spec in wanted], verify
        )
